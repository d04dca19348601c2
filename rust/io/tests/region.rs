//! Reads into memory that a caller lent, and requests that are dropped before their turn.

mod common;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use common::{Backend, arena, backends, disk_dir, noise};
use tiered_kv_io::{
    AlignedBuf, CancelFlag, Disk, IoDone, IoEngine, IoOp, IoRequest, OnDone, OsThreads, PAGE_BYTES,
    PosixDisk, Priority, ReadInto, Region, RegionPart, Registration, is_cancelled,
};

const PAGE: usize = PAGE_BYTES as usize;

fn region(slots: usize) -> Arc<Region> {
    let memory = AlignedBuf::new(slots * 2 * PAGE).expect("memory");
    Region::new(memory, 2 * PAGE, 2 * PAGE).expect("valid")
}

fn start(backend: Backend, disk: Arc<dyn Disk>) -> (Box<dyn IoEngine>, Receiver<IoDone>) {
    let (sender, done) = channel();
    let on_done: OnDone = Arc::new(move |done| _ = sender.send(done));
    (common::engine(backend, disk, &arena(1), &OsThreads, on_done).expect("an engine"), done)
}

fn part_of(done: IoDone) -> RegionPart {
    done.result.expect("no fault");
    match done.op {
        IoOp::Read { buf: ReadInto::Region(part), .. } => part,
        _ => panic!("not a read into a region"),
    }
}

#[test]
fn a_read_fills_its_part_of_a_slot_and_holds_the_slot_until_it_has_ended() {
    for backend in backends() {
        let dir = disk_dir();
        let disk = Arc::new(PosixDisk::open(dir.path()).expect("a directory"));
        let file = disk.create("data", 8 * PAGE_BYTES).expect("space");
        let data = noise(2 * PAGE, 5);
        let mut buf = AlignedBuf::new(2 * PAGE).expect("memory");
        buf.as_mut_slice().copy_from_slice(&data);
        disk.write_at(file, PAGE_BYTES, buf.as_slice()).expect("writes");
        let (engine, done) = start(backend, disk);
        let region = region(3);
        let registered = engine.register(&region);
        let wanted = match backend {
            Backend::Blocking => Registration::NotNeeded,
            Backend::Uring => Registration::Done,
        };
        assert_eq!(registered, wanted);
        // One slot in two parts, as where a part of it is read through another buffer.
        let (cut, parts) = region.claim(1).expect("free").cut(&[0..PAGE, PAGE..2 * PAGE]);
        let request = |(token, part)| {
            let offset = PAGE_BYTES * (1 + token);
            let op = IoOp::Read { file, offset, buf: ReadInto::Region(part) };
            IoRequest { token, priority: Priority::Load, op, cancel: None }
        };
        engine.submit((0..).zip(parts).map(request).collect());
        let mut ended: Vec<IoDone> = (0..2).map(|_| done.recv().expect("answered")).collect();
        assert!(region.claim(1).is_err(), "the parts own the slot");
        ended.sort_by_key(|done| done.token);
        let slot = cut.join(ended.into_iter().map(part_of).collect()).expect("all are back");
        assert!(slot.as_slice() == data, "{backend:?}");
        drop(slot);
        for other in [0, 2] {
            let zero = region.read(other, |bytes| bytes.iter().all(|b| *b == 0));
            assert!(zero.expect("free"), "{backend:?}: slot {other} was not asked for");
        }
    }
}

#[test]
fn regions_that_are_gone_give_their_places_back() {
    for backend in backends() {
        let dir = disk_dir();
        let disk = Arc::new(PosixDisk::open(dir.path()).expect("a directory"));
        let (engine, _done) = start(backend, disk);
        for _ in 0..1000 {
            let registered = engine.register(&region(1));
            assert!(!matches!(registered, Registration::Refused(_)), "{registered:?}");
        }
        let all: Vec<Arc<Region>> = (0..300).map(|_| region(1)).collect();
        let refused = all.iter().filter_map(|region| match engine.register(region) {
            Registration::Refused(why) => Some(why),
            _ => None,
        });
        let refused: Vec<String> = refused.collect();
        if backend == Backend::Uring {
            assert!(refused.iter().any(|why| why.contains("full")), "{refused:?}");
        }
        engine.close();
        let late = engine.register(&all[0]);
        assert_eq!(matches!(late, Registration::Refused(_)), backend == Backend::Uring);
    }
}

#[test]
fn a_request_whose_flag_is_set_is_dropped_and_one_whose_flag_was_reset_is_not() {
    for backend in backends() {
        let dir = disk_dir();
        let disk = Arc::new(PosixDisk::open(dir.path()).expect("a directory"));
        let file = disk.create("data", 8 * PAGE_BYTES).expect("space");
        let (engine, done) = start(backend, disk);
        let region = region(1);
        for set in [true, false] {
            let flag = CancelFlag::default();
            flag.set(true);
            flag.set(set);
            region.write(0, |bytes| bytes.fill(7)).expect("free");
            let (cut, mut parts) = region.claim(0).expect("free").cut(&[0..PAGE, PAGE..PAGE]);
            let buf = ReadInto::Region(parts.remove(0));
            let op = IoOp::Read { file, offset: 0, buf };
            let cancel = Some(flag);
            engine.submit(vec![IoRequest { token: 1, priority: Priority::Load, op, cancel }]);
            let ended = done.recv().expect("answered");
            assert_eq!(ended.result.as_ref().is_err_and(is_cancelled), set, "{backend:?}");
            let IoOp::Read { buf: ReadInto::Region(part), .. } = ended.op else { panic!("a read") };
            parts.push(part);
            let slot = cut.join(parts).expect("all are back");
            assert_eq!(slot.as_slice()[0], if set { 7 } else { 0 }, "{backend:?}");
        }
    }
}
