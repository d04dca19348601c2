//! The blocking engine over disks that stall and fail, and the worker pool.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use tiered_kv_io::{
    AlignedBuf, Alignment, Arena, ArenaConfig, BlockingEngine, Disk, DiskOp, FileId, IoDone,
    IoEngine, IoOp, IoRequest, MemDisk, OnDone, OsThreads, PAGE_BYTES, Priority, WorkerPool,
};
use tiered_kv_types::{ErrorKind, Result};

const PAGE: u64 = PAGE_BYTES;

/// A disk whose writes wait until the test lets them go on.
struct StalledDisk {
    inner: MemDisk,
    started: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
}

impl Disk for StalledDisk {
    fn name(&self) -> &'static str {
        "stalled"
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
        self.started.lock().expect("no panic").send(()).expect("the test listens");
        self.go_on.lock().expect("no panic").recv().expect("the test answers");
        self.inner.write_at(file, offset, buf)
    }
    fn sync(&self, file: FileId) -> io::Result<()> {
        self.inner.sync(file)
    }
}

fn engine(disk: Arc<dyn Disk>, loads: usize, stores: usize) -> (BlockingEngine, Receiver<IoDone>) {
    let (sender, done) = channel();
    let on_done: OnDone = Arc::new(move |done| sender.send(done).expect("the test listens"));
    let engine = BlockingEngine::new(disk, &OsThreads, loads, stores, on_done);
    (engine.expect("threads"), done)
}

fn arena(pages: u64) -> Arc<Arena> {
    let bytes = pages * PAGE;
    let cfg = ArenaConfig { extent_bytes: bytes, huge_pages: false, ..ArenaConfig::new(bytes) };
    Arena::new(cfg).expect("memory for a small arena")
}

fn store(token: u64, op: IoOp) -> IoRequest {
    IoRequest { token, priority: Priority::Store, op, cancel: None }
}

fn write(token: u64, file: FileId, page: u64, byte: u8) -> IoRequest {
    let buf = Arc::new(vec![byte; PAGE as usize]);
    store(token, IoOp::Write { file, offset: page * PAGE, buf })
}

fn load(token: u64, file: FileId, page: u64, arena: &Arc<Arena>) -> IoRequest {
    let buf = arena.take(token * PAGE, PAGE).expect("a free page");
    let op = IoOp::Read { file, offset: page * PAGE, buf: buf.into() };
    IoRequest { token, priority: Priority::Load, op, cancel: None }
}

#[test]
fn case_36_loads_are_served_while_all_store_threads_stall() {
    let (started, has_started) = channel();
    let (go_on, may_go_on) = channel();
    let (started, may_go_on) = (Mutex::new(started), Mutex::new(may_go_on));
    let disk = Arc::new(StalledDisk { inner: MemDisk::new(), started, go_on: may_go_on });
    let file = disk.create("data", 16 * PAGE).expect("memory");
    let (engine, done) = engine(disk, 1, 1);
    let arena = arena(8);
    // No two of them are neighbours, which would be one call.
    engine.submit((0..3).map(|token| write(100 + token, file, 2 * token, 7)).collect());
    has_started.recv().expect("a store has begun");
    let mut commit = write(103, file, 6, 7);
    commit.priority = Priority::Commit;
    engine.submit(vec![write(104, file, 8, 7), commit]);
    let beside = has_started.recv_timeout(std::time::Duration::from_secs(60));
    beside.expect("the commit begins beside the stalled store, before those that wait");
    engine.submit((0..4).map(|token| load(token, file, token, &arena)).collect());
    let loads: Vec<u64> = (0..4).map(|_| done.recv().expect("a load").token).collect();
    assert_eq!(loads, [0, 1, 2, 3], "only loads, in their order");
    // A load's completion is counted after it was handled, so the loads may still show.
    assert!(engine.in_flight() >= 3, "the stores are still there");
    for _ in 0..5 {
        go_on.send(()).expect("a store waits");
    }
    engine.close();
    let stores: Vec<u64> = done.try_iter().map(|done| done.token).collect();
    assert!(stores.contains(&103), "the commit has ended: {stores:?}");
    let waited: Vec<u64> = stores.iter().copied().filter(|token| *token != 103).collect();
    assert_eq!(waited, [100, 101, 102, 104]);
    assert_eq!(engine.in_flight(), 0);
}

#[test]
fn the_next_load_is_read_while_the_one_before_it_is_handled() {
    const PAGES: u64 = 32;
    let disk = Arc::new(MemDisk::new());
    let file = disk.create("data", 4 * PAGES * PAGE).expect("memory");
    let (read, has_read) = channel();
    let has_read = Mutex::new(has_read);
    disk.set_fault(Some(Box::new(move |_| {
        // Nobody listens any more once both were read.
        _ = read.send(());
        None
    })));
    let (sender, done) = channel();
    let first = AtomicUsize::new(0);
    let was_read = Arc::new(AtomicBool::new(false));
    let meanwhile = was_read.clone();
    let on_done: OnDone = Arc::new(move |done: IoDone| {
        if first.fetch_add(1, Ordering::SeqCst) == 0 {
            let reads = has_read.lock().expect("no panic");
            let long = std::time::Duration::from_secs(60);
            let both = (0..2).all(|_| reads.recv_timeout(long).is_ok());
            meanwhile.store(both, Ordering::SeqCst);
        }
        sender.send(done.token).expect("the test listens");
    });
    let engine = BlockingEngine::new(disk, &OsThreads, 1, 1, on_done).expect("threads");
    let arena = arena(2 * PAGES);
    let load = |token: u64| {
        let buf = arena.take(token * PAGES * PAGE, PAGES * PAGE).expect("free pages");
        // No neighbours, which would be one call.
        let op = IoOp::Read { file, offset: 2 * token * PAGES * PAGE, buf: buf.into() };
        IoRequest { token, priority: Priority::Load, op, cancel: None }
    };
    engine.submit((0..2).map(load).collect());
    let tokens: Vec<u64> = (0..2).map(|_| done.recv().expect("a load")).collect();
    assert!(tokens.contains(&0) && tokens.contains(&1), "{tokens:?}");
    let both = was_read.load(Ordering::SeqCst);
    assert!(both, "the one thread for loads waits for its first load to be handled");
}

fn create(token: u64, name: &str) -> IoRequest {
    let mut header = AlignedBuf::new(PAGE as usize).expect("memory");
    header.as_mut_slice().fill(5);
    store(token, IoOp::Create { name: name.into(), bytes: 4 * PAGE, header, file: None })
}

fn created(done: &IoDone) -> Option<FileId> {
    match done.op {
        IoOp::Create { file, .. } => file,
        _ => panic!("not a creation"),
    }
}

#[test]
fn a_created_file_has_a_durable_header_or_is_not_there() {
    let disk = Arc::new(MemDisk::new());
    let (engine, done) = engine(disk.clone(), 1, 1);
    engine.submit(vec![create(1, "good")]);
    let good = done.recv().expect("answered");
    assert!(good.result.is_ok());
    assert_eq!(created(&good), Some(disk.open("good").expect("exists").0));
    let image = disk.crash(|_| false).read_file("good", 4 * PAGE).expect("fits").expect("exists");
    assert_eq!(image[..PAGE as usize], [5; PAGE as usize]);
    type Fails = fn(&DiskOp) -> bool;
    let faults: [(&str, Fails); 3] = [
        ("a", |op| matches!(op, DiskOp::Create { .. })),
        ("b", |op| matches!(op, DiskOp::WriteAt { .. })),
        ("c", |op| matches!(op, DiskOp::Sync { .. })),
    ];
    for (name, fails) in faults {
        let fault = move |op| fails(&op).then(|| io::ErrorKind::StorageFull.into());
        disk.set_fault(Some(Box::new(fault)));
        engine.submit(vec![create(2, name)]);
        let failed = done.recv().expect("answered");
        assert_eq!(created(&failed), None);
        let kind = failed.result.expect_err("the hook says so").kind();
        assert_eq!(kind, io::ErrorKind::StorageFull, "{name}");
        assert_eq!(disk.list().expect("readable").len(), 1, "{name} stays");
    }
}

#[test]
fn panics_of_callback_and_disk_lose_neither_thread_nor_buffer() {
    let disk = Arc::new(MemDisk::new());
    let file = disk.create("data", 4 * PAGE).expect("memory");
    let (sender, done) = channel();
    let on_done: OnDone = Arc::new(move |done| {
        let token = done.token;
        sender.send(done).expect("the test listens");
        assert_ne!(token, 1, "a defect in the callback");
    });
    let engine = BlockingEngine::new(disk.clone(), &OsThreads, 1, 1, on_done).expect("threads");
    engine.submit(vec![write(1, file, 0, 1), write(2, file, 1, 2)]);
    let tokens = [(); 2].map(|()| done.recv().expect("answered").token);
    assert_eq!(tokens, [1, 2], "the one thread has lived on");
    disk.set_fault(Some(Box::new(|_| panic!("a defect in the disk"))));
    engine.submit(vec![write(3, file, 0, 1)]);
    let failed = done.recv().expect("answered");
    assert!(failed.result.expect_err("panicked").to_string().contains("a defect in the disk"));
    assert!(matches!(failed.op, IoOp::Write { .. }));
    engine.close();
    assert_eq!(engine.in_flight(), 0);
}

#[test]
fn a_pool_runs_jobs_in_their_order_and_outlives_panics() {
    let pool = WorkerPool::new("test", 1, &OsThreads).expect("a thread");
    let (sender, order) = channel();
    for number in 0..50 {
        let sender = sender.clone();
        pool.run(Box::new(move || {
            sender.send(number).expect("the test listens");
            assert_ne!(number, 10, "a defect in a job");
        }));
    }
    pool.close();
    assert_eq!(order.try_iter().collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
    let here = std::thread::current().id();
    let sender = sender.clone();
    pool.run(Box::new(move || {
        let on_caller = std::thread::current().id() == here;
        sender.send(i32::from(on_caller)).expect("the test listens");
    }));
    assert_eq!(order.try_recv(), Ok(1), "after close the caller runs it");
}

#[test]
fn a_pool_dropped_by_its_own_job_ends_by_itself() {
    let pool = Arc::new(WorkerPool::new("test", 2, &OsThreads).expect("threads"));
    let (sender, ended) = channel();
    let own = Arc::clone(&pool);
    let (let_go, may_go) = channel::<()>();
    pool.run(Box::new(move || {
        may_go.recv().expect("the test answers");
        drop(own);
        sender.send(()).expect("the test listens");
    }));
    drop(pool);
    let_go.send(()).expect("the job waits");
    ended.recv().expect("the last reference went in the job");
}

#[test]
fn threads_that_do_not_start_are_an_error_and_leave_none() {
    struct Few(AtomicUsize);
    impl tiered_kv_io::Threads for Few {
        fn spawn(
            &self,
            name: String,
            body: Box<dyn FnOnce() + Send>,
        ) -> Result<std::thread::JoinHandle<()>> {
            if self.0.fetch_sub(1, Ordering::SeqCst) == 0 {
                let err = io::Error::from_raw_os_error(11);
                return Err(tiered_kv_types::Error::from_io("start thread", name, err));
            }
            OsThreads.spawn(name, body)
        }
    }
    let none: OnDone = Arc::new(|_| {});
    let marker = Arc::downgrade(&none);
    for can_start in 0..6 {
        let threads = Few(AtomicUsize::new(can_start));
        let disk = Arc::new(MemDisk::new());
        let engine = BlockingEngine::new(disk, &threads, 2, 2, Arc::clone(&none));
        assert_eq!(engine.err().expect("too few threads").kind(), ErrorKind::Io);
        assert_eq!(marker.strong_count(), 1, "a thread was left with {can_start}");
    }
    let err = WorkerPool::new("test", 0, &OsThreads).err().expect("no threads");
    assert_eq!(err.kind(), ErrorKind::InvalidArgument);
}
