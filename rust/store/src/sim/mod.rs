//! The state machine on a simulated disk, clock and scheduler: one seed is one run.
//!
//! The world performs the machine's commands one at a time in an order that the seed chooses, fails
//! some of them, moves the clock, and cuts the power with a random part of the unsynced writes
//! lost. An oracle knows every payload that may be returned for a key.

mod by_hand;
mod crash_points;
mod memory;
mod oracle;
mod perform;
mod world;

use world::World;

/// What a run has exercised, and its trace.
struct Ran {
    trace: u64,
    direct_reads: u64,
    loads_cancelled: u64,
    offloaded: u64,
}

fn run(seed: u64, steps: usize) -> Ran {
    let mut world = World::new(seed);
    for step in 0..steps {
        world.step();
        let audit = world.machine.audit();
        assert!(audit.faults.is_empty(), "seed {seed}, step {step}: {:?}", audit.faults);
        if let Some(quota) = world::quota_of(seed) {
            let usage = world.machine.usage(0);
            assert!(usage.is_within(&quota), "seed {seed}, step {step}: {usage:?}");
        }
        world.check_canaries();
        assert_eq!(audit.nvme_used_bytes, audit.nvme_block_bytes, "seed {seed}, step {step}");
        assert_eq!(audit.dram_used_bytes, audit.dram_owned_bytes, "seed {seed}, step {step}");
    }
    world.drain();
    let audit = world.machine.audit();
    assert!(audit.faults.is_empty(), "seed {seed}: {:?}", audit.faults);
    assert_eq!(audit.dram_used_bytes, audit.dram_block_bytes, "seed {seed}: a slot leaked");
    let counters = &world.machine.counters;
    let (direct_reads, loads_cancelled) = (counters.direct_reads, counters.loads_cancelled);
    Ran { trace: world.trace, direct_reads, loads_cancelled, offloaded: counters.offloaded }
}

fn seeds() -> u64 {
    std::env::var("TIERED_KV_SIM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
}

#[test]
fn no_wrong_byte_no_lost_block_no_leaked_slot_over_many_seeds() {
    // With a T1, and without.
    for staging in [false, true] {
        let seeds = (0..seeds()).filter(|seed| world::is_staging(*seed) == staging);
        let ran: Vec<Ran> = seeds.map(|seed| run(seed, 400)).collect();
        let total = |of: fn(&Ran) -> u64| ran.iter().map(of).sum::<u64>();
        assert!(total(|r| r.direct_reads) > 0, "direct reads were exercised");
        assert!(total(|r| r.loads_cancelled) > 0, "loads were dropped");
        assert!(total(|r| r.offloaded) > 0, "blocks became durable");
    }
}

#[test]
fn one_seed_is_one_run() {
    assert_eq!(run(7, 300).trace, run(7, 300).trace);
    assert_ne!(run(7, 300).trace, run(8, 300).trace, "the trace tells runs apart");
}
