//! Callers that go away at any await, on real files and both backends; and a kernel that still
//! writes when its caller has gone.

mod support;

use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};
use support::steps::{CANARY, Lent, Pen, REUSED, Steps, assert_pen};
use support::{BLOCK, backends, blocks_of, bytes_of, chain, config, namespace};
use tiered_kv::io_seams::{Alignment, DataFile, Descriptors, Disk, FileId, PosixDisk};
use tiered_kv::{
    AlignedBuf, BlockKey, Delete, GetOptions, IoBackend, MissReason, Namespace, OnStall,
    PutOptions, PutStatus, Region, Result, Seams, Store, StoreConfig, Tier,
};

const LONG: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;
const GAP: usize = PAGE;

fn wait_until(holds: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < until, "it never came");
        std::thread::yield_now();
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future so many times, each time when it was woken; whether it ended.
fn poll_times(future: impl Future<Output = ()>, polls: u32) -> bool {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    for left in (0..polls).rev() {
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            return true;
        }
        if left > 0 {
            std::thread::park_timeout(LONG);
        }
    }
    false
}

fn region(store: &Store, slots: usize) -> Arc<Region> {
    let memory = AlignedBuf::new(slots * (BLOCK + GAP)).expect("memory");
    let region = store.register_strided(memory, BLOCK, BLOCK + GAP).expect("valid");
    (0..slots).for_each(|slot| fill(&region, slot, CANARY));
    region
}

fn fill(region: &Arc<Region>, slot: usize, byte: u8) {
    region.write(slot, |bytes| bytes.fill(byte)).expect("free");
}

fn holds(region: &Arc<Region>, slot: usize, byte: u8) -> bool {
    region.read(slot, |bytes| bytes.iter().all(|b| *b == byte)).expect("free")
}

/// A life with the store: every kind of call, one after the other.
async fn life(store: &Store, keys: &[BlockKey], pen: &Pen, region: &Arc<Region>) {
    let (ns, steps, options) = (namespace(store), Steps::unlimited(), GetOptions::default());
    let source = Lent::full(keys, pen, &steps);
    let stored = store.put(&ns, keys, source, &PutOptions::default()).expect("open").await;
    assert_eq!(stored.stored(), keys.len());
    assert_eq!(store.flush(None).expect("open").await.failed, 0);
    let held = store.hold(&ns, keys, LONG).expect("open");
    let leases = store.get(&ns, keys, &options).expect("open").await;
    assert_eq!((leases.hits(), held.hits()), (keys.len(), keys.len()));
    drop((leases, held));
    let buffers = Lent::empty(keys.len(), pen, &steps);
    let copied = store.get_into(&ns, keys, buffers, &options).expect("open").await;
    assert_eq!(copied.hits(), keys.len());
    let slots = region.claim_all(&(0..keys.len()).collect::<Vec<_>>()).expect("free");
    let read = store.get_into(&ns, keys, slots, &options).expect("open").await;
    assert_eq!(read.hits(), keys.len());
    drop(read);
    store.scrub(Some(LONG)).expect("open").await;
    let some = Delete::Keys(keys[2..].to_vec());
    store.delete(&ns, &some).expect("open").await;
}

#[test]
fn a_caller_may_go_away_at_any_await() {
    for backend in backends() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let config = StoreConfig { io_backend: backend, ..config(&dir.path().join("kv"), 8 << 20) };
        let store = Store::open(&config).expect("opens");
        let (mut cut_short, mut polls) = (0, 0);
        for life_number in 1.. {
            polls += 1;
            assert!(polls < 40, "{backend:?}: each await is woken once");
            let (pen, region) = (Pen::default(), region(&store, 6));
            let keys = chain(&namespace(&store), life_number, 6);
            let ended = poll_times(life(&store, &keys, &pen, &region), polls);
            wait_until(|| store.stats().calls == 0 && region.slots_used() == 0);
            (0..6).for_each(|slot| fill(&region, slot, REUSED));
            assert!(store.flush(None).expect("open").wait().failed == 0);
            let n = pen.lock().len();
            assert!(n % 6 == 0 && n > 0, "{backend:?}: {n} buffers came back");
            assert_pen(&pen, n, "a life cut short");
            assert!((0..6).all(|slot| holds(&region, slot, REUSED)), "{backend:?}");
            let ns = namespace(&store);
            let found = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
            let right = |(item, key): (&std::result::Result<tiered_kv::Lease, _>, &BlockKey)| {
                item.as_ref().map_or(true, |lease| lease.as_slice() == bytes_of(key))
            };
            assert!(found.items.iter().zip(&keys).all(right), "{backend:?}: wrong bytes");
            drop(found);
            assert_eq!(store.audit().faults, Vec::<String>::new(), "{backend:?}");
            // What has ended by the time that it is awaited is no await: then it is tried again.
            (cut_short, polls) = if ended { (cut_short, 0) } else { (cut_short + 1, polls) };
            if ended && cut_short > 4 {
                break;
            }
            assert!(life_number < 1_000, "{backend:?}: {cut_short} lives were cut short");
        }
    }
}

/// The files of a directory, but for segments: the ring reads those from a pipe, so that the kernel
/// has a read for as long as the test likes.
struct PipedDisk {
    inner: PosixDisk,
    piped: Mutex<Vec<FileId>>,
    pipe: Arc<DataFile>,
}

impl PipedDisk {
    /// The disk, and the end into which the test writes what is read.
    fn open(dir: &Path) -> (Arc<Self>, File) {
        let (reader, writer) = io::pipe().expect("descriptors");
        let pipe = DataFile::new(File::from(std::os::fd::OwnedFd::from(reader)), u64::MAX);
        let inner = PosixDisk::open(dir).expect("writable");
        let disk = Self { inner, piped: Mutex::default(), pipe: Arc::new(pipe) };
        (Arc::new(disk), File::from(std::os::fd::OwnedFd::from(writer)))
    }
}

impl Descriptors for PipedDisk {
    fn data_file(&self, file: FileId) -> io::Result<Arc<DataFile>> {
        if self.piped.lock().expect("not poisoned").contains(&file) {
            return Ok(self.pipe.clone());
        }
        self.inner.descriptors().expect("files have descriptors").data_file(file)
    }
}

impl Disk for PipedDisk {
    fn name(&self) -> &'static str {
        "piped"
    }
    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, ..self.inner.alignment() }
    }
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }
    fn direct_reason(&self) -> String {
        self.inner.direct_reason()
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
        let (file, bytes) = self.inner.open(name)?;
        if name.starts_with("segment-") {
            self.piped.lock().expect("not poisoned").push(file);
        }
        Ok((file, bytes))
    }
    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(file, offset, buf)
    }
    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner.write_at(file, offset, buf)
    }
    fn sync(&self, file: FileId) -> io::Result<()> {
        self.inner.sync(file)
    }
    fn descriptors(&self) -> Option<&dyn Descriptors> {
        Some(self)
    }
}

/// Writes into a pipe and waits until the kernel has put all of it into somebody's memory.
fn feed(writer: &mut File, bytes: &[u8]) {
    writer.write_all(bytes).expect("the kernel reads");
    wait_until(|| rustix::io::ioctl_fionread(&*writer).expect("a pipe") == 0);
}

/// A store with one block on its drive, which the kernel reads from a pipe.
fn piped(dir: &Path) -> (Arc<Store>, Namespace, Vec<BlockKey>, File) {
    let config = StoreConfig {
        io_backend: IoBackend::IoUring,
        drive_stall_s: 3600.0,
        ..config(&dir.join("kv"), 4 << 20)
    };
    let store = Store::open(&config).expect("opens");
    let (ns, keys) = (namespace(&store), chain(&namespace(&store), 1, 1));
    let put = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default());
    assert_eq!(put.expect("open").wait().statuses, [PutStatus::Stored]);
    store.close();
    drop(store);
    let (disk, writer) = PipedDisk::open(&dir.join("kv"));
    let open_disk = Arc::new(move |_: &Path| Ok(disk.clone() as Arc<dyn Disk>));
    let store = Store::open_with(&config, &Seams { open_disk, ..Seams::default() });
    let store = store.expect("opens on pipes");
    assert_eq!(store.health().backend, "io_uring");
    let ns = namespace(&store);
    (store, ns, keys, writer)
}

#[test]
fn the_kernel_has_a_dropped_calls_slot_until_it_has_written_it() {
    if !backends().contains(&IoBackend::IoUring) {
        return;
    }
    for (pages, cancel) in (1..BLOCK / PAGE).flat_map(|n| [(n, false), (n, true)]) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let (store, ns, keys, mut writer) = piped(dir.path());
        let (region, bytes) = (region(&store, 3), bytes_of(&keys[0]));
        let wait =
            GetOptions { on_stall: OnStall::Wait, timeout: Some(LONG), ..Default::default() };
        let slots = region.claim_all(&[1]).expect("free");
        let (sent, ended) = std::sync::mpsc::channel();
        let told = move |report| _ = sent.send(report);
        let op = store.get_into_with(&ns, &keys, slots, &wait, told).expect("open");
        feed(&mut writer, &bytes[..pages * PAGE]);
        if cancel {
            store.cancel(op);
        }
        assert!(ended.recv_timeout(Duration::from_millis(20)).is_err(), "the kernel has it");
        drop(ended);
        assert!(region.claim(1).is_err(), "and so nobody else does, after {pages} pages");
        region.close();
        let weak = Arc::downgrade(&region);
        feed(&mut writer, &bytes[pages * PAGE..]);
        wait_until(|| store.stats().calls == 0 && region.slots_used() == 0);
        assert_eq!(store.audit().faults, Vec::<String>::new());
        drop(region);
        assert!(weak.upgrade().is_none(), "the memory goes with its last slot");
    }
}

#[test]
fn memory_given_back_early_stays_the_callers_and_the_kernel_writes_into_the_stores_own() {
    if !backends().contains(&IoBackend::IoUring) {
        return;
    }
    for pages in 1..BLOCK / PAGE {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let (store, ns, keys, mut writer) = piped(dir.path());
        let (region, bytes) = (region(&store, 3), bytes_of(&keys[0]));
        let soon = Duration::from_millis(20);
        let bounce =
            GetOptions { on_stall: OnStall::Bounce, timeout: Some(soon), ..Default::default() };
        let slots = region.claim_all(&[1]).expect("free");
        let call = store.get_into(&ns, &keys, slots, &bounce).expect("open");
        feed(&mut writer, &bytes[..pages * PAGE]);
        assert_eq!(call.wait().items, [Err(MissReason::Deadline)]);
        assert!(holds(&region, 1, CANARY), "nothing was written yet");
        (0..3).for_each(|slot| fill(&region, slot, REUSED));
        // All of T1 is used by others, but for what the kernel still writes.
        let others = chain(&ns, 2, 40);
        store.put(&ns, &others, blocks_of(&others), &PutOptions::default()).expect("open").wait();
        feed(&mut writer, &bytes[pages * PAGE..]);
        wait_until(|| store.stats().loading_bytes == 0);
        let leases = store.get(&ns, &keys, &GetOptions::default()).expect("open").wait();
        assert_eq!(leases.items[0].as_ref().expect("loaded").as_slice(), bytes);
        assert_eq!(leases.sources, [Tier::Dram]);
        drop(leases);
        assert!((0..3).all(|slot| holds(&region, slot, REUSED)), "after {pages} pages");
        for key in others {
            let leases = store.get(&ns, &[key], &GetOptions::default()).expect("open").wait();
            let right = |lease: &tiered_kv::Lease| lease.as_slice() == bytes_of(&key);
            assert!(leases.items[0].as_ref().map_or(true, right), "a slot was written by others");
        }
        assert_eq!(store.audit().faults, Vec::<String>::new());
    }
}
