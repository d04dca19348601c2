//! Arenas: no page has two owners, and who is served cannot write.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

use tiered_kv_io::{Arena, ArenaConfig, Entropy, PAGE_BYTES, SeededEntropy};
use tiered_kv_types::ErrorKind;

const PAGE: u64 = PAGE_BYTES;

fn config(pages: u64, extent_pages: u64) -> ArenaConfig {
    let (capacity_bytes, extent_bytes) = (pages * PAGE, extent_pages * PAGE);
    ArenaConfig {
        capacity_bytes,
        extent_bytes,
        populate: true,
        huge_pages: false,
        field: "dram_capacity",
    }
}

fn arena(pages: u64, extent_pages: u64) -> Arc<Arena> {
    Arena::new(config(pages, extent_pages)).expect("memory for a small arena")
}

#[test]
fn a_page_has_one_owner_until_it_is_dropped() {
    let arena = arena(8, 8);
    let first = arena.take(PAGE, 2 * PAGE).expect("free pages");
    assert_eq!(arena.taken_bytes(), 2 * PAGE);
    for (offset, len) in [(PAGE, PAGE), (0, 2 * PAGE), (2 * PAGE, 2 * PAGE), (0, 8 * PAGE)] {
        assert!(arena.take(offset, len).is_none(), "{offset} {len}");
    }
    let frozen = first.freeze();
    assert!(arena.take(PAGE, PAGE).is_none(), "freezing must not give the pages back");
    drop(frozen);
    assert_eq!(arena.taken_bytes(), 0);
    let again = arena.take(PAGE, 2 * PAGE).expect("given back");
    drop(again);
    assert!(arena.take(0, 8 * PAGE).is_some());
}

#[test]
fn ranges_off_the_grid_or_across_extents_are_refused() {
    let arena = arena(10, 4);
    for (offset, len) in [
        (0, 0),
        (0, 1),
        (1, PAGE),
        (0, PAGE + 1),
        (3 * PAGE, 2 * PAGE),
        (0, 5 * PAGE),
        (8 * PAGE, 3 * PAGE),
        (10 * PAGE, PAGE),
        (u64::MAX - PAGE + 1, PAGE),
    ] {
        assert!(arena.take(offset, len).is_none(), "{offset} {len}");
    }
    let _whole_extents: Vec<_> = [(0, 4), (4, 4), (8, 2)]
        .map(|(first, pages)| arena.take(first * PAGE, pages * PAGE).expect("inside an extent"))
        .into();
    assert_eq!(arena.taken_bytes(), arena.capacity_bytes());
}

#[test]
fn a_frozen_slot_serves_what_was_written_from_another_address() {
    let arena = arena(16, 8);
    for first in [0, 7, 9] {
        let bytes = common::noise(PAGE as usize, first);
        let mut slot = arena.take(first * PAGE, PAGE).expect("free page");
        slot.as_mut_slice().copy_from_slice(&bytes);
        let written_at = slot.as_slice().as_ptr();
        let slot = slot.freeze();
        assert_ne!(slot.as_slice().as_ptr(), written_at);
        assert_eq!((slot.offset(), slot.len()), (first * PAGE, PAGE as usize));
        assert!(slot.as_slice() == bytes);
    }
}

#[test]
fn slots_keep_their_memory_when_the_arena_is_dropped() {
    let arena = arena(4, 4);
    let mut slot = arena.take(0, 4 * PAGE).expect("free pages");
    drop(arena);
    slot.as_mut_slice().fill(9);
    assert!(slot.freeze().as_slice().iter().all(|&byte| byte == 9));
}

#[test]
fn a_write_through_a_frozen_slot_traps() {
    if common::child_path().is_some() {
        let arena = arena(1, 1);
        let slot = arena.take(0, PAGE).expect("free page").freeze();
        let address = slot.as_slice().as_ptr().cast_mut();
        // SAFETY: none; this is the misuse that has to end in a signal.
        unsafe { address.write_volatile(1) };
        return;
    }
    let test = "a_write_through_a_frozen_slot_traps";
    let output = common::child(test, "run").output().expect("the child starts");
    const SIGSEGV: i32 = 11;
    assert_eq!(output.status.signal(), Some(SIGSEGV), "{output:?}");
}

#[test]
fn concurrent_takers_never_share_a_page() {
    let arena = arena(200, 70);
    std::thread::scope(|scope| {
        for id in 0..4_u8 {
            let arena = &arena;
            scope.spawn(move || {
                let entropy = SeededEntropy::new(u64::from(id));
                let mut taken = 0;
                while taken < 2_000 {
                    let (first, pages) = (entropy.next_u64() % 200, 1 + entropy.next_u64() % 67);
                    let Some(mut slot) = arena.take(first * PAGE, pages * PAGE) else { continue };
                    slot.as_mut_slice().fill(id);
                    let slot = slot.freeze();
                    assert!(slot.as_slice().iter().all(|&byte| byte == id));
                    taken += 1;
                }
            });
        }
    });
    assert_eq!(arena.taken_bytes(), 0);
}

/// The fields of this process' mappings of arenas: permissions, flags, kilobytes in memory.
fn mappings() -> Vec<(String, String, u64)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("Linux");
    let mut found = Vec::new();
    let mut lines = smaps.lines();
    while let Some(line) = lines.next() {
        if !line.contains("memfd:tiered-kv") {
            continue;
        }
        let permissions = line.split_whitespace().nth(1).expect("a permissions column");
        let mut resident = 0;
        for line in lines.by_ref() {
            if let Some(text) = line.strip_prefix("Rss:") {
                resident = text.trim().trim_end_matches(" kB").parse().expect("a number");
            }
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                found.push((permissions.to_owned(), flags.to_owned(), resident));
                break;
            }
        }
    }
    found
}

#[test]
fn memory_is_populated_at_once_and_kept_out_of_dumps() {
    if common::child_path().is_none() {
        // In a process of its own, where no other test has an arena.
        let test = "memory_is_populated_at_once_and_kept_out_of_dumps";
        let output = common::child(test, "run").output().expect("the child starts");
        common::assert_child_passed(&output);
        return;
    }
    let cfg = ArenaConfig { huge_pages: true, ..config(2_048, 1_024) };
    let arena = Arena::new(cfg).expect("8 MiB");
    let found = mappings();
    let permissions: Vec<_> = found.iter().map(|(permissions, ..)| &permissions[..]).collect();
    assert_eq!(permissions.iter().filter(|&&text| text == "rw-s").count(), 2, "{found:?}");
    assert_eq!(permissions.iter().filter(|&&text| text == "r--s").count(), 2, "{found:?}");
    for (permissions, flags, resident_kib) in &found {
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "in core dumps: {flags}");
        assert_eq!(*resident_kib, 4_096, "not populated: {permissions}");
    }
    let report = arena.report();
    assert!(report.huge_bytes <= arena.capacity_bytes());
    assert!(report.huge_bytes.is_multiple_of(2 << 20));
    assert!(report.populate_s > 0.0);
    drop(arena);
    assert_eq!(mappings(), []);
}

#[test]
fn memory_that_cannot_be_had_is_an_error_at_open() {
    let mut cfg = config(1 << 38, 1 << 18);
    let err = Arena::new(cfg.clone()).expect_err("a petabyte");
    assert_eq!(err.kind(), ErrorKind::NoSpace);
    assert!(err.context().contains("dram_capacity"), "{err}");
    // Also where only the address space is missing.
    (cfg.populate, cfg.extent_bytes) = (false, cfg.capacity_bytes);
    let err = Arena::new(cfg).expect_err("a petabyte of addresses");
    assert_eq!(err.kind(), ErrorKind::NoSpace);
}

#[test]
fn sizes_off_the_page_grid_are_refused_by_field() {
    for (capacity_bytes, extent_bytes, field) in
        [(PAGE + 1, PAGE, "dram_capacity"), (PAGE, 100, "extent_bytes"), (PAGE, 0, "extent_bytes")]
    {
        let cfg = ArenaConfig { capacity_bytes, extent_bytes, ..config(1, 1) };
        let err = Arena::new(cfg).expect_err("off the grid");
        assert_eq!(err.kind(), ErrorKind::Config);
        assert!(err.context().starts_with(field), "{err}");
    }
}

#[test]
fn an_arena_without_memory_has_no_slots() {
    let arena = arena(0, 1);
    assert_eq!(arena.capacity_bytes(), 0);
    assert!(arena.take(0, PAGE).is_none());
}

#[test]
fn the_usual_extent_is_1_gib_and_a_store_of_more_has_several() {
    assert_eq!(ArenaConfig::new(5 << 30).extent_bytes, 1 << 30);
    // The same in small: nine pages in extents of four.
    let arena = Arena::new(config(9, 4)).expect("36 KiB");
    assert!(arena.take(3 * PAGE, 2 * PAGE).is_none(), "an extent ends in between");
    let slots: Vec<_> = (0..9).map(|page| arena.take(page * PAGE, PAGE)).collect();
    assert!(slots.iter().all(Option::is_some));
}
