//! Whole directories: a store opens what is left of one, refuses it, or serves what was stored.

use crate::records::sealed;
use crate::seeds::STORE;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use tiered_kv::io_seams::{Alignment, Disk, Entropy, ManualClock, MemDisk};
use tiered_kv::{
    BlockKey, Delete, GetOptions, KvLayout, Namespace, NamespaceSpec, PutOptions, Result, Seams,
    Store, StoreConfig,
};

const BLOCK: usize = 5000;
const BLOCKS: u32 = 6;

/// The files of a directory.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) files: Vec<(String, Vec<u8>)>,
}

impl Image {
    pub(crate) fn file(&self, name: &str) -> &[u8] {
        let file = self.files.iter().find(|file| file.0 == name);
        &file.expect("a store writes it").1
    }

    fn of(disk: &dyn Disk) -> Self {
        let names = disk.list().expect("it lists");
        let read = |(name, _): (String, u64)| {
            if let Ok(Some(bytes)) = disk.read_file(&name, 16 << 20) {
                return (name, bytes);
            }
            let (file, bytes) = disk.open(&name).expect("it is there");
            let mut whole = vec![0; bytes as usize];
            disk.read_at(file, 0, &mut whole).expect("it reads");
            (name, whole)
        };
        Self { files: names.into_iter().map(read).collect() }
    }

    fn disk(&self) -> MemDisk {
        let disk = MemDisk::with_alignment(Alignment { memory: 1, offset: 1 });
        for (name, bytes) in &self.files {
            let file = disk.create(name, bytes.len() as u64).expect("there is room");
            disk.write_at(file, 0, bytes).expect("it writes");
        }
        disk
    }
}

struct Fixed;

impl Entropy for Fixed {
    fn fill(&self, bytes: &mut [u8]) {
        bytes.fill(STORE[0]);
    }
}

fn config() -> StoreConfig {
    StoreConfig {
        dram_capacity: Some(128 << 10),
        nvme_paths: vec!["/fuzzed".into()],
        nvme_capacity: 1 << 20,
        segment_bytes: Some(64 << 10),
        huge_pages: false,
        load_threads: 1,
        copy_threads: 1,
        ..StoreConfig::default()
    }
}

fn open(disk: MemDisk) -> Result<Arc<Store>> {
    let disk = Arc::new(disk);
    let seams = Seams {
        clock: Arc::new(ManualClock::new(1 << 60)),
        entropy: Arc::new(Fixed),
        open_disk: Arc::new(move |_: &Path| Ok(disk.clone() as Arc<dyn Disk>)),
        lock_directory: false,
        ..Seams::default()
    };
    Store::open_with(&config(), &seams)
}

fn namespace(store: &Store) -> Namespace {
    let layout = KvLayout::uniform(4, BLOCK as u64).expect("valid");
    store.namespace(&NamespaceSpec::new("model", "weights", "float32", layout)).expect("valid")
}

fn keys(ns: &Namespace) -> Vec<BlockKey> {
    ns.keys_from_tokens(&(0..BLOCKS * 4).collect::<Vec<u32>>(), None)
}

fn bytes_of(key: &BlockKey) -> Vec<u8> {
    (0..BLOCK).map(|at| key.0[at % 32] ^ (at / 32) as u8).collect()
}

/// A directory that a store has closed, with a tombstone and a checkpoint.
pub(crate) fn base() -> Image {
    static BASE: OnceLock<Image> = OnceLock::new();
    let make = || {
        let disk = Arc::new(MemDisk::with_alignment(Alignment { memory: 1, offset: 1 }));
        let seams = {
            let disk = disk.clone();
            Seams {
                clock: Arc::new(ManualClock::new(1 << 60)),
                entropy: Arc::new(Fixed),
                open_disk: Arc::new(move |_: &Path| Ok(disk.clone() as Arc<dyn Disk>)),
                lock_directory: false,
                ..Seams::default()
            }
        };
        let store = Store::open_with(&config(), &seams).expect("opens");
        let ns = namespace(&store);
        let keys = keys(&ns);
        let blocks: Vec<_> = keys.iter().map(bytes_of).collect();
        store.put(&ns, &keys, blocks, &PutOptions::default()).expect("open").wait();
        assert!(store.flush(None).expect("open").wait().all_durable());
        let last = Delete::Keys(keys[BLOCKS as usize - 1..].to_vec());
        store.delete(&ns, &last).expect("open").wait();
        store.close();
        Image::of(disk.as_ref())
    };
    BASE.get_or_init(make).clone()
}

/// Takes the numbers of a script off its front.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> Option<usize> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(usize::from(*first))
    }

    fn place(&mut self) -> Option<usize> {
        let (place, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*place) as usize)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.byte()?.min(self.0.len());
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        Some(bytes)
    }
}

const SEALS: [(&[u8; 8], usize); 5] = [
    (b"TKVREC01", 512),
    (b"TKVSEG01", 4096),
    (b"TKVSUP01", 4096),
    (b"TKVTMB01", 4096),
    (b"TKVCHK02", 64),
];

/// One change to one file; `None` at the end of the script.
fn edit(image: &mut Image, script: &mut Script<'_>) -> Option<()> {
    let what = script.byte()?;
    let at = script.byte()? % image.files.len().max(1);
    let place = script.place()?;
    let Some((_, file)) = image.files.get_mut(at) else { return Some(()) };
    match what % 6 {
        0 => {
            let bytes = script.bytes()?;
            let at = place % (file.len() + 1);
            let end = (at + bytes.len()).min(file.len());
            file[at..end].copy_from_slice(&bytes[..end - at]);
        }
        1 => file.truncate(place % (file.len() + 1)),
        2 => file.resize(file.len() + place % 9000, 0xee),
        3 if place % 4 == 0 => _ = image.files.remove(at),
        // A structure at a sector, sealed anew: whatever it says now counts as written.
        4 | 5 => {
            let (magic, len) = SEALS[script.byte()? % SEALS.len()];
            let at = place % (file.len() / 512 + 1) * 512;
            if let Some(bytes) = file.get(at..).and_then(|rest| sealed(rest, magic, len)) {
                file[at..at + len].copy_from_slice(&bytes);
            }
        }
        _ => {
            let other = script.byte()? * 512 % (file.len() + 1);
            let (from, to) = (place % (file.len() / 512 + 1) * 512, other / 512 * 512);
            if from.max(to) + 512 <= file.len() {
                file.copy_within(from..from + 512, to);
            }
        }
    }
    Some(())
}

/// Whatever a script does to the files, a store that opens serves what was stored, or misses; keeps
/// its books; and never brings back what was deleted unless the tombstone itself was damaged.
pub(crate) fn directory(data: &[u8]) {
    let mut image = base();
    let mut script = Script(data);
    while edit(&mut image, &mut script).is_some() {}
    let Ok(store) = open(image.disk()) else { return };
    let ns = namespace(&store);
    let keys = keys(&ns);
    let found = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
    for (item, key) in found.items.iter().zip(&keys) {
        if let Ok(lease) = item {
            assert!(lease.as_slice() == bytes_of(key), "served what was not stored");
        }
    }
    drop(found);
    assert_eq!(store.audit().faults, Vec::<String>::new());
    let blocks: Vec<_> = keys.iter().map(bytes_of).collect();
    store.put(&ns, &keys, blocks, &PutOptions::default()).expect("open").wait();
    store.close();
}
