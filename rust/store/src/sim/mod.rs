//! The state machine on a simulated disk, clock and scheduler: one seed is one run.
//!
//! The world performs the machine's commands one at a time in an order that the seed chooses, fails
//! some of them, moves the clock, and cuts the power with a random part of the unsynced writes
//! lost. An oracle knows every payload that may be returned for a key.

mod by_hand;
mod crash_points;
mod oracle;
mod world;

use world::World;

fn run(seed: u64, steps: usize) -> u64 {
    let mut world = World::new(seed);
    for step in 0..steps {
        world.step();
        let audit = world.machine.audit();
        assert!(audit.faults.is_empty(), "seed {seed}, step {step}: {:?}", audit.faults);
        assert_eq!(audit.nvme_used_bytes, audit.nvme_block_bytes, "seed {seed}, step {step}");
        assert_eq!(audit.dram_used_bytes, audit.dram_owned_bytes, "seed {seed}, step {step}");
    }
    world.drain();
    let audit = world.machine.audit();
    assert!(audit.faults.is_empty(), "seed {seed}: {:?}", audit.faults);
    assert_eq!(audit.dram_used_bytes, audit.dram_block_bytes, "seed {seed}: a slot leaked");
    world.trace
}

fn seeds() -> u64 {
    std::env::var("TIERED_KV_SIM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
}

#[test]
fn no_wrong_byte_no_lost_block_no_leaked_slot_over_many_seeds() {
    for seed in 0..seeds() {
        run(seed, 400);
    }
}

#[test]
fn one_seed_is_one_run() {
    assert_eq!(run(7, 300), run(7, 300));
    assert_ne!(run(7, 300), run(8, 300), "the trace tells runs apart");
}
