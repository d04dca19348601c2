//! What is peculiar to io_uring: order, ownership, what it registers, and what happens without it.
//!
//! Pipes stand for a device here: they complete when the test wants, and in pieces.

mod common;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::{arena, bytes_of, load, load_pages, small_ring, store, write};
use tempfile::TempDir;
use tiered_kv_io::{
    AlignedBuf, Alignment, Arena, DataFile, Descriptors, Disk, EngineConfig, FileId, IoDone,
    IoEngine, IoOp, MemDisk, OnDone, OsThreads, PAGE_BYTES, PosixDisk, Priority, UringConfig,
    UringEngine, choose_engine, probe_io_uring,
};
use tiered_kv_types::{ErrorKind, IoBackend, Result};

const PAGE: u64 = PAGE_BYTES;

fn has_uring() -> bool {
    common::backends().contains(&common::Backend::Uring)
}

/// Two files that are pipes: the engine reads the first and writes the second.
struct PipeDisk {
    files: [Arc<DataFile>; 2],
}

const INCOMING: FileId = FileId(0);
const OUTGOING: FileId = FileId(1);

impl PipeDisk {
    /// The disk, and the test's ends of its files.
    fn new() -> (Arc<Self>, File, File) {
        let (from_test, to_engine) = io::pipe().expect("descriptors");
        let (from_engine, to_test) = io::pipe().expect("descriptors");
        let data = |fd: OwnedFd| Arc::new(DataFile::new(File::from(fd), u64::MAX));
        let files = [data(from_test.into()), data(to_test.into())];
        let test_end = |fd: OwnedFd| File::from(fd);
        (Arc::new(Self { files }), test_end(to_engine.into()), test_end(from_engine.into()))
    }
}

impl Descriptors for PipeDisk {
    fn data_file(&self, file: FileId) -> io::Result<Arc<DataFile>> {
        self.files.get(file.0 as usize).cloned().ok_or(io::ErrorKind::NotFound.into())
    }
}

impl Disk for PipeDisk {
    fn name(&self) -> &'static str {
        "pipes"
    }
    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1 }
    }
    fn is_direct(&self) -> bool {
        false
    }
    fn direct_reason(&self) -> String {
        "pipes".into()
    }
    fn list(&self) -> Result<Vec<(String, u64)>> {
        Ok(Vec::new())
    }
    fn read_file(&self, _: &str, _: u64) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }
    fn write_file(&self, _: &str, _: &[u8]) -> Result<()> {
        unreachable!("pipes have no names")
    }
    fn remove(&self, _: &str) -> Result<()> {
        unreachable!("pipes have no names")
    }
    fn create(&self, _: &str, _: u64) -> Result<FileId> {
        unreachable!("pipes have no names")
    }
    fn open(&self, _: &str) -> Result<(FileId, u64)> {
        unreachable!("pipes have no names")
    }
    fn read_at(&self, _: FileId, _: u64, _: &mut [u8]) -> io::Result<()> {
        unreachable!("the ring reads")
    }
    fn write_at(&self, _: FileId, _: u64, _: &[u8]) -> io::Result<()> {
        unreachable!("the ring writes")
    }
    fn sync(&self, _: FileId) -> io::Result<()> {
        unreachable!("the ring syncs")
    }
    fn descriptors(&self) -> Option<&dyn Descriptors> {
        Some(self)
    }
}

fn start(
    disk: Arc<dyn Disk>,
    arena: &Arc<Arena>,
    config: UringConfig,
) -> (UringEngine, Receiver<IoDone>) {
    let (sender, done) = channel();
    // The test may have ended by a failure of its own.
    let on_done: OnDone = Arc::new(move |done| _ = sender.send(done));
    (UringEngine::new(disk, arena, &OsThreads, config, on_done).expect("probed"), done)
}

#[test]
fn case_36_loads_pass_a_stalled_store_and_go_before_queued_ones() {
    if !has_uring() {
        return;
    }
    let (disk, mut incoming, mut outgoing) = PipeDisk::new();
    let arena = arena(16);
    let two = UringConfig { depth: 2, store_depth: 1, ..small_ring() };
    let (engine, done) = start(disk, &arena, two);
    // More than a pipe holds: it stalls until the test reads.
    let long = vec![1; 1 << 20];
    let op = IoOp::Write { file: OUTGOING, offset: 0, buf: Arc::new(long.clone()) };
    let mut scrub = load(9, INCOMING, 0, &arena);
    scrub.priority = Priority::Scrub;
    engine.submit(vec![scrub, store(10, op)]);
    engine.submit(vec![write(11, OUTGOING, 0, 2), write(12, OUTGOING, 0, 3)]);
    engine.submit((0..2).map(|token| load(token, INCOMING, 0, &arena)).collect());
    incoming.write_all(&[4; 2 * PAGE as usize]).expect("the engine reads");
    let sorted = |count: usize| {
        let mut tokens: Vec<_> = (0..count).map(|_| done.recv().expect("answered").token).collect();
        tokens.sort_unstable();
        tokens
    };
    let passed = sorted(2);
    assert_eq!((passed, engine.in_flight() >= 3), (vec![0, 1], true), "the stores are still there");
    engine.submit((2..5).map(|token| load(token, INCOMING, 0, &arena)).collect());
    let mut written = vec![0; long.len()];
    outgoing.read_exact(&mut written).expect("the engine writes");
    assert!(written == long);
    assert_eq!(done.recv().expect("unstalled").token, 10);
    // Two loads now have both places; the third goes in before the stores that waited longer.
    incoming.write_all(&[4; 3 * PAGE as usize]).expect("the engine reads");
    assert_eq!(sorted(3), [2, 3, 4]);
    assert_eq!(sorted(2), [11, 12]);
    // A scrub has let all of them go first.
    incoming.write_all(&[5; PAGE as usize]).expect("the engine reads");
    assert_eq!(sorted(1), [9]);
}

#[test]
fn a_commit_passes_stores_that_stall_and_those_that_wait() {
    // Behind the payloads of the next group, a group's headers and syncs leave the drive idle.
    if !has_uring() {
        return;
    }
    let (disk, mut incoming, mut outgoing) = PipeDisk::new();
    let arena = arena(16);
    let (engine, done) = start(disk, &arena, UringConfig { store_depth: 1, ..small_ring() });
    let long = vec![1; 1 << 20];
    let op = IoOp::Write { file: OUTGOING, offset: 0, buf: Arc::new(long.clone()) };
    engine.submit(vec![store(10, op), write(11, OUTGOING, 0, 2)]);
    let mut commit = load(12, INCOMING, 0, &arena);
    commit.priority = Priority::Commit;
    engine.submit(vec![commit]);
    incoming.write_all(&[4; PAGE as usize]).expect("the engine reads");
    assert_eq!(done.recv().expect("answered").token, 12);
    let mut written = vec![0; long.len()];
    outgoing.read_exact(&mut written).expect("the engine writes");
    let mut rest: Vec<_> = (0..2).map(|_| done.recv().expect("unstalled").token).collect();
    rest.sort_unstable();
    assert_eq!(rest, [10, 11]);
}

#[test]
fn the_kernel_has_no_more_stores_than_their_bytes_allow() {
    if !has_uring() {
        return;
    }
    let (disk, _incoming, mut outgoing) = PipeDisk::new();
    let config = UringConfig { store_depth: 4, store_bytes: 1, ..small_ring() };
    let (engine, done) = start(disk, &arena(1), config);
    let mut long = vec![1; 1 << 20];
    let op = IoOp::Write { file: OUTGOING, offset: 0, buf: Arc::new(long.clone()) };
    // The second one ends as soon as it begins: nothing can be written there.
    engine.submit(vec![store(10, op), write(11, INCOMING, 0, 2)]);
    outgoing.read_exact(&mut long).expect("the engine writes");
    let first = done.recv().expect("answered");
    assert_eq!((first.token, first.result.is_ok()), (10, true));
    let second = done.recv().expect("answered");
    assert_eq!((second.token, second.result.is_err()), (11, true));
}

#[test]
fn the_ring_goes_on_while_what_it_has_read_is_handled() {
    if !has_uring() {
        return;
    }
    let (disk, mut incoming, mut outgoing) = PipeDisk::new();
    let arena = arena(1);
    let (sender, handled) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let may_go_on = std::sync::Mutex::new(may_go_on);
    // The one thread for completions is busy with the first until the test has seen the second.
    let on_done: OnDone = Arc::new(move |done: IoDone| {
        _ = sender.send(done.token);
        _ = may_go_on.lock().expect("no panic").recv();
    });
    let engine = UringEngine::new(disk, &arena, &OsThreads, small_ring(), on_done).expect("probed");
    engine.submit(vec![load(0, INCOMING, 0, &arena)]);
    incoming.write_all(&[4; PAGE as usize]).expect("the engine reads");
    assert_eq!(handled.recv().expect("answered"), 0);
    let (written, has_written) = channel();
    let reading = std::thread::spawn(move || {
        let read = outgoing.read_exact(&mut [0; PAGE as usize]);
        _ = written.send(read);
    });
    engine.submit(vec![write(1, OUTGOING, 0, 2)]);
    let second = has_written.recv_timeout(Duration::from_secs(60));
    drop(go_on);
    second.expect("the ring waits for the handler").expect("the engine writes");
    reading.join().expect("no panic");
}

#[test]
fn case_9_short_transfers_are_continued_and_an_early_end_is_an_error() {
    if !has_uring() {
        return;
    }
    let (disk, mut incoming, mut outgoing) = PipeDisk::new();
    let arena = arena(8);
    let (engine, done) = start(disk, &arena, small_ring());
    let data = common::noise(3 * PAGE as usize, 9);
    engine.submit(vec![load_pages(0, INCOMING, 0, 3, &arena)]);
    data.chunks(1_000).for_each(|piece| incoming.write_all(piece).expect("the engine reads"));
    assert!(bytes_of(done.recv().expect("answered")).as_slice() == data);
    let mut slot = arena.take(0, 8 * PAGE).expect("free again");
    slot.as_mut_slice().copy_from_slice(&common::noise(8 * PAGE as usize, 10));
    let slot = Arc::new(slot.freeze());
    let writes =
        (0..8).map(|_| store(1, IoOp::Write { file: OUTGOING, offset: 0, buf: slot.clone() }));
    // One at a time, for two of them would mix in the pipe.
    for request in writes {
        engine.submit(vec![request]);
        let mut written = vec![0; slot.len()];
        outgoing.read_exact(&mut written).expect("the engine writes");
        assert!(written == slot.as_slice());
        done.recv().expect("answered").result.expect("no fault");
    }
    drop(slot);
    engine.submit(vec![load_pages(0, INCOMING, 0, 3, &arena)]);
    incoming.write_all(&data[..5_000]).expect("the engine reads");
    drop(incoming);
    let err = done.recv().expect("answered").result.expect_err("cut short");
    assert_eq!(err.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn an_operation_owns_its_buffer_after_everybody_else_has_gone() {
    if !has_uring() {
        return;
    }
    let (disk, mut incoming, _outgoing) = PipeDisk::new();
    let arena = arena(1);
    let (engine, done) = start(disk, &arena, small_ring());
    engine.submit(vec![load(0, INCOMING, 0, &arena)]);
    let closing = std::thread::spawn(move || drop(engine));
    assert!(arena.take(0, PAGE).is_none(), "the kernel may still write there");
    incoming.write_all(&[6; PAGE as usize]).expect("the operation still reads");
    closing.join().expect("the end waits for it");
    let read = bytes_of(done.try_recv().expect("answered before the end"));
    assert!(read.as_slice().iter().all(|&byte| byte == 6));
    drop(read);
    assert!(arena.take(0, PAGE).is_some());
}

#[test]
fn what_never_completes_is_counted_and_its_memory_never_freed() {
    if !has_uring() {
        return;
    }
    let (disk, mut incoming, _outgoing) = PipeDisk::new();
    let arena = arena(4);
    let brief = UringConfig {
        depth: 2,
        store_depth: 1,
        drain_timeout: Duration::from_millis(20),
        ..small_ring()
    };
    let (engine, done) = start(disk.clone(), &arena, brief);
    engine.submit((0..4).map(|token| load(token, INCOMING, 0, &arena)).collect());
    engine.close();
    // Two had not reached the kernel and come back; the kernel has the others.
    let mut tokens = Vec::new();
    for done in done.try_iter() {
        tokens.push(done.token);
        assert_eq!(done.result.expect_err("ended").kind(), io::ErrorKind::BrokenPipe);
    }
    assert_eq!((tokens, engine.abandoned(), engine.in_flight()), (vec![2, 3], 2, 2));
    drop(engine);
    incoming.write_all(&[6; 2 * PAGE as usize]).expect("the pipe has room");
    assert!(arena.take(0, PAGE).is_none() && arena.take(PAGE, PAGE).is_none());
    let mut free = arena.take(2 * PAGE, 2 * PAGE).expect("given back");
    free.as_mut_slice().fill(1);
    assert!(free.freeze().as_slice().iter().all(|&byte| byte == 1));
}

/// Whether somebody has the file open for writing, which refuses a read lease.
fn is_written_elsewhere(file: &File) -> bool {
    // SAFETY: the call takes a number, and the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } {
        0 => false,
        _ => {
            let err = io::Error::last_os_error();
            assert_eq!(err.raw_os_error(), Some(libc::EAGAIN), "{err}");
            true
        }
    }
}

/// A registered file that was removed kept its space, which a new file then lacked.
#[test]
fn a_removed_file_is_let_go_before_another_is_made() {
    if !has_uring() {
        return;
    }
    let dir = common::disk_dir();
    let disk = Arc::new(PosixDisk::open(dir.path()).expect("a writable directory"));
    let file = disk.create("old", 4 * PAGE).expect("space");
    let (engine, done) = start(disk.clone(), &arena(1), small_ring());
    assert!(engine.describe().ends_with("registered buffers and files"), "{}", engine.describe());
    engine.submit(vec![store(0, IoOp::Sync { file })]);
    done.recv().expect("answered").result.expect("synced");
    let old = File::open(dir.path().join("old")).expect("exists");
    disk.remove("old").expect("exists");
    assert!(is_written_elsewhere(&old), "the ring has it registered");
    let header = AlignedBuf::new(PAGE as usize).expect("memory");
    let op = IoOp::Create { name: "new".into(), bytes: 4 * PAGE, header, file: None };
    engine.submit(vec![store(1, op)]);
    done.recv().expect("answered").result.expect("space");
    assert!(!is_written_elsewhere(&old));
}

/// More files than the table has places.
#[test]
fn files_beyond_the_table_work_unregistered() {
    if !has_uring() {
        return;
    }
    let dir = TempDir::new_in("/dev/shm").expect("Linux has /dev/shm");
    let disk = Arc::new(PosixDisk::open(dir.path()).expect("a writable directory"));
    let (engine, done) = start(disk.clone(), &arena(1), small_ring());
    let create = |name: u64| disk.create(&format!("data-{name}"), PAGE).expect("space");
    let files: Vec<FileId> = (0..520).map(create).collect();
    engine.submit(files.iter().map(|&file| write(0, file, 0, file.0 as u8)).collect());
    engine.submit(files.iter().map(|&file| store(1, IoOp::Sync { file })).collect());
    (0..1_040).for_each(|_| done.recv().expect("answered").result.expect("no fault"));
    for number in [0, 511, 512, 519] {
        let bytes = fs::read(dir.path().join(format!("data-{number}"))).expect("exists");
        assert_eq!(bytes, vec![files[number].0 as u8; PAGE as usize]);
    }
}

type Chosen = (Box<dyn IoEngine>, String);

fn choose(
    backend: IoBackend,
    disk: Arc<dyn Disk>,
    arena: &Arc<Arena>,
) -> (Result<Chosen>, Receiver<IoDone>) {
    let (sender, done) = channel();
    let on_done: OnDone = Arc::new(move |done| _ = sender.send(done));
    let config = EngineConfig { backend, load_threads: 1, store_threads: 1, uring: small_ring() };
    (choose_engine(&config, disk, arena, &OsThreads, on_done), done)
}

#[test]
fn the_choice_has_a_reason_and_a_demand_that_cannot_be_met_is_refused() {
    let dir = common::disk_dir();
    let posix: Arc<dyn Disk> = Arc::new(PosixDisk::open(dir.path()).expect("writable"));
    let arena = arena(1);
    let chosen = |backend, disk: &Arc<dyn Disk>| choose(backend, disk.clone(), &arena).0;
    let (engine, reason) = chosen(IoBackend::Blocking, &posix).expect("threads");
    assert_eq!((engine.name(), reason.as_str()), ("blocking", &*engine.describe()));
    assert_eq!(reason, "blocking: io_backend = \"blocking\"");
    let memory: Arc<dyn Disk> = Arc::new(MemDisk::new());
    let (engine, reason) = chosen(IoBackend::Auto, &memory).expect("threads");
    assert_eq!(engine.name(), "blocking");
    let Ok(features) = probe_io_uring() else { return };
    assert_eq!(reason, "blocking: the files of disk \"memory\" have no descriptors");
    let err = chosen(IoBackend::IoUring, &memory).err().expect("no descriptors");
    assert_eq!(err.kind(), ErrorKind::Unsupported);
    assert!(err.context().contains("`io_backend`"), "{err}");
    for backend in [IoBackend::Auto, IoBackend::IoUring] {
        let (engine, reason) = chosen(backend, &posix).expect("probed");
        assert_eq!((engine.name(), reason.as_str()), ("io_uring", &*engine.describe()));
        assert!(reason.starts_with(&format!("io_uring: {}", features.kernel)), "{reason}");
    }
    for (depth, store_depth, store_bytes) in
        [(1, 1, 1), (5_000, 1, 1), (4, 4, 1), (4, 0, 1), (4, 1, 0)]
    {
        let config = UringConfig { depth, store_depth, store_bytes, ..small_ring() };
        let engine = UringEngine::new(posix.clone(), &arena, &OsThreads, config, Arc::new(|_| {}));
        assert_eq!(engine.err().expect("out of bounds").kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn under_seccomp_the_probe_says_so_and_the_blocking_engine_works() {
    const NAME: &str = "under_seccomp_the_probe_says_so_and_the_blocking_engine_works";
    let Some(path) = common::child_path() else {
        let dir = common::disk_dir();
        let output = common::child(NAME, dir.path()).output().expect("it starts");
        return common::assert_child_passed(&output);
    };
    common::forbid_io_uring();
    let reason = probe_io_uring().expect_err("forbidden");
    assert!(reason.starts_with("io_uring_setup failed: Operation not permitted"), "{reason}");
    assert!(reason.contains("seccomp or kernel.io_uring_disabled"), "{reason}");
    let disk: Arc<dyn Disk> = Arc::new(PosixDisk::open(&path).expect("writable"));
    let arena = arena(1);
    let refused = choose(IoBackend::IoUring, disk.clone(), &arena).0.err().expect("forbidden");
    assert!(refused.context().contains("seccomp") && refused.context().contains("`io_backend`"));
    let (chosen, done) = choose(IoBackend::Auto, disk.clone(), &arena);
    let (engine, why) = chosen.expect("threads");
    assert_eq!(why, format!("blocking: {reason}"));
    let file = disk.create("data", PAGE).expect("space");
    engine.submit(vec![write(0, file, 0, 8)]);
    done.recv().expect("answered").result.expect("written");
    engine.submit(vec![load(0, file, 0, &arena)]);
    assert_eq!(bytes_of(done.recv().expect("answered")).as_slice(), [8; PAGE as usize]);
}

/// Limits what this process may lock, and makes this thread one to which limits apply.
fn limit_locked_memory(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the calls restrict this thread and process, and take no memory of ours. The raw call
    // changes the user of this thread alone, whose children inherit it.
    let set = unsafe {
        let limited = libc::c_long::from(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit));
        match libc::geteuid() {
            0 => limited | libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534),
            _ => limited,
        }
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}

#[test]
fn without_locked_memory_buffers_stay_unregistered_and_it_is_said() {
    const NAME: &str = "without_locked_memory_buffers_stay_unregistered_and_it_is_said";
    let Some(path) = common::child_path() else {
        if !has_uring() {
            return;
        }
        let dir = common::disk_dir();
        let output = common::child(NAME, dir.path()).output().expect("it starts");
        return common::assert_child_passed(&output);
    };
    unregistered(&path);
}

fn unregistered(path: &Path) {
    let disk = Arc::new(PosixDisk::open(path).expect("writable"));
    let file = disk.create("data", 64 * PAGE).expect("space");
    let arena = arena(64);
    // Enough for a ring, and less than the arena.
    limit_locked_memory(32 * PAGE);
    let (engine, done) = start(disk, &arena, small_ring());
    let said = engine.describe();
    assert!(said.contains("buffers not registered") && said.contains("ulimit -l"), "{said}");
    let mut slot = arena.take(0, 64 * PAGE).expect("all of it");
    slot.as_mut_slice().copy_from_slice(&common::noise(64 * PAGE as usize, 4));
    let op = IoOp::Write { file, offset: 0, buf: Arc::new(slot.freeze()) };
    engine.submit(vec![store(0, op)]);
    drop(done.recv().expect("answered"));
    engine.submit(vec![load_pages(0, file, 0, 64, &arena)]);
    let read = bytes_of(done.recv().expect("answered"));
    assert!(read.as_slice() == common::noise(64 * PAGE as usize, 4));
    limit_locked_memory(0);
    // Whether the memory of a ring itself counts depends on the kernel.
    if let Err(reason) = probe_io_uring() {
        assert!(reason.contains("ulimit -l"), "{reason}");
    }
}
