//! Every schedule of the store's concurrent parts, within a bound of preemptions: who owns a page,
//! what a lease pins, one load for all waiters, and a result that gets back.
//!
//! The parts are compiled from the sources that ship; `sync` and `memory` stand in for what lies
//! below them. A model that fails prints the schedule's trace with `LOOM_LOG=1`.
#![allow(dead_code, unused_imports, reason = "the models use a part of the shipped sources")]
#![allow(unfulfilled_lint_expectations, reason = "and publish nothing of them")]
#![allow(missing_docs, unreachable_pub, reason = "nothing of this is published")]

// The shipped sources name the crate below them.
extern crate self as tiered_kv_io;

mod due_model;
mod flights;
mod leases;
mod memory;
mod results;
mod slots;
mod sync;

#[path = "../../rust/store/src/batch.rs"]
mod batch;
#[path = "../../rust/io/src/bitmap.rs"]
mod bitmap;
#[path = "../../rust/io/src/cancel.rs"]
mod cancel;
#[path = "../../rust/store/src/due.rs"]
mod due;
#[path = "../../rust/store/src/entries.rs"]
mod entries;
#[path = "../../rust/store/src/index.rs"]
mod index;
#[path = "../../rust/store/src/latency.rs"]
mod latency;
#[path = "../../rust/store/src/log.rs"]
mod log;
#[path = "../../rust/store/src/machine/mod.rs"]
mod machine;
#[path = "../../rust/store/src/op.rs"]
mod op;
#[path = "../../rust/io/src/parallel.rs"]
mod parallel;
#[path = "../../rust/store/src/resident.rs"]
mod resident;
#[path = "../../rust/store/src/stats.rs"]
mod stats;

pub(crate) use cancel::CancelFlag;
pub(crate) use memory::{
    Arena, FileId, Nanos, Origin, ReadBuf, Slot, SlotMut, copy_checked, crc32c, prefer_huge_pages,
};
pub(crate) use parallel::{in_parallel, recovery_threads};

/// What the store's own module of this name says of a `get`.
mod answers {
    use crate::resident::Lease;
    use tiered_kv_types::{MissReason, Tier};

    #[derive(Debug)]
    pub(crate) struct Leases {
        pub(crate) items: Vec<Result<Lease, MissReason>>,
        pub(crate) sources: Vec<Tier>,
    }
}

/// A model: its name, how many preemptions its schedules may have, and what it runs.
type Model = (&'static str, usize, fn());

const MODELS: [Model; 15] = [
    ("slots: a page has one owner at a time", 3, slots::one_owner),
    ("slots: a range is taken whole or not at all", 3, slots::whole_ranges),
    ("slots: what is not taken is given back", 3, slots::neighbours),
    ("leases: a pinned copy is not evicted", 3, leases::pin_or_evict),
    ("leases: a slot comes back with the last lease", 3, leases::last_owner),
    ("leases: the cap holds, and only then", 3, leases::cap),
    ("leases: a batch pins what it found until it ends", 2, leases::batch_or_evict),
    ("leases: a batch keeps what is deleted meanwhile", 2, leases::batch_or_delete),
    ("leases: batches come and go", 2, leases::two_batches),
    ("results: a waiting thread gets it", 3, results::waited_for),
    ("results: a coroutine gets it", 3, results::awaited),
    ("results: one that nobody waits for is dropped once", 3, results::forgotten),
    ("flights: one load serves two", 2, flights::joined),
    ("flights: one that is given up serves who still waits", 2, flights::given_up),
    ("learning: what is brought is taken or told", 3, due_model::brought_or_woken),
];

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let mut ran = 0;
    for (name, preemptions, model) in MODELS.iter().filter(|model| model.0.contains(&wanted)) {
        let begin = std::time::Instant::now();
        let schedules = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counted = schedules.clone();
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(*preemptions);
        builder.max_branches = 20_000;
        builder.check(move || {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            model();
        });
        let schedules = schedules.load(std::sync::atomic::Ordering::Relaxed);
        assert!(schedules > 1, "{name}: there is nothing concurrent in it");
        println!("{name}: {schedules} schedules, {} ms", begin.elapsed().as_millis());
        ran += 1;
    }
    assert!(ran > 0, "no model's name contains {wanted:?}");
}
