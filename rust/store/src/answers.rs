//! What the calls of the request path ask for and answer.

use crate::index::Residency;
use crate::machine::HoldId;
use crate::resident::Lease;
use serde::{Deserialize, Serialize, Serializer};
use std::path::Path;
use std::time::Duration;
use tiered_kv_types::{BlockInfo, MissReason, Tier};

/// What a `get` found, block by block.
#[derive(Debug)]
pub struct Leases {
    /// A lease of each block, or why there is none.
    pub items: Vec<std::result::Result<Lease, MissReason>>,
    /// The tier that each block came from; means nothing for a miss.
    pub sources: Vec<Tier>,
}

impl Leases {
    /// Leading blocks that were found.
    pub fn hits(&self) -> usize {
        self.items.iter().take_while(|item| item.is_ok()).count()
    }
}

/// How a lookup walks the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookupMode {
    /// Every key by itself.
    Each,
    /// The longest stored prefix: it ends at the first key that is not there.
    #[default]
    Prefix,
}

/// What a lookup found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Leading keys that a `get` would find.
    pub hits: usize,
    /// Where each key is. With [`LookupMode::Prefix`], only the hits.
    pub states: Vec<Residency>,
    /// What was told of each block when it was stored.
    pub infos: Vec<BlockInfo>,
}

impl Lookup {
    /// None of `keys` keys is there.
    pub(crate) fn absent(keys: usize, mode: LookupMode) -> Self {
        let told = if mode == LookupMode::Each { keys } else { 0 };
        let (states, infos) = (vec![Residency::Absent; told], vec![BlockInfo::default(); told]);
        Self { hits: 0, states, infos }
    }
}

/// What a `get_into` of a region's slots does when a device stalls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStall {
    /// The drive writes into the slots. The call ends, by its deadline or a cancellation too, only
    /// when it no longer does.
    #[default]
    Wait,
    /// Blocks are read into the store's own memory and copied last: the call keeps its deadline,
    /// and nobody writes into the slots after it has ended.
    Bounce,
}

/// Options of a get.
#[derive(Clone, Debug, Default)]
pub struct GetOptions {
    /// How long to wait for loads; the configuration's `load_timeout_s` where absent.
    pub timeout: Option<Duration>,
    /// A hold of these blocks, which ends with the get.
    pub hold: Option<HoldId>,
    /// The get belongs to an open [`crate::Request`], which counts its accesses.
    pub in_request: bool,
    /// Of a `get_into` of a region's slots; other buffers are always filled by a copy.
    pub on_stall: OnStall,
    /// How long the caller takes to compute one block: what would be loaded later than it could be
    /// computed is a miss, [`tiered_kv_types::MissReason::Recompute`]. By the configuration's
    /// `recompute_tokens_per_s` where absent; without either, every load is worth it.
    pub recompute: Option<Duration>,
}

/// What can be said of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriveState {
    /// It takes reads and writes.
    Working,
    /// Writing is paused after faults; reads go on.
    Paused,
    /// It stalled or failed: reads of it miss at once and writing pauses, until it answers again.
    CircuitOpen,
    /// It could not be opened: what it holds is misses until it is back.
    Lost,
}

impl DriveState {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Working => "working",
            Self::Paused => "paused",
            Self::CircuitOpen => "circuit_open",
            Self::Lost => "lost",
        }
    }
}

/// A path as text, also where it is none: another process only shows it.
fn readable<S: Serializer>(path: &Path, ser: S) -> std::result::Result<S::Ok, S::Error> {
    ser.serialize_str(&path.to_string_lossy())
}

/// State of one drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveHealth {
    /// Its directory.
    #[serde(serialize_with = "readable")]
    pub path: std::path::PathBuf,
    /// Whether it works.
    pub state: DriveState,
    /// Which I/O backend serves it, and why; empty where it is lost.
    pub backend: String,
    /// How its files are opened, or why it is lost.
    pub reason: String,
    /// Its identity, empty where it is lost.
    pub store_id: String,
    /// Why it is paused or not asked, and the last error that it gave; empty where there is none.
    pub fault: String,
    /// Bytes a second at which it has read of late; `None` where nothing was read.
    pub load_bytes_per_s: Option<u64>,
}

/// State of the store's parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The store takes calls.
    pub open: bool,
    /// I/O backend in use.
    pub backend: String,
    /// Why it is in use and not another, and what it could register.
    pub backend_reason: String,
    /// Whether files bypass the page cache.
    pub direct: bool,
    /// Why they do or do not.
    pub direct_reason: String,
    /// Writing to the drive is paused after faults; blocks stay in memory only.
    pub drive_paused: bool,
    /// Each drive of the configuration, lost ones last.
    pub drives: Vec<DriveHealth>,
    /// What is configured and of no effect, and what to look at; empty when all is well.
    pub warnings: Vec<String>,
    /// The first drive's identity, empty without one.
    pub store_id: String,
    /// Bytes of memory on huge pages.
    pub huge_bytes: u64,
    /// Regions that are registered with the store.
    pub regions: usize,
    /// Of these, how many the kernel does not know beforehand, which costs speed only.
    pub regions_plain: usize,
    /// Why the last of them is not known to the kernel; empty where all are.
    pub region_reason: String,
    /// Whether other processes can attach, and how many are.
    pub attach: Attachable,
}

/// Whether other processes can attach to a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachable {
    /// The store listens for them.
    pub listening: bool,
    /// Where, or why not.
    pub reason: String,
    /// Processes attached at present, by their connections.
    pub connections: u64,
    /// Connections since the open, refused ones too.
    pub accepted: u64,
    /// Connections refused: another user's, of another version, or one too many.
    pub refused: u64,
    /// Connections ended since their peer did not keep to the protocol or stalled.
    pub dropped: u64,
}
