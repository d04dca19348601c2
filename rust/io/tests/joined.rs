//! Neighbouring requests that wait together are one call of the disk, and each has its own end.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tiered_kv_io::{
    Alignment, BlockingEngine, CancelFlag, Disk, DiskOp, FileId, IoDone, IoEngine, IoOp, IoRequest,
    MemDisk, OnDone, OsThreads, PAGE_BYTES, Priority, ReadBuf, ReadInto, Region, crc32c,
    is_cancelled,
};
use tiered_kv_types::Result;

const PAGE: usize = PAGE_BYTES as usize;
const PAGES: u64 = 40;
const PANICS: u64 = 1000;
const PATIENCE: Duration = Duration::from_secs(30);

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
/// where it `holds`; operations on the page of `bad` fail, or panic where it is beyond `PANICS`.
struct Bench {
    disk: Arc<ToldDisk>,
    file: FileId,
    engine: BlockingEngine,
    done: Receiver<IoDone>,
    begun: Receiver<()>,
    go_on: Sender<()>,
    bad: Arc<Mutex<Option<u64>>>,
    holds: Arc<AtomicBool>,
    /// Set while several pages are read.
    given_up: Arc<Mutex<Option<CancelFlag>>>,
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
    let given_up: Arc<Mutex<Option<CancelFlag>>> = Arc::default();
    let flag = Arc::clone(&given_up);
    disk.inner.set_fault(Some(Box::new(move |op| {
        let (DiskOp::ReadAt { offset, len, .. } | DiskOp::WriteAt { offset, len, .. }) = op else {
            return None;
        };
        if held.swap(false, Ordering::SeqCst) {
            has_begun.send(()).expect("the test listens");
            may_go_on.recv().expect("the test answers");
        }
        if len > PAGE
            && let Some(flag) = flag.lock().expect("no panic").take()
        {
            flag.set(true);
        }
        let pages = offset / PAGE_BYTES..(offset + len as u64).div_ceil(PAGE_BYTES);
        let bad: Option<u64> = *broken.lock().expect("no panic");
        let panics = bad.and_then(|page| page.checked_sub(PANICS));
        assert!(!panics.is_some_and(|page| pages.contains(&page)), "a defect in a disk");
        let fails = bad.is_some_and(|page| pages.contains(&page));
        fails.then(|| io::ErrorKind::StorageFull.into())
    })));
    let (on_done, done) = listen();
    let as_disk: Arc<dyn Disk> = disk.clone();
    let engine = BlockingEngine::new(as_disk, &OsThreads, 1, 1, on_done).expect("threads");
    Bench { disk, file, engine, done, begun, go_on, bad, holds, given_up }
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
        let mut done: Vec<IoDone> =
            (0..n).map(|_| self.done.recv_timeout(PATIENCE).expect("ends")).collect();
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
fn a_call_writes_more_where_nobody_loads() {
    const BYTES: usize = 1 << 20;
    let b = bench();
    let file = b.disk.create("large", 17 << 20).expect("memory");
    let write = |place: u64| {
        let buf = Arc::new(vec![1; BYTES]);
        let op = IoOp::Write { file, offset: place << 20, buf };
        b.request(place, Priority::Store, op)
    };
    for (loads, parts) in [(false, 8), (true, 2)] {
        if loads {
            b.engine.submit(vec![b.read(0)]);
            b.done.recv().expect("it ends").result.expect("healthy");
        }
        let done = b.play(write(16), (0..16).map(write).collect());
        assert!(done.iter().all(|done| done.result.is_ok()));
        let calls: Vec<(u64, usize)> =
            (0..16 / parts).map(|call| ((call * parts) << 8, parts as usize)).collect();
        assert_eq!(b.disk.calls(), calls, "loads: {loads}");
    }
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

/// Loads of so many neighbouring pages are large enough for a buffer.
const LARGE: u64 = 16;
/// Both ways are tried in turns, so many reads of one and as many of the other.
const IN_A_ROW: usize = 4;

/// A whole slot, to be read into.
fn slot(region: &Arc<Region>, number: usize) -> ReadInto {
    let slot = region.claim(number).expect("free");
    let (_, mut parts) = slot.cut(std::slice::from_ref(&(0..region.slot_bytes())));
    ReadInto::Region(parts.remove(0))
}

/// What an engine has ended, one after the other.
fn listen() -> (OnDone, Receiver<IoDone>) {
    let (sender, ended) = channel();
    (Arc::new(move |done| sender.send(done).expect("the test listens")), ended)
}

/// Neighbouring loads into memory of a caller's.
fn neighbours(b: &Bench) -> Vec<IoRequest> {
    let memory = tiered_kv_io::AlignedBuf::new(LARGE as usize * PAGE).expect("memory");
    let region = Region::new(memory, PAGE, PAGE).expect("whole pages");
    let load = |page: u64| {
        let (file, offset, buf) = (b.file, page * PAGE_BYTES, slot(&region, page as usize));
        b.request(page, Priority::Load, IoOp::Read { file, offset, buf })
    };
    (0..LARGE).map(load).collect()
}

/// A bench whose next neighbouring loads pass through a buffer.
fn staging() -> Bench {
    let b = bench();
    for _ in 0..IN_A_ROW {
        b.play(b.read(39), neighbours(&b));
    }
    assert_eq!(b.disk.calls(), [(0, LARGE as usize); IN_A_ROW]);
    b
}

#[test]
fn what_passes_through_a_buffer_has_its_bytes_and_their_checksum() {
    let b = staging();
    for round in 0..2 * IN_A_ROW {
        let mut done = b.play(b.read(39), neighbours(&b));
        let staged = round < IN_A_ROW;
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
    let b = staging();
    *b.bad.lock().expect("no panic") = Some(3);
    let mut done = b.play(b.read(39), neighbours(&b));
    let failed: Vec<u64> = done.iter().filter(|d| d.result.is_err()).map(|d| d.token).collect();
    assert_eq!(failed, [3]);
    let sound = done.iter_mut().filter(|done| done.result.is_ok());
    assert!(sound.into_iter().all(|done| u64::from(read_byte(done)) == done.token));
}

#[test]
fn a_load_that_nobody_wants_goes_through_no_buffer() {
    let b = staging();
    let mut loads = neighbours(&b);
    let flag = CancelFlag::default();
    flag.set(true);
    loads[2].cancel = Some(flag);
    let mut done = b.play(b.read(39), loads);
    assert!(is_cancelled(done[2].result.as_ref().expect_err("nobody wants it")));
    assert_eq!(read_byte(&mut done[2]), 0, "its memory stays as it was");
    assert!(done.iter().all(|done| done.crc.is_none()), "each is read by itself");
}

#[test]
fn a_load_that_is_given_up_on_its_way_to_a_buffer_ends() {
    let b = staging();
    let (mut loads, flag) = (neighbours(&b), CancelFlag::default());
    loads[2].cancel = Some(flag.clone());
    *b.given_up.lock().expect("no panic") = Some(flag.clone());
    let mut done = b.play(b.read(39), loads);
    assert!(flag.is_set() && b.disk.calls().is_empty(), "while they were read into a buffer");
    for done in &mut done {
        assert!(done.result.is_ok());
        assert_eq!(u64::from(read_byte(done)), done.token);
    }
    b.engine.close();
    assert_eq!(b.engine.in_flight(), 0);
}

#[test]
fn a_disk_that_panics_on_the_way_to_a_buffer_loses_no_load() {
    let b = staging();
    *b.bad.lock().expect("no panic") = Some(PANICS + 3);
    let done = b.play(b.read(39), neighbours(&b));
    let failed: Vec<u64> = done.iter().filter(|d| d.result.is_err()).map(|d| d.token).collect();
    assert_eq!(failed, [3]);
    b.engine.close();
    assert_eq!(b.engine.in_flight(), 0);
}

/// An engine of one thread on a disk with `bytes` of noise, which tells of each call that reads.
fn noisy(bytes: usize, on_done: OnDone, read: &Sender<()>) -> (BlockingEngine, FileId, Vec<u8>) {
    let disk = Arc::new(MemDisk::new());
    let file = disk.create("data", bytes as u64).expect("memory");
    let noise: Vec<u8> = (0..bytes).map(|at| (at * 31 / 7 % 251) as u8).collect();
    disk.write_at(file, 0, &noise).expect("memory");
    let read = read.clone();
    disk.set_fault(Some(Box::new(move |op| {
        if matches!(op, DiskOp::ReadAt { .. }) {
            // The test may not care.
            _ = read.send(());
        }
        None
    })));
    (BlockingEngine::new(disk, &OsThreads, 1, 1, on_done).expect("threads"), file, noise)
}

/// A load into memory of its own.
fn load(file: FileId, offset: u64, bytes: usize) -> IoRequest {
    let memory = tiered_kv_io::AlignedBuf::new(bytes).expect("memory");
    let region = Region::new(memory, bytes, bytes).expect("one slot");
    let op = IoOp::Read { file, offset, buf: slot(&region, 0) };
    IoRequest { token: offset, priority: Priority::Load, op, cancel: None }
}

#[test]
fn a_single_large_load_takes_either_way_and_a_larger_one_none() {
    for (bytes, large) in [(1 << 20, true), (4 << 20, false)] {
        let (on_done, ended) = listen();
        let (engine, file, noise) = noisy(bytes, on_done, &channel().0);
        for round in 0..2 * IN_A_ROW {
            engine.submit(vec![load(file, 0, bytes)]);
            let mut done = ended.recv().expect("it ends");
            let IoOp::Read { buf, .. } = &mut done.op else { panic!("a read") };
            assert!(buf.as_mut_slice() == noise, "round {round} of {bytes} bytes");
            let known = large && round >= IN_A_ROW;
            assert_eq!(done.crc, known.then(|| crc32c(&noise)), "round {round} of {bytes} bytes");
        }
    }
}

#[test]
fn a_single_load_that_fails_on_its_way_to_a_buffer_is_not_read_again() {
    let (on_done, ended) = listen();
    let (read, were_read) = channel();
    let (engine, file, _) = noisy(1 << 20, on_done, &read);
    for round in 0..=IN_A_ROW {
        // Beyond the end of the file.
        let place = if round == IN_A_ROW { 1 << 20 } else { 0 };
        engine.submit(vec![load(file, place, 1 << 20)]);
        let done = ended.recv().expect("it ends");
        assert_eq!(done.result.is_ok(), round < IN_A_ROW);
    }
    assert_eq!(were_read.try_iter().count(), IN_A_ROW + 1);
}

#[test]
fn loads_go_on_without_a_buffer_where_those_that_were_read_wait() {
    const BYTES: usize = 128 << 10;
    let (sender, ended) = channel();
    let (read, were_read) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    // Whoever handles what was read waits for the test.
    let on_done: OnDone = Arc::new(move |done| {
        may_go_on.lock().expect("no panic").recv().expect("the test answers");
        sender.send(done).expect("the test listens");
    });
    let places = 3 * IN_A_ROW;
    let (engine, file, noise) = noisy(2 * places * BYTES, on_done, &read);
    // No neighbours: each is a call of its own.
    let at = |place: usize| (2 * place * BYTES) as u64;
    engine.submit((0..places).map(|place| load(file, at(place), BYTES)).collect());
    for _ in 0..places {
        were_read.recv().expect("all are read though none is handled");
    }
    for _ in 0..places {
        go_on.send(()).expect("the engine listens");
    }
    let mut staged = 0;
    for _ in 0..places {
        let mut done = ended.recv().expect("it ends");
        let begin = done.token as usize;
        let IoOp::Read { buf, .. } = &mut done.op else { panic!("a read") };
        assert!(buf.as_mut_slice() == &noise[begin..begin + BYTES]);
        assert!(done.crc.is_none_or(|crc| crc == crc32c(&noise[begin..begin + BYTES])));
        staged += usize::from(done.crc.is_some());
    }
    assert_eq!(staged, 3, "one buffer for the thread that reads, two for the one that handles");
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
