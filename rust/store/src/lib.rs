//! A tiered KV-cache store for LLM serving: host memory and NVMe, verified and durable.
//!
//! ```
//! use tiered_kv::{KvLayout, NamespaceSpec, Store, StoreConfig};
//! # fn main() -> tiered_kv::Result<()> {
//! let config = StoreConfig { dram_capacity: Some(1 << 20), ..StoreConfig::default() };
//! let store = Store::open(&config)?;
//! let layout = KvLayout::uniform(16, 4096)?;
//! let ns = store.namespace(&NamespaceSpec::new("model", "weights", "float32", layout))?;
//! let keys = ns.keys_from_tokens(&(0..32).collect::<Vec<u32>>(), None);
//! store.put(&ns, &keys, vec![vec![7u8; 4096]; 2], &Default::default())?.wait();
//! let leases = store.get(&ns, &keys, &Default::default())?.wait();
//! assert_eq!(leases.hits(), 2);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod answers;
mod attach;
mod batch;
mod call;
mod delete;
mod direct;
mod directory;
mod driver;
mod due;
mod entries;
mod event_file;
mod found;
mod hits;
mod hold;
mod index;
mod inspect;
mod io;
mod latency;
mod log;
mod look;
mod machine;
mod names;
mod namespace;
mod op;
mod open;
mod operator;
mod owner;
mod policy;
mod quota;
mod record;
mod region;
mod registry;
mod request;
mod reserve;
mod resident;
mod scrub;
mod seams;
#[cfg(any(test, feature = "sim"))]
#[doc(hidden)]
pub mod sim;
mod stats;
mod store;
mod sync;
#[cfg(test)]
mod unlocked;

/// What fuzzing reaches of the inside. Release builds lack it.
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::attach::fuzzing::{message_seeds, messages};
}

pub use answers::{
    Attachable, DriveHealth, DriveState, GetOptions, Health, Leases, Lookup, LookupMode, OnStall,
};
pub use attach::{AttachCounters, AttachOptions, Attached, AttachedHold};
pub use batch::LeaseBatch;
pub use call::{BlockSource, CloseReport, Contiguous, IntoReport, PutReport};
pub use delete::Delete;
pub use hits::Found;
pub use hold::{GroupRule, Hold};
pub use index::Residency;
pub use latency::{LATENCY_BOUNDS_NS, Latencies, Latency};
pub use log::{LogEntry, LogKind};
pub use machine::{
    Audit, BlockFilter, BlockRow, Cause, DeleteReport, Explained, Explanation, FlushReport,
    Happened, HoldId, NamespaceRow, OnNvme, OpId, Page, PutStatus, Quota, ScrubReport, SlabRow,
    SurveyRow, Usage,
};
pub use namespace::{Namespace, PutOptions};
pub use op::Op;
pub use open::OpenTimes;
pub use operator::{
    BadSlab, CheckpointState, ClosedDrive, ClosedStore, Operator, Resized, Verified, Verify, resize,
};
pub use policy::Learned;
pub use request::{Request, RequestContext, request_kind};
pub use reserve::{Reservation, Reserved};
pub use resident::{Lease, Resident};
pub use seams::{OpenDisk, Seams};
pub use stats::{ReuseStats, Stats, TierStats};
pub use store::Store;
pub use tiered_kv_io as io_seams;
pub use tiered_kv_io::{AlignedBuf, Region, RegionMemory, RegionSlot};
pub use tiered_kv_policy::beta::{PairPosterior, pair_names};
pub use tiered_kv_types::{
    BlockInfo, BlockKey, BlockType, ComputedBy, CpuList, Error, ErrorKind, EvictionPolicy,
    FORMAT_VERSION, IoBackend, KEY_BYTES, KvLayout, MissReason, NamespaceId, NamespaceSpec,
    OnFormatMismatch, Result, Retry, StoreConfig, TenantId, Tier, key,
};
