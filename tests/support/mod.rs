//! What the store's tests share: small stores, disks that stall or count, blocks with known bytes.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

use parking_lot::{Condvar, Mutex};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tiered_kv::IoBackend;
use tiered_kv::io_seams::{Alignment, Disk, FileId, ManualClock, MemDisk};
use tiered_kv::{BlockKey, KvLayout, Namespace, NamespaceSpec, Result, Seams, Store, StoreConfig};

pub mod steps;

pub const BLOCK: usize = 16 << 10;

/// A store of 512 KiB of memory and `nvme` bytes in `dir`.
pub fn config(dir: &Path, nvme: u64) -> StoreConfig {
    StoreConfig {
        dram_capacity: Some(512 << 10),
        nvme_paths: vec![dir.to_path_buf()],
        nvme_capacity: nvme,
        // What is read unasked has tests of its own.
        ahead_waste: 0.0,
        huge_pages: false,
        ..StoreConfig::default()
    }
}

pub fn memory_only(bytes: u64) -> StoreConfig {
    StoreConfig { dram_capacity: Some(bytes), huge_pages: false, ..StoreConfig::default() }
}

pub fn spec() -> NamespaceSpec {
    let layout = KvLayout::uniform(4, BLOCK as u64).expect("valid");
    NamespaceSpec::new("model", "weights", "float32", layout)
}

pub fn namespace(store: &Store) -> Namespace {
    store.namespace(&spec()).expect("a valid namespace")
}

/// Keys of a chain of `n` blocks that `path` tells from others.
pub fn chain(ns: &Namespace, path: u32, n: u32) -> Vec<BlockKey> {
    let tokens: Vec<u32> = (0..n * 4).map(|t| path * 100_000 + t).collect();
    ns.keys_from_tokens(&tokens, None)
}

/// The bytes stored under a key in these tests.
pub fn bytes_of(key: &BlockKey) -> Vec<u8> {
    (0..BLOCK).map(|i| key.0[i % 32] ^ (i / 32) as u8).collect()
}

pub fn blocks_of(keys: &[BlockKey]) -> Vec<Vec<u8>> {
    keys.iter().map(bytes_of).collect()
}

/// Seams on a disk of the test's own.
pub fn seams(disk: Arc<dyn Disk>) -> Seams {
    let open_disk = Arc::new(move |_: &Path| Ok(disk.clone()));
    Seams { open_disk, lock_directory: false, ..Seams::default() }
}

/// A store on a disk and a clock of the test's own.
pub fn open_at(
    config: &StoreConfig,
    disk: &Arc<GatedDisk>,
    clock: &Arc<ManualClock>,
) -> Arc<Store> {
    let seams = Seams { clock: clock.clone(), ..seams(disk.clone()) };
    Store::open_with(config, &seams).expect("opens")
}

/// A disk in memory that counts reads and writes, either of which stop while their gate is shut.
pub struct GatedDisk {
    pub inner: MemDisk,
    pub reads: AtomicUsize,
    pub writes: AtomicUsize,
    shut: Mutex<(bool, bool)>,
    opened: Condvar,
    /// From how many bytes on a write is long, and how many more of these pass.
    long: Mutex<Option<(usize, usize)>>,
    long_opened: Condvar,
}

impl GatedDisk {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: MemDisk::new(),
            reads: AtomicUsize::new(0),
            writes: AtomicUsize::new(0),
            shut: Mutex::new((false, false)),
            opened: Condvar::new(),
            long: Mutex::default(),
            long_opened: Condvar::new(),
        })
    }

    pub fn shut_reads(&self, shut: bool) {
        self.shut.lock().0 = shut;
        self.opened.notify_all();
    }

    pub fn shut_writes(&self, shut: bool) {
        self.shut.lock().1 = shut;
        self.opened.notify_all();
    }

    /// Lets `n` more writes of `bytes` or more through, and holds the rest of them.
    pub fn let_long_writes(&self, bytes: usize, n: usize) {
        *self.long.lock() = Some((bytes, n));
        self.long_opened.notify_all();
    }

    fn pass_long(&self, bytes: usize) {
        let mut long = self.long.lock();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while let Some((from, left)) = &mut *long {
            if bytes < *from {
                return;
            }
            if *left > 0 {
                *left -= 1;
                return;
            }
            if self.long_opened.wait_until(&mut long, until).timed_out() {
                return;
            }
        }
    }

    fn pass(&self, is_shut: impl Fn(&(bool, bool)) -> bool) {
        let mut shut = self.shut.lock();
        // Not for ever: a test that fails while the gate is shut closes its store behind it.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while is_shut(&shut) && !self.opened.wait_until(&mut shut, until).timed_out() {}
    }
}

impl Disk for GatedDisk {
    fn name(&self) -> &'static str {
        "gated"
    }
    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }
    fn is_direct(&self) -> bool {
        true
    }
    fn direct_reason(&self) -> String {
        String::new()
    }
    fn list(&self) -> Result<Vec<(String, u64)>> {
        self.inner.list()
    }
    fn read_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        self.inner.read_file(name, max_bytes)
    }
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.inner.write_file(name, bytes)
    }
    fn remove(&self, name: &str) -> Result<()> {
        self.inner.remove(name)
    }
    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        self.inner.create(name, bytes)
    }
    fn open(&self, name: &str) -> Result<(FileId, u64)> {
        self.inner.open(name)
    }
    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.pass(|shut| shut.0);
        self.inner.read_at(file, offset, buf)
    }
    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.pass(|shut| shut.1);
        self.pass_long(buf.len());
        self.inner.write_at(file, offset, buf)
    }
    fn sync(&self, file: FileId) -> io::Result<()> {
        self.inner.sync(file)
    }
}

/// The backends that this machine has. Without io_uring the output says so.
#[expect(clippy::print_stderr, reason = "a test that has nothing to test must say so")]
pub fn backends() -> Vec<IoBackend> {
    match tiered_kv::io_seams::probe_io_uring() {
        Ok(_) => vec![IoBackend::Blocking, IoBackend::IoUring],
        Err(reason) => {
            eprintln!("not tested: {reason}");
            vec![IoBackend::Blocking]
        }
    }
}
