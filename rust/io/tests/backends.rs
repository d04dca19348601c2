//! What every backend does alike, over files on a device and in memory.

mod common;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};

use common::{Backend, arena, backends, bytes_of, load, load_pages, store, write};
use tempfile::TempDir;
use tiered_kv_io::{
    AlignedBuf, Arena, Disk, FileId, IoDone, IoEngine, IoOp, IoRequest, OnDone, OsThreads,
    PAGE_BYTES, PosixDisk,
};
use tiered_kv_types::{ErrorKind, Result};

const PAGE: u64 = PAGE_BYTES;

fn posix(dir: &Path) -> Arc<PosixDisk> {
    Arc::new(PosixDisk::open(dir).expect("a writable directory"))
}

fn start(
    backend: Backend,
    disk: Arc<dyn Disk>,
    arena: &Arc<Arena>,
) -> (Box<dyn IoEngine>, Receiver<IoDone>) {
    let (sender, done) = channel();
    // The test may have ended by a failure of its own.
    let on_done: OnDone = Arc::new(move |done| _ = sender.send(done));
    (common::engine(backend, disk, arena, &OsThreads, on_done).expect("an engine"), done)
}

#[test]
fn close_drains_what_was_submitted_and_later_requests_are_refused() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let file = disk.create("data", 256 * PAGE).expect("space");
        let (engine, done) = start(backend, disk.clone(), &arena(1));
        engine.submit((0..256).map(|token| write(token, file, token, token as u8)).collect());
        engine.close();
        let mut tokens: Vec<u64> = done.try_iter().map(|done| done.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..256).collect::<Vec<_>>(), "{backend:?}");
        assert_eq!(engine.in_flight(), 0);
        let mut page = vec![0; PAGE as usize];
        for token in 0..256_u64 {
            disk.read_at(file, token * PAGE, &mut page).expect("in range");
            assert!(page.iter().all(|&byte| byte == token as u8));
        }
        engine.submit(vec![write(999, file, 0, 1)]);
        let refused = done.try_recv().expect("answered at once");
        assert_eq!((refused.token, engine.in_flight()), (999, 0));
        assert_eq!(refused.result.expect_err("closed").kind(), io::ErrorKind::BrokenPipe);
    }
}

/// Many more operations than the engine performs at once, from memory of every kind.
fn much_at_once(backend: Backend, dir: &Path) {
    const PAGES: u64 = 3_000;
    let disk = posix(dir);
    let file = disk.create("data", PAGES * PAGE).expect("space");
    let arena = arena(PAGES);
    let (engine, done) = start(backend, disk, &arena);
    let page_of = |page: u64| common::noise(PAGE as usize, page);
    let writes = (0..PAGES).map(|page| {
        let offset = page * PAGE;
        let op = match page % 3 {
            0 => {
                let mut slot = arena.take(offset, PAGE).expect("a free page");
                slot.as_mut_slice().copy_from_slice(&page_of(page));
                IoOp::Write { file, offset, buf: Arc::new(slot.freeze()) }
            }
            1 => {
                let mut buf = AlignedBuf::new(PAGE as usize).expect("memory");
                buf.as_mut_slice().copy_from_slice(&page_of(page));
                IoOp::Write { file, offset, buf: Arc::new(buf) }
            }
            _ => IoOp::Write { file, offset, buf: Arc::new(page_of(page)) },
        };
        store(page, op)
    });
    engine.submit(writes.collect());
    (0..PAGES).for_each(|_| done.recv().expect("answered").result.expect("written"));
    engine.submit(vec![store(0, IoOp::Sync { file })]);
    done.recv().expect("answered").result.expect("synced");
    for batch in 0..30 {
        let pages = batch * PAGES / 30..(batch + 1) * PAGES / 30;
        engine.submit(pages.map(|page| load(page, file, page, &arena)).collect());
    }
    for _ in 0..PAGES {
        let done = done.recv().expect("answered");
        let page = done.token;
        assert!(bytes_of(done).as_slice() == page_of(page), "page {page}");
    }
    engine.close();
    assert_eq!((engine.in_flight(), arena.taken_bytes()), (0, 0));
}

#[test]
fn thousands_of_operations_come_back_whole_on_a_device_and_in_memory() {
    for backend in backends() {
        much_at_once(backend, common::disk_dir().path());
        much_at_once(backend, TempDir::new_in("/dev/shm").expect("Linux has it").path());
    }
}

/// The first part of a page-aligned buffer.
struct Part(AlignedBuf, usize);

impl tiered_kv_io::ReadBuf for Part {
    fn as_slice(&self) -> &[u8] {
        &self.0.as_slice()[..self.1]
    }
}

#[test]
fn writes_of_single_sectors_work_and_ranges_off_the_alignment_are_refused() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let unit = disk.alignment().offset as usize;
        let file = disk.create("data", 4 * PAGE).expect("space");
        let arena = arena(1);
        let (engine, done) = start(backend, disk.clone(), &arena);
        let part = |len: usize, offset: usize| {
            let mut buf = AlignedBuf::new(PAGE as usize).expect("memory");
            buf.as_mut_slice().fill(7);
            let offset = offset as u64;
            store(1, IoOp::Write { file, offset, buf: Arc::new(Part(buf, len)) })
        };
        for (len, offset) in [(unit, unit), (0, 0)] {
            engine.submit(vec![part(len, offset)]);
            done.recv().expect("answered").result.expect("on the alignment");
        }
        engine.submit(vec![load(0, file, 0, &arena)]);
        let page = bytes_of(done.recv().expect("answered"));
        let written: Vec<usize> =
            (0..PAGE as usize).filter(|&at| page.as_slice()[at] == 7).collect();
        assert_eq!(written, (unit..2 * unit).collect::<Vec<_>>(), "{backend:?}");
        engine.submit(vec![part(PAGE as usize, 4 * PAGE as usize)]);
        let beyond = done.recv().expect("answered").result.expect_err("it would grow");
        assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        if disk.is_direct() {
            for (len, offset) in [(unit / 2, 0), (unit, unit / 2)] {
                engine.submit(vec![part(len, offset)]);
                let off = done.recv().expect("answered").result.expect_err("off the alignment");
                assert_eq!(off.kind(), io::ErrorKind::InvalidInput, "{backend:?}");
            }
        }
    }
}

#[test]
fn buffers_come_back_with_data_and_with_errors() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let file = disk.create("data", 4 * PAGE).expect("space");
        disk.write_at(file, PAGE, &common::noise(PAGE as usize, 3)).expect("in range");
        let arena = arena(4);
        let (engine, done) = start(backend, disk.clone(), &arena);
        engine.submit(vec![load(0, file, 1, &arena)]);
        let read = bytes_of(done.recv().expect("answered"));
        assert!(read.as_slice() == common::noise(PAGE as usize, 3));
        drop(read);
        let outside = fs::OpenOptions::new().write(true).open(dir.path().join("data"));
        // Off the end, cut short on the alignment, and cut short off it.
        for (page, pages, len) in [(9, 1, 4 * PAGE), (0, 3, 2 * PAGE), (0, 3, 5_000)] {
            outside.as_ref().expect("exists").set_len(len).expect("shrinks");
            engine.submit(vec![load_pages(1, file, page, pages, &arena)]);
            let failed = done.recv().expect("answered");
            let kind = failed.result.expect_err("off the end").kind();
            assert_eq!(kind, io::ErrorKind::UnexpectedEof, "{backend:?} {len}");
            assert_eq!(arena.taken_bytes(), pages * PAGE, "held by its operation alone");
            drop(failed.op);
            assert_eq!(arena.taken_bytes(), 0);
        }
        disk.remove("data").expect("exists");
        engine.submit(vec![load(1, file, 0, &arena), store(2, IoOp::Sync { file })]);
        for _ in 0..2 {
            let gone = done.recv().expect("answered").result.expect_err("removed");
            assert_eq!(gone.kind(), io::ErrorKind::NotFound, "{backend:?}");
        }
    }
}

fn create(token: u64, name: &str, bytes: u64) -> IoRequest {
    let mut header = AlignedBuf::new(PAGE as usize).expect("memory");
    header.as_mut_slice().fill(5);
    store(token, IoOp::Create { name: name.into(), bytes, header, file: None })
}

fn created(done: &IoDone) -> Option<FileId> {
    match done.op {
        IoOp::Create { file, .. } => file,
        _ => panic!("not a creation"),
    }
}

#[test]
fn a_created_file_is_whole_or_not_there() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let (engine, done) = start(backend, disk.clone(), &arena(1));
        engine.submit(vec![create(1, "good", 4 * PAGE)]);
        let good = done.recv().expect("answered");
        assert!(good.result.is_ok());
        assert_eq!(created(&good), Some(disk.open("good").expect("exists").0));
        let image = disk.read_file("good", 4 * PAGE).expect("fits").expect("exists");
        assert_eq!(image[..PAGE as usize], [5; PAGE as usize]);
        for (name, bytes) in [("good", 4 * PAGE), ("huge", 1 << 50)] {
            engine.submit(vec![create(2, name, bytes)]);
            let failed = done.recv().expect("answered");
            assert_eq!(created(&failed), None);
            assert!(failed.result.is_err(), "{backend:?} {name}");
            assert_eq!(disk.list().expect("readable").len(), 1, "{name}");
        }
    }
}

#[test]
fn a_panic_of_the_callback_loses_no_thread() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let file = disk.create("data", 4 * PAGE).expect("space");
        let (sender, done) = channel();
        let on_done: OnDone = Arc::new(move |done: IoDone| {
            let token = done.token;
            sender.send(done).expect("the test listens");
            assert_ne!(token, 1, "a defect in the callback");
        });
        let engine = common::engine(backend, disk, &arena(1), &OsThreads, on_done);
        let engine = engine.expect("an engine");
        engine.submit(vec![write(1, file, 0, 1)]);
        engine.submit(vec![write(2, file, 1, 2)]);
        let mut tokens = [(); 2].map(|()| done.recv().expect("answered").token);
        tokens.sort_unstable();
        assert_eq!(tokens, [1, 2], "{backend:?}");
        engine.close();
        assert_eq!(engine.in_flight(), 0);
    }
}

#[test]
fn closing_from_a_callback_does_not_deadlock() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let file = disk.create("data", 8 * PAGE).expect("space");
        let own: Arc<OnceLock<Box<dyn IoEngine>>> = Arc::default();
        let (sender, done) = channel();
        let on_done: OnDone = {
            let own = Arc::clone(&own);
            Arc::new(move |done: IoDone| {
                own.wait().close();
                sender.send(done.token).expect("the test listens");
            })
        };
        let arena = arena(1);
        let engine = common::engine(backend, disk, &arena, &OsThreads, on_done);
        let engine = engine.expect("an engine");
        engine.submit(vec![load(0, file, 0, &arena), write(1, file, 1, 1), write(2, file, 2, 2)]);
        assert!(own.set(engine).is_ok());
        let mut tokens = [(); 3].map(|()| done.recv().expect("answered"));
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2], "what was submitted completes all the same");
        own.wait().close();
        assert_eq!(own.wait().in_flight(), 0, "a close from outside waits still");
    }
}

#[test]
fn dropping_the_engine_in_its_callback_does_not_deadlock() {
    for backend in backends() {
        let dir = common::disk_dir();
        let disk = posix(dir.path());
        let file = disk.create("data", 8 * PAGE).expect("space");
        let own: Arc<Mutex<Option<Box<dyn IoEngine>>>> = Arc::default();
        let (sender, done) = channel();
        let on_done: OnDone = {
            let own = Arc::clone(&own);
            Arc::new(move |done: IoDone| {
                let engine = own.lock().expect("no panic").take();
                drop(engine);
                sender.send(done.token).expect("the test listens");
            })
        };
        let mut held = own.lock().expect("no panic");
        let engine = common::engine(backend, disk, &arena(1), &OsThreads, on_done);
        let engine = engine.expect("an engine");
        engine.submit(vec![write(1, file, 1, 1), write(2, file, 2, 2)]);
        *held = Some(engine);
        drop(held);
        let mut tokens = [(); 2].map(|()| done.recv().expect("answered"));
        tokens.sort_unstable();
        assert_eq!(tokens, [1, 2], "{backend:?}");
    }
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
    for backend in backends() {
        // One that reads, one that writes and one that commits, or the ring's and its helper; one
        // that handles what is done.
        let needed = if backend == Backend::Blocking { 4 } else { 3 };
        for can_start in 0..=needed {
            let dir = common::disk_dir();
            let threads = Few(AtomicUsize::new(can_start));
            let disk = posix(dir.path());
            let engine = common::engine(backend, disk, &arena(1), &threads, Arc::clone(&none));
            match engine {
                Ok(engine) => {
                    assert_eq!(can_start, needed);
                    drop(engine);
                }
                Err(err) => assert_eq!((err.kind(), can_start < needed), (ErrorKind::Io, true)),
            }
            assert_eq!(marker.strong_count(), 1, "{backend:?}: a thread left with {can_start}");
        }
    }
}
