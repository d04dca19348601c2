//! The state machine on a simulated disk, clock and scheduler: one seed is one run.
//!
//! The world performs the machine's commands one at a time in an order that the seed chooses, fails
//! some of them, lets others stall, damages what the drives hold, moves the clock, and cuts the
//! power with any part of the unsynced writes lost. An oracle knows every payload that may be
//! returned for a key, and what must be found again.

#[cfg(test)]
mod by_hand;
mod checks;
#[cfg(test)]
mod crash_points;
mod faults;
mod memory;
mod oracle;
mod outcome;
mod perform;
mod restart;
mod trace;
mod world;

use faults::Fault;
use world::World;

/// Steps of a run where nobody asks for another number.
pub const STEPS: usize = 400;

/// Takes one line of what a run does.
pub type Say = Box<dyn FnMut(&str)>;

/// What a run has exercised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// A digest of all that happened.
    pub trace: u64,
    /// How often what was exercised, by name.
    pub figures: Vec<(&'static str, u64)>,
}

impl Report {
    /// The figure of this name; 0 where there is none.
    pub fn figure(&self, name: &str) -> u64 {
        self.figures.iter().find(|(known, _)| *known == name).map_or(0, |(_, n)| *n)
    }
}

/// The names of the kinds of faults among the figures.
pub fn fault_names() -> impl Iterator<Item = &'static str> {
    Fault::ALL.iter().map(|fault| fault.name())
}

/// Plays the run of `seed` and tells `say` of each step.
///
/// # Panics
/// Where the store breaks a promise.
pub fn run(seed: u64, steps: usize, say: Option<Say>) -> Report {
    let mut world = World::new(seed, say);
    for step in 0..steps {
        world.step(step);
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
    world.report(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeds() -> u64 {
        std::env::var("TIERED_KV_SIM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
    }

    #[test]
    fn no_wrong_byte_no_lost_block_no_leaked_slot_over_many_seeds() {
        let mut all = Vec::new();
        // With a T1, and without.
        for staging in [false, true] {
            let seeds = (0..seeds()).filter(|seed| world::is_staging(*seed) == staging);
            let ran: Vec<Report> = seeds.map(|seed| run(seed, STEPS, None)).collect();
            let total = |name: &str| ran.iter().map(|report| report.figure(name)).sum::<u64>();
            for name in ["direct_reads", "loads_cancelled", "offloaded", "promises_checked"] {
                assert!(total(name) > 0, "{name} was exercised");
            }
            all.extend(ran);
        }
        for name in fault_names() {
            let n: u64 = all.iter().map(|report| report.figure(name)).sum();
            assert!(n > 0, "{name} occurred");
        }
    }

    #[test]
    fn one_seed_is_one_run() {
        assert_eq!(run(7, 300, None), run(7, 300, None));
        let differ = run(7, 300, None).trace != run(8, 300, None).trace;
        assert!(differ, "the trace tells runs apart");
    }
}
