//! Replays traces of requests against the policies that the store runs, and those of others.
//!
//! The measure: a request accesses each block of its prompt once, and a block is a hit if it and
//! all before it are resident when the request comes. Then the request is applied. Capacities are
//! parts of the trace's unique prompt blocks, and every cache starts empty.
#![forbid(unsafe_code)]

mod bench;
mod generate;
mod policies;
mod prefetch;
mod read;
mod report;
mod tiers;
mod trace;
mod write;

pub use bench::{Job, Options, Outcome, Progress, capacity_blocks, jobs, learned, replay, run};
pub use generate::{KINDS, generate};
pub use policies::{ABLATION, ALL, STEPS, TRIED, Unknown, known, predictor};
pub use prefetch::{Prefetched, prefetch, prefetch_rows};
pub use read::{ReadError, read, read_path};
pub use report::{Report, prefetch_table, table};
pub use tiers::{AheadOutcome, Filled, Moved, NodeOutcome, NodeSpec, Served, Service, TierOutcome};
pub use tiers::{TierSpec, Times, Why, node, nodes, nodes_json};
pub use trace::{Builder, Entry, Format, Trace};
pub use write::write;
