//! Neighbouring requests that wait together are one call of the disk, and each has its own end.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use tiered_kv_io::{
    Alignment, BlockingEngine, CancelFlag, Disk, DiskOp, FileId, IoDone, IoEngine, IoOp, IoRequest,
    MemDisk, OnDone, OsThreads, PAGE_BYTES, Priority, ReadBuf, ReadInto, crc32c, is_cancelled,
};
use tiered_kv_types::Result;

const PAGE: usize = PAGE_BYTES as usize;
const PAGES: u64 = 40;

/// A disk that tells of the calls for several ranges.
struct ToldDisk {
    inner: MemDisk,
    calls: Mutex<Vec<(u64, usize)>>,
}

impl ToldDisk {
    fn told(&self, offset: u64, parts: usize) {
        self.calls.lock().expect("no panic").push((offset / PAGE_BYTES, parts));
    }

    fn calls(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut *self.calls.lock().expect("no panic"))
    }
}

impl Disk for ToldDisk {
    fn name(&self) -> &'static str {
        "told"
    }
    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }
    fn is_direct(&self) -> bool {
        false
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
        self.inner.open(name)
    }
    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(file, offset, buf)
    }
    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner.write_at(file, offset, buf)
    }
    fn read_vectored_at(
        &self,
        file: FileId,
        offset: u64,
        bufs: &mut [IoSliceMut<'_>],
    ) -> io::Result<()> {
        self.told(offset, bufs.len());
        self.inner.read_vectored_at(file, offset, bufs)
    }
    fn write_vectored_at(
        &self,
        file: FileId,
        offset: u64,
        bufs: &mut [IoSlice<'_>],
    ) -> io::Result<()> {
        self.told(offset, bufs.len());
        self.inner.write_vectored_at(file, offset, bufs)
    }
    fn sync(&self, file: FileId) -> io::Result<()> {
        self.inner.sync(file)
    }
}

/// An engine of one thread each, whose disk's next operation waits until the test lets it go on,
/// where it `holds`; operations on the page of `bad` fail.
struct Bench {
    disk: Arc<ToldDisk>,
    file: FileId,
    engine: BlockingEngine,
    done: Receiver<IoDone>,
    begun: Receiver<()>,
    go_on: Sender<()>,
    bad: Arc<Mutex<Option<u64>>>,
    holds: Arc<AtomicBool>,
}

fn bench() -> Bench {
    let disk = Arc::new(ToldDisk { inner: MemDisk::new(), calls: Mutex::default() });
    let file = disk.create("data", PAGES * PAGE_BYTES).expect("memory");
    let pages: Vec<u8> = (0..PAGES).flat_map(|page| vec![page as u8; PAGE]).collect();
    disk.write_at(file, 0, &pages).expect("memory");
    let (has_begun, begun) = channel();
    let (go_on, may_go_on) = channel();
    let bad = Arc::new(Mutex::new(None));
    let holds = Arc::new(AtomicBool::new(false));
    let (broken, held) = (Arc::clone(&bad), Arc::clone(&holds));
    disk.inner.set_fault(Some(Box::new(move |op| {
        let (DiskOp::ReadAt { offset, len, .. } | DiskOp::WriteAt { offset, len, .. }) = op else {
            return None;
        };
        if held.swap(false, Ordering::SeqCst) {
            has_begun.send(()).expect("the test listens");
            may_go_on.recv().expect("the test answers");
        }
        let pages = offset / PAGE_BYTES..(offset + len as u64).div_ceil(PAGE_BYTES);
        let fails = broken.lock().expect("no panic").is_some_and(|page| pages.contains(&page));
        fails.then(|| io::ErrorKind::StorageFull.into())
    })));
    let (sender, done) = channel();
    let on_done: OnDone = Arc::new(move |done| sender.send(done).expect("the test listens"));
    let as_disk: Arc<dyn Disk> = disk.clone();
    let engine = BlockingEngine::new(as_disk, &OsThreads, 1, 1, on_done).expect("threads");
    Bench { disk, file, engine, done, begun, go_on, bad, holds }
}

impl Bench {
    fn request(&self, page: u64, priority: Priority, op: IoOp) -> IoRequest {
        IoRequest { token: page, priority, op, cancel: None }
    }

    fn read(&self, page: u64) -> IoRequest {
        let buf = tiered_kv_io::AlignedBuf::new(PAGE).expect("memory");
        let (file, offset) = (self.file, page * PAGE_BYTES);
        let op = IoOp::Read { file, offset, buf: ReadInto::Bounce(buf) };
        self.request(page, Priority::Load, op)
    }

    fn write(&self, page: u64) -> IoRequest {
        let buf = Arc::new(vec![100 + page as u8; PAGE]);
        let op = IoOp::Write { file: self.file, offset: page * PAGE_BYTES, buf };
        self.request(page, Priority::Store, op)
    }

    /// Lets `requests` wait together behind `first`, then all go; how each has ended, by its token.
    fn play(&self, first: IoRequest, requests: Vec<IoRequest>) -> Vec<IoDone> {
        let n = 1 + requests.len();
        self.holds.store(true, Ordering::SeqCst);
        self.engine.submit(vec![first]);
        self.begun.recv().expect("the first has begun");
        self.engine.submit(requests);
        self.go_on.send(()).expect("the first waits");
        let mut done: Vec<IoDone> = (0..n).map(|_| self.done.recv().expect("ends")).collect();
        done.sort_by_key(|done| done.token);
        done
    }

    fn byte(&self, page: u64) -> u8 {
        let mut bytes = vec![0; PAGE];
        self.disk.read_at(self.file, page * PAGE_BYTES, &mut bytes).expect("healthy");
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is of one value");
        bytes[0]
    }
}

fn read_byte(done: &mut IoDone) -> u8 {
    let IoOp::Read { buf, .. } = &mut done.op else { panic!("not a read") };
    let bytes = buf.as_mut_slice();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

#[test]
fn neighbours_are_one_call_and_others_are_not() {
    let b = bench();
    let reads = [2, 3, 4, 7, 8, 0].map(|page| b.read(page)).into();
    let mut done = b.play(b.read(10), reads);
    assert_eq!(b.disk.calls(), [(2, 3), (7, 2)], "0 is no neighbour of 8");
    for done in &mut done {
        assert!(done.result.is_ok());
        assert_eq!(u64::from(read_byte(done)), done.token, "each has its own bytes");
    }
    let b = bench();
    let writes = [1, 2, 4, 5, 6].map(|page| b.write(page)).into();
    assert!(b.play(b.write(9), writes).iter().all(|done| done.result.is_ok()));
    assert_eq!(b.disk.calls(), [(1, 2), (4, 3)]);
    let bytes: Vec<u8> = (0..12).map(|page| b.byte(page)).collect();
    assert_eq!(bytes, [0, 101, 102, 3, 104, 105, 106, 7, 8, 109, 10, 11]);
}

#[test]
fn scrubs_and_commits_are_not_joined_to_stores() {
    let b = bench();
    let mut scrub = b.read(3);
    scrub.priority = Priority::Scrub;
    let (mut commit, mut others) = (b.write(6), vec![b.write(4), b.write(5)]);
    commit.priority = Priority::Commit;
    others.insert(0, scrub);
    others.push(commit);
    assert!(b.play(b.write(9), others).iter().all(|done| done.result.is_ok()));
    assert_eq!(b.disk.calls(), [(4, 2)]);
}

#[test]
fn a_fault_in_a_joined_call_is_the_fault_of_one() {
    for reads in [true, false] {
        let b = bench();
        *b.bad.lock().expect("no panic") = Some(3);
        let make = |page| if reads { b.read(page) } else { b.write(page) };
        let done = b.play(make(9), (1..6).map(make).collect());
        assert_eq!(b.disk.calls(), [(1, 5)]);
        let failed: Vec<u64> = done.iter().filter(|d| d.result.is_err()).map(|d| d.token).collect();
        assert_eq!(failed, [3], "reads: {reads}");
    }
}

#[test]
fn a_cancelled_neighbour_is_left_out() {
    let b = bench();
    let mut unwanted = b.read(2);
    let flag = CancelFlag::default();
    flag.set(true);
    unwanted.cancel = Some(flag);
    let mut done = b.play(b.read(9), vec![b.read(1), unwanted, b.read(3)]);
    assert_eq!(b.disk.calls(), [], "each by itself");
    let err = done[1].result.as_ref().expect_err("nobody wants it");
    assert!(is_cancelled(err));
    assert_eq!(read_byte(&mut done[1]), 0, "its buffer stays as it was");
    assert_eq!((read_byte(&mut done[0]), read_byte(&mut done[2])), (1, 3));
}

/// Loads of so many neighbouring pages are large enough for a buffer. Both ways are tried first, so
/// many times each.
const LARGE: u64 = 16;
const TRIED: usize = 6;

#[test]
fn what_passes_through_a_buffer_has_its_bytes_and_their_checksum() {
    let b = bench();
    for round in 0..2 * TRIED {
        let mut done = b.play(b.read(39), (0..LARGE).map(|page| b.read(page)).collect());
        let staged = round >= TRIED;
        let calls: &[(u64, usize)] = if staged { &[] } else { &[(0, LARGE as usize)] };
        assert_eq!(b.disk.calls(), calls, "round {round}: a buffer needs one range");
        for done in &mut done {
            assert!(done.result.is_ok());
            assert_eq!(u64::from(read_byte(done)), done.token, "round {round}");
            let expected = crc32c(&[done.token as u8; PAGE]);
            let known = staged && done.token != 39;
            assert_eq!(done.crc, known.then_some(expected), "round {round}");
        }
    }
}

#[test]
fn a_fault_on_the_way_to_a_buffer_is_the_fault_of_one() {
    let b = bench();
    let reads = || (0..LARGE).map(|page| b.read(page)).collect();
    for _ in 0..TRIED {
        b.play(b.read(39), reads());
    }
    *b.bad.lock().expect("no panic") = Some(3);
    let mut done = b.play(b.read(39), reads());
    let failed: Vec<u64> = done.iter().filter(|d| d.result.is_err()).map(|d| d.token).collect();
    assert_eq!(failed, [3]);
    let sound = done.iter_mut().filter(|done| done.result.is_ok());
    assert!(sound.into_iter().all(|done| u64::from(read_byte(done)) == done.token));
}

#[test]
fn a_single_large_load_takes_either_way_and_a_larger_one_none() {
    for (bytes, large) in [(1 << 20, true), (4 << 20, false)] {
        let disk = Arc::new(MemDisk::new());
        let file = disk.create("data", bytes as u64).expect("memory");
        let noise: Vec<u8> = (0..bytes).map(|at| (at * 31 / 7 % 251) as u8).collect();
        disk.write_at(file, 0, &noise).expect("memory");
        let (sender, ended) = channel();
        let on_done: OnDone = Arc::new(move |done| sender.send(done).expect("the test listens"));
        let engine = BlockingEngine::new(disk, &OsThreads, 1, 1, on_done).expect("threads");
        for round in 0..2 * TRIED {
            let buf = ReadInto::Bounce(tiered_kv_io::AlignedBuf::new(bytes).expect("memory"));
            let op = IoOp::Read { file, offset: 0, buf };
            engine.submit(vec![IoRequest { token: 0, priority: Priority::Load, op, cancel: None }]);
            let mut done = ended.recv().expect("it ends");
            let IoOp::Read { buf, .. } = &mut done.op else { panic!("a read") };
            assert!(buf.as_mut_slice() == noise, "round {round} of {bytes} bytes");
            let known = large && round >= TRIED;
            assert_eq!(done.crc, known.then(|| crc32c(&noise)), "round {round} of {bytes} bytes");
        }
    }
}

struct Panics;

impl ReadBuf for Panics {
    fn as_slice(&self) -> &[u8] {
        panic!("a defect in a buffer")
    }
}

#[test]
fn a_buffer_that_panics_takes_no_neighbour_with_it() {
    let b = bench();
    let mut defective = b.write(2);
    let (file, buf) = (b.file, Arc::new(Panics));
    defective.op = IoOp::Write { file, offset: 2 * PAGE_BYTES, buf };
    let done = b.play(b.write(9), vec![b.write(1), defective, b.write(3)]);
    let ok: Vec<bool> = done.iter().map(|done| done.result.is_ok()).collect();
    assert_eq!(ok, [true, false, true, true]);
    b.engine.close();
    assert_eq!(b.engine.in_flight(), 0);
}
