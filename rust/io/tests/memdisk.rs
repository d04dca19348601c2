//! The disk in memory loses exactly what a power cut may lose.

use std::io;

use tiered_kv_io::{Disk, DiskOp, MemDisk};
use tiered_kv_types::ErrorKind;

const PAGE: usize = 4096;

fn page(byte: u8) -> Vec<u8> {
    vec![byte; PAGE]
}

/// The first byte of each page of the data file.
fn firsts(disk: &MemDisk) -> Vec<u8> {
    let (file, bytes) = disk.open("data").expect("exists");
    let mut all = vec![0; bytes as usize];
    disk.read_at(file, 0, &mut all).expect("whole");
    all.iter().step_by(PAGE).copied().collect()
}

/// Four pages: 1 synced in the first, then 2, 3 and 4 not synced in the first, second and third.
fn prepared() -> MemDisk {
    let disk = MemDisk::new();
    let file = disk.create("data", 4 * PAGE as u64).expect("memory");
    disk.write_at(file, 0, &page(1)).expect("in range");
    disk.sync(file).expect("no fault");
    for (at, byte) in [(0, 2), (1, 3), (2, 4)] {
        disk.write_at(file, (at * PAGE) as u64, &page(byte)).expect("in range");
    }
    disk
}

#[test]
fn a_crash_keeps_what_was_synced_and_the_chosen_writes() {
    let disk = prepared();
    assert_eq!(firsts(&disk), [2, 3, 4, 0], "reads see unsynced writes");
    assert_eq!(disk.unsynced_writes(), 3);
    for subset in 0..8_u32 {
        let image = disk.crash(|write| subset & (1 << write) != 0);
        let kept = |write: u32, new, old| if subset & (1 << write) != 0 { new } else { old };
        assert_eq!(firsts(&image), [kept(0, 2, 1), kept(1, 3, 0), kept(2, 4, 0), 0]);
        assert_eq!(image.unsynced_writes(), 0);
    }
    assert_eq!(firsts(&disk), [2, 3, 4, 0], "the disk itself is as it was");
}

#[test]
fn after_a_sync_a_crash_loses_nothing() {
    let disk = prepared();
    let other = disk.create("other", PAGE as u64).expect("memory");
    disk.write_at(other, 0, &page(9)).expect("in range");
    let (file, _) = disk.open("data").expect("exists");
    disk.sync(file).expect("no fault");
    assert_eq!(disk.unsynced_writes(), 1, "the sync of one file leaves the other's writes");
    let image = disk.crash(|_| false);
    assert_eq!(firsts(&image), [2, 3, 4, 0]);
    assert_eq!(image.read_file("other", PAGE as u64).expect("fits"), Some(page(0)));
}

#[test]
fn a_torn_write_has_some_of_its_sectors() {
    let image = prepared().crash_torn(|write, sector| write == 1 && sector < 3);
    let bytes = image.read_file("data", 1 << 20).expect("fits").expect("exists");
    assert_eq!(bytes[PAGE..PAGE + 3 * 512], [3; 3 * 512]);
    assert_eq!(bytes[PAGE + 3 * 512..2 * PAGE], [0; PAGE - 3 * 512]);
}

#[test]
fn small_files_and_removal_are_durable_at_once() {
    let disk = prepared();
    disk.write_file("state", b"new").expect("no fault");
    disk.remove("data").expect("exists");
    assert_eq!(disk.unsynced_writes(), 0, "a removed file has no writes to lose");
    let image = disk.crash(|_| true);
    assert_eq!(image.list().expect("no fault"), [("state".to_owned(), 4_096)]);
    assert_eq!(image.read_file("state", 3).expect("fits").as_deref(), Some(&b"new"[..]));
}

#[test]
fn the_hook_fails_operations_without_effect() {
    let disk = prepared();
    let (file, _) = disk.open("data").expect("exists");
    disk.set_fault(Some(Box::new(|op| match op {
        DiskOp::WriteAt { offset: 0, .. } => Some(io::Error::from_raw_os_error(5)),
        DiskOp::Create { .. } => Some(io::ErrorKind::StorageFull.into()),
        DiskOp::Sync { .. } => Some(io::Error::from_raw_os_error(5)),
        _ => None,
    })));
    let err = disk.write_at(file, 0, &page(7)).expect_err("the hook says so");
    assert_eq!(err.raw_os_error(), Some(5));
    disk.write_at(file, 3 * PAGE as u64, &page(8)).expect("not this one");
    assert_eq!(disk.create("new", 4_096).expect_err("full").kind(), ErrorKind::NoSpace);
    disk.sync(file).expect_err("the hook says so");
    disk.set_fault(None);
    assert_eq!(firsts(&disk), [2, 3, 4, 8]);
    assert_eq!(firsts(&disk.crash(|_| false)), [1, 0, 0, 0], "a failed sync makes nothing durable");
    assert_eq!(disk.open("new").expect_err("not made").kind(), ErrorKind::NotFound);
}

#[test]
fn ranges_are_checked_as_on_a_device() {
    let disk = prepared();
    let (file, _) = disk.open("data").expect("exists");
    let kind = |result: io::Result<()>| result.expect_err("refused").kind();
    assert_eq!(kind(disk.write_at(file, 512, &page(1))), io::ErrorKind::InvalidInput);
    assert_eq!(kind(disk.read_at(file, 0, &mut [0; 100])), io::ErrorKind::InvalidInput);
    let end = 4 * PAGE as u64;
    assert_eq!(kind(disk.write_at(file, end, &page(1))), io::ErrorKind::UnexpectedEof);
    assert_eq!(kind(disk.read_at(file, end, &mut page(1))), io::ErrorKind::UnexpectedEof);
}

#[test]
fn damage_is_seen_and_survives() {
    let disk = prepared();
    disk.flip("data", 3 * PAGE as u64, 0x10);
    assert_eq!(firsts(&disk)[3], 0x10);
    assert_eq!(firsts(&disk.crash(|_| false))[3], 0x10);
}
