//! Single decisions of the machine, with its commands performed by hand.

use super::crash_points::bench::{Bench, Order, blank};
use crate::machine::{Command, Doomed, Event, GetTarget, Outcome, PutItem, Quota};
use std::sync::Arc;
use tiered_kv_io::{Disk, DiskOp, FileId, MemDisk};
use tiered_kv_types::{
    BlockInfo, BlockKey, KvLayout, MissReason, NamespaceId, RecordHeader, TenantId,
};

fn key(id: u8) -> BlockKey {
    let mut bytes = [0; 32];
    (bytes[0], bytes[1], bytes[8]) = (id, id, id);
    BlockKey(bytes)
}

fn item(id: u8, parent: Option<u8>) -> PutItem {
    let depth = u32::from(parent.is_some());
    let info = BlockInfo { depth, tokens: 16, ..BlockInfo::default() };
    PutItem { key: key(id), parent: parent.map(key), info, tenant: TenantId::NONE }
}

fn disks() -> Vec<Arc<MemDisk>> {
    vec![Arc::new(blank()), Arc::new(blank())]
}

fn bench() -> Bench {
    Bench::open(&disks(), 1_000_000, Order::OldestFirst)
}

/// The payload writes in flight, in their order.
fn writes(bench: &Bench) -> Vec<u64> {
    let write = |command: &Command| match command {
        Command::WriteSlabs { from, .. } => Some(from.generation()),
        _ => None,
    };
    bench.in_flight().filter_map(write).collect()
}

#[test]
fn a_block_goes_to_its_drive_behind_its_parent_though_it_was_stored_before_it() {
    let mut bench = bench();
    // Segments for both drives first, and the two groups under way that the others wait behind.
    bench.put(0, vec![item(1, None), item(2, None)], &[1, 2]);
    bench.settle();
    bench.put(0, vec![item(3, None)], &[3]);
    bench.put(0, vec![item(7, None)], &[6]);
    let waiting_behind = writes(&bench).len();
    assert_eq!(waiting_behind, 2);
    bench.put(0, vec![item(5, Some(4))], &[4]);
    bench.put(0, vec![item(4, None)], &[5]);
    assert_eq!(writes(&bench).len(), waiting_behind, "two groups write payloads at a time");
    let (child, parent) = (bench.generation(0, key(5)), bench.generation(0, key(4)));
    assert!(child < parent, "the child is the older");
    let mut order = Vec::new();
    while bench.perform() {
        for generation in writes(&bench) {
            if !order.contains(&generation) {
                order.push(generation);
            }
        }
    }
    let at = |generation| order.iter().position(|g| *g == generation).expect("it was written");
    assert!(at(parent) < at(child), "{order:?}");
}

#[test]
fn a_group_lies_in_the_order_of_its_blocks_whatever_slots_it_recycles() {
    let mut bench = bench();
    // All of them on one drive.
    let old = || [0, 2, 4, 6, 8, 10];
    bench.put(0, old().map(|id| item(id, None)).into(), &[1, 2, 3, 4, 5, 6]);
    bench.settle();
    for id in [6, 0, 10, 2, 8, 4] {
        let (ns, doomed) = (bench.ns[0], crate::machine::Doomed::Keys(vec![key(id)]));
        bench.call(|op| Event::Delete { op, ns, doomed, deadline: u64::MAX });
        bench.settle();
    }
    let (ids, tags) = ([20, 22, 24, 26, 28, 30], [11, 12, 13, 14, 15, 16]);
    // Two groups of their own, so that the others wait and are one group.
    bench.put(0, vec![item(40, None)], &[10]);
    bench.put(0, vec![item(42, None)], &[9]);
    bench.put(0, ids.map(|id| item(id, None)).into(), &tags);
    let mut places = Vec::new();
    loop {
        for command in bench.in_flight() {
            if let Command::WriteSlabs { block, to, .. } = command
                && !places.contains(&(*block, to[0]))
            {
                places.push((*block, to[0]));
            }
        }
        if !bench.perform() {
            break;
        }
    }
    let offsets: Vec<(FileId, u64)> = places[2..].iter().map(|(_, place)| *place).collect();
    assert_eq!(offsets.len(), ids.len());
    assert!(offsets.is_sorted(), "{offsets:?}");
    for (id, tag) in ids.into_iter().zip(tags) {
        assert_eq!(bench.get(0, key(id)), Ok(tag));
    }
    assert_eq!(bench.machine.audit().faults, Vec::<String>::new());
}

#[test]
fn groups_that_are_written_during_a_sync_commit_with_one() {
    let mut bench = bench();
    bench.put(0, vec![item(0, None)], &[1]);
    bench.settle();
    let of_payloads = |c: &Command| matches!(c, Command::WriteSlabs { .. });
    bench.put(0, vec![item(2, None)], &[2]);
    bench.perform_where(of_payloads);
    let is_header = |c: &Command| matches!(c, Command::WriteHeaders { .. });
    assert!(bench.in_flight().any(is_header), "the first group commits");
    for (id, tag) in [(4, 3), (6, 4), (8, 5)] {
        bench.put(0, vec![item(id, None)], &[tag]);
        bench.perform_where(|c| matches!(c, Command::PrepareSegment { .. }));
        bench.perform_where(of_payloads);
    }
    assert_eq!(bench.in_flight().filter(|c| of_payloads(c)).count(), 0);
    let groups = bench.machine.counters.groups;
    bench.settle();
    assert_eq!(bench.machine.counters.groups - groups, 2, "the first, and the rest at once");
    for (id, tag) in [(2, 2), (4, 3), (6, 4), (8, 5)] {
        assert_eq!(bench.get(0, key(id)), Ok(tag));
    }
    assert_eq!(bench.machine.audit().faults, Vec::<String>::new());
}

#[test]
fn a_group_writes_all_payloads_then_all_headers_then_syncs() {
    let mut bench = bench();
    // A segment on each drive first.
    bench.put(0, vec![item(10, None), item(11, None)], &[1, 2]);
    bench.settle();
    bench.put(0, (0..4).map(|id| item(id, None)).collect(), &[3, 4, 5, 6]);
    let mut phases: Vec<&str> = Vec::new();
    let phase = |command: &Command| match command {
        Command::PrepareSegment { .. } => "prepare",
        Command::WriteSlabs { .. } => "payload",
        Command::WriteHeaders { .. } => "headers",
        Command::Sync { .. } => "sync",
        other => panic!("{other:?}"),
    };
    loop {
        phases.extend(bench.in_flight().next().map(phase));
        if !bench.perform() {
            break;
        }
    }
    let of_drives = [["payload"; 4].as_slice(), &["headers"; 2], &["sync"; 2]];
    assert_eq!(phases, of_drives.concat());
}

#[test]
fn a_copy_that_lost_its_checksum_in_memory_is_a_miss_and_the_drive_still_serves_the_block() {
    let mut bench = bench();
    for durable in [true, false] {
        bench.put(0, vec![item(1, None)], &[1]);
        if durable {
            bench.settle();
        }
        assert_eq!(bench.damaged_get(0, key(1)), Err(MissReason::Corrupt));
        assert_eq!(bench.machine.counters.corrupt_dram, if durable { 1 } else { 2 });
        if durable {
            assert_eq!(bench.get(0, key(1)), Ok(1), "loaded and verified again");
            let ns = bench.ns[0];
            let doomed = crate::machine::Doomed::Keys(vec![key(1)]);
            bench.call(|op| Event::Delete { op, ns, doomed, deadline: u64::MAX });
            bench.settle();
        } else {
            assert_eq!(bench.get(0, key(1)), Err(MissReason::Absent), "it was nowhere else");
            bench.settle();
        }
        assert_eq!(bench.machine.audit().faults, Vec::<String>::new());
    }
}

#[test]
fn a_stored_length_other_than_the_layouts_is_a_miss() {
    let disks = disks();
    let mut bench = Bench::open(&disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(1, None)], &[1]);
    bench.settle();
    bench.close();
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    let longer = KvLayout::uniform(16, 6000).expect("valid");
    let same = bench.machine.open_namespace(NamespaceId([1; 32]), &longer).expect("it fits");
    assert_eq!(same, bench.ns[0]);
    assert_eq!(bench.get(0, key(1)), Err(MissReason::Length));
}

#[test]
fn a_new_put_draws_a_newer_generation_and_a_no_op_draws_none_for_its_key() {
    let mut bench = bench();
    bench.put(0, vec![item(1, None)], &[1]);
    let first = bench.generation(0, key(1));
    let outcome = bench.put(0, vec![item(1, None)], &[2]);
    assert!(matches!(outcome, Outcome::Put(s) if s == [crate::machine::PutStatus::Exists]));
    assert_eq!(bench.generation(0, key(1)), first);
    assert_eq!(bench.machine.counters.put_exists, 1, "counted");
    let ns = bench.ns[0];
    let doomed = crate::machine::Doomed::Keys(vec![key(1)]);
    bench.call(|op| Event::Delete { op, ns, doomed, deadline: u64::MAX });
    bench.put(0, vec![item(1, None)], &[3]);
    assert!(bench.generation(0, key(1)) > first);
}

/// Copies the block in the first slot of the first segment to the third one, as if it had been
/// written there too: segments of 32 KiB, a table of 4 KiB, slots of 8 KiB.
fn write_twice(disk: &MemDisk) {
    let (file, _) = disk.open("segment-000000.tkv").expect("there");
    let mut header = [0; 512];
    disk.read_at(file, 4096, &mut header).expect("reads");
    let mut record = RecordHeader::decode(&header).valid().expect("a record");
    record.slot = 2;
    disk.write_at(file, 4096 + 2 * 512, &record.encode()).expect("writes");
    let mut payload = [0; 8192];
    disk.read_at(file, 8192, &mut payload).expect("reads");
    disk.write_at(file, 8192 + 2 * 8192, &payload).expect("writes");
    disk.sync(file).expect("syncs");
}

#[test]
fn a_block_that_was_evicted_from_its_drive_and_written_again_is_found_once() {
    let disks = disks();
    let mut bench = Bench::open(&disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(2, None)], &[1]);
    bench.settle();
    drop(bench);
    write_twice(&disks[0]);
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    assert_eq!(bench.get(0, key(2)), Ok(1));
    assert_eq!(bench.machine.counters.recovered, 1);
    let audit = bench.machine.audit();
    assert_eq!((audit.nvme_used_bytes, audit.faults), (8192, Vec::new()));
}

/// The records that an open after a crash has believed.
fn believed(bench: &Bench) -> usize {
    (0..2).map(|drive| bench.machine.checkpoint(drive).records.len()).sum()
}

#[test]
fn a_record_of_another_class_epoch_than_its_segments_is_not_believed() {
    let disks = disks();
    let mut bench = Bench::open(&disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(2, None)], &[1]);
    bench.settle();
    drop(bench);
    let (file, _) = disks[0].open("segment-000000.tkv").expect("there");
    let mut header = [0; 512];
    disks[0].read_at(file, 4096, &mut header).expect("reads");
    let mut record = RecordHeader::decode(&header).valid().expect("a record");
    record.class_epoch += 1;
    disks[0].write_at(file, 4096, &record.encode()).expect("writes");
    disks[0].sync(file).expect("syncs");
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    assert_eq!((believed(&bench), bench.machine.counters.damaged_headers), (0, 1));
    assert_eq!(bench.get(0, key(2)), Err(MissReason::Absent));
}

#[test]
fn a_copy_that_was_found_corrupt_leaves_no_header() {
    let disks = disks();
    let mut bench = Bench::open(&disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(2, None)], &[1]);
    bench.settle();
    quota(&mut bench, Some(0), None);
    quota(&mut bench, None, None);
    disks[0].flip("segment-000000.tkv", 8192 + 100, 1);
    assert_eq!(bench.get(0, key(2)), Err(MissReason::Corrupt));
    // The next group of the drive zeroes it. Its block is of another class: the slot stays free.
    bench.put(1, vec![item(4, None)], &[2]);
    bench.settle();
    drop(bench);
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    assert_eq!(believed(&bench), 2, "the two parts of the other block");
    assert_eq!(bench.get(0, key(2)), Err(MissReason::Absent), "it was refused for good");
    assert_eq!(bench.get(1, key(4)), Ok(2));
}

fn quota(bench: &mut Bench, dram_bytes: Option<u64>, nvme_bytes: Option<u64>) {
    let quota = Quota { dram_bytes, nvme_bytes };
    assert_eq!(bench.machine.set_quota(bench.ns[0], quota), Some(true));
    bench.settle();
}

#[test]
fn without_memory_a_held_block_stays_on_its_drive_while_it_is_copied_from() {
    let mut bench = Bench::open_with(&disks(), 1_000_000, Order::OldestFirst, true);
    bench.put(0, vec![item(1, None)], &[1]);
    bench.settle();
    let (ns, keys, deadline) = (bench.ns[0], vec![key(1)], u64::MAX);
    let held = keys.clone();
    bench.call(|op| Event::Hold { op, ns, keys: held, expires: u64::MAX });
    let (target, hold) = (GetTarget::Buffers, None);
    bench.begin(|op| Event::Get { op, ns, keys, deadline, target, hold, recompute: None });
    assert!(bench.perform(), "it is loaded, and not yet copied out");
    let none = Quota { dram_bytes: None, nvme_bytes: Some(0) };
    assert_eq!(bench.machine.set_quota(ns, none), Some(false), "it cannot go");
    assert_eq!(bench.machine.set_quota(ns, Quota::default()), Some(true));
    bench.settle();
    assert_eq!((believed(&bench), bench.machine.counters.evicted_nvme), (1, 0));
}

#[test]
fn a_block_that_leaves_its_drive_while_in_memory_leaves_no_header_there() {
    let disks = disks();
    let mut bench = Bench::open(&disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(1, None)], &[1]);
    bench.settle();
    quota(&mut bench, None, Some(0));
    quota(&mut bench, None, None);
    // The next group of the drive zeroes it.
    bench.put(0, vec![item(2, None)], &[2]);
    bench.settle();
    drop(bench);
    let bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    assert_eq!(believed(&bench), 1, "what is written to other slots now would be found twice");
}

/// A store that block 1 has left: out of memory, then off its drive, where its header stays.
fn left_by_a_block(disks: &[Arc<MemDisk>]) -> Bench {
    let mut bench = Bench::open(disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(1, None)], &[1]);
    bench.settle();
    quota(&mut bench, Some(0), None);
    quota(&mut bench, None, Some(0));
    quota(&mut bench, None, None);
    bench
}

fn delete(bench: &mut Bench, id: u8) {
    let (ns, doomed) = (bench.ns[0], Doomed::Keys(vec![key(id)]));
    bench.call(|op| Event::Delete { op, ns, doomed, deadline: u64::MAX });
    bench.settle();
}

#[test]
fn tombstones_retire_once_no_header_is_left_that_they_cover() {
    let disks = disks();
    let mut bench = left_by_a_block(&disks);
    while bench.machine.counters.tombstones_retired == 0 {
        delete(&mut bench, 1);
    }
    drop(bench);
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    assert_eq!(bench.get(0, key(1)), Err(MissReason::Absent), "a deleted block came back");
}

#[test]
fn tombstones_stay_while_a_segment_cannot_be_read_that_they_may_cover() {
    let disks = disks();
    let mut bench = left_by_a_block(&disks);
    delete(&mut bench, 1);
    drop(bench);
    // The first read of each segment, which is opened for it.
    for disk in &disks {
        let mut left = 0;
        disk.set_fault(Some(Box::new(move |op| {
            left += u32::from(matches!(&op, DiskOp::Open { name } if name.starts_with("segment")));
            let fails = left > 0 && matches!(op, DiskOp::ReadAt { offset: 0, .. });
            left -= u32::from(fails);
            fails.then(|| std::io::Error::other("planted"))
        })));
    }
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    disks.iter().for_each(|disk| disk.set_fault(None));
    assert!(bench.machine.counters.damaged_headers > 0, "of those that could not be read");
    bench.settle();
    assert_eq!(bench.machine.counters.tombstones_retired, 0);
    drop(bench);
    let mut bench = Bench::open(&disks, 3_000_000, Order::OldestFirst);
    assert_eq!(bench.get(0, key(1)), Err(MissReason::Absent), "a deleted block came back");
}

#[test]
fn a_tombstone_of_after_the_open_outlives_those_that_it_found() {
    let disks = disks();
    let mut bench = Bench::open(&disks, 1_000_000, Order::OldestFirst);
    bench.put(0, vec![item(2, None)], &[1]);
    bench.settle();
    delete(&mut bench, 9);
    drop(bench);
    // One copy is believed, and the header of the other stays in a slot that is free.
    write_twice(&disks[0]);
    let mut bench = Bench::open(&disks, 2_000_000, Order::OldestFirst);
    delete(&mut bench, 2);
    assert_eq!(bench.machine.counters.tombstones_retired, 1, "the one that was found");
    drop(bench);
    let mut bench = Bench::open(&disks, 3_000_000, Order::OldestFirst);
    assert_eq!(bench.get(0, key(2)), Err(MissReason::Absent), "a deleted block came back");
}

#[test]
fn a_step_after_the_close_asks_nothing_of_the_drives() {
    let mut bench = bench();
    bench.put(0, vec![item(1, None)], &[1]);
    bench.settle();
    bench.machine.set_scrub_rate(1 << 30);
    bench.call(|op| Event::Close { op, deadline: u64::MAX });
    // What requests told is taken in by a thread that may be late.
    let access = crate::machine::Access {
        ns: bench.ns[0],
        keys: Arc::new([key(1)]),
        now: 1,
        told: crate::machine::Told::BARE,
    };
    bench.begin(|_| Event::Accessed(access));
    assert_eq!(bench.in_flight().count(), 0, "a closed drive would refuse it");
}
