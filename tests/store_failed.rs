//! A defect inside the store: what waits is answered, nobody hangs, and the next open finds what
//! was durable.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::{BLOCK, GatedDisk, blocks_of, chain, config, namespace, seams};
use tiered_kv::io_seams::{Clock, Nanos, SystemClock};
use tiered_kv::{
    AlignedBuf, GetOptions, Leases, LookupMode, MissReason, OnStall, PutOptions, PutStatus, Seams,
    Store,
};

const LONG: Duration = Duration::from_secs(60);

/// A clock that panics where the store takes a decision.
#[derive(Default)]
struct Trap(AtomicBool);

impl Clock for Trap {
    fn now(&self) -> Nanos {
        SystemClock.now()
    }

    fn unix_nanos(&self) -> u64 {
        assert!(!self.0.load(Ordering::SeqCst), "a planted defect");
        SystemClock.unix_nanos()
    }
}

fn reasons(leases: &Leases) -> Vec<MissReason> {
    leases.items.iter().filter_map(|item| item.as_ref().err().copied()).collect()
}

#[test]
fn a_defect_ends_every_call_and_loses_nothing_that_was_durable() {
    let (disk, trap) = (GatedDisk::new(), Arc::new(Trap::default()));
    let config = config("/simulated".as_ref(), 8 << 20);
    let open = |clock: Arc<dyn Clock>| {
        Store::open_with(&config, &Seams { clock, ..seams(disk.clone()) }).expect("opens")
    };
    let before = open(Arc::new(SystemClock));
    let ns = namespace(&before);
    let keys = chain(&ns, 1, 8);
    before.put(&ns, &keys, blocks_of(&keys), &PutOptions::default()).expect("open").wait();
    assert_eq!(before.close().dropped, 0);

    let store = open(trap.clone());
    let ns = namespace(&store);
    let region = store.register(AlignedBuf::new(4 * BLOCK).expect("memory"), BLOCK).expect("valid");
    let options =
        GetOptions { on_stall: OnStall::Wait, timeout: Some(LONG), ..GetOptions::default() };
    disk.shut_reads(true);
    let waiting = store.get(&ns, &keys[..2], &options).expect("open");
    let slots = region.claim_all(&[0, 1]).expect("free");
    let direct = store.get_into(&ns, &keys[4..6], slots, &options).expect("open");
    let scrub = store.scrub(Some(LONG)).expect("open");
    while disk.reads.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    trap.0.store(true, Ordering::SeqCst);
    let more = chain(&ns, 2, 3);
    let put = store.put(&ns, &more, blocks_of(&more), &PutOptions::default()).expect("open");
    assert_eq!(put.wait().statuses, [PutStatus::Ended; 3]);
    assert_eq!(reasons(&waiting.wait()), [MissReason::Closed; 2]);
    assert!(!scrub.wait().complete);
    // Its slots may still be written to.
    let direct =
        direct.wait_for(Duration::from_millis(50)).expect_err("the drive has not answered");
    disk.shut_reads(false);
    assert_eq!(direct.wait().items, [Err(MissReason::Closed); 2]);
    assert_eq!(region.slots_used(), 0);

    trap.0.store(false, Ordering::SeqCst);
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Each).hits, 0);
    assert!(!store.contains(&ns, &keys[0]));
    let got = store.get(&ns, &keys, &options).expect("open").wait();
    assert_eq!(got.hits(), 0);
    assert!(!store.flush(Some(LONG)).expect("open").wait().all_durable());
    let hold = store.hold(&ns, &keys, LONG).expect("open");
    assert_eq!(hold.hits(), 0);
    let stats = store.stats();
    let missed: u64 = stats.misses.iter().map(|(_, n)| n).sum();
    assert_eq!(stats.dram.hits + stats.nvme.hits + missed, stats.requested);
    let health = store.health();
    assert!(!health.open);
    assert!(health.warnings[0].contains("a planted defect"), "{:?}", health.warnings);
    store.close();
    drop((ns, store));

    let after = open(Arc::new(SystemClock));
    let ns = namespace(&after);
    assert_eq!(after.get(&ns, &keys, &GetOptions::default()).expect("open").wait().hits(), 8);
    assert_eq!(after.lookup(&ns, &more, LookupMode::Each).hits, 0);
    assert_eq!(after.audit().faults, Vec::<String>::new());
}
