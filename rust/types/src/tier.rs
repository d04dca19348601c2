//! Tiers, block attributes and the reasons of a miss.

use serde::{Deserialize, Serialize};

/// One of the six tiers, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// T0, GPU memory.
    Hbm = 0,
    /// T1, host memory.
    Dram = 1,
    /// T2, CXL memory.
    Cxl = 2,
    /// T3, local NVMe.
    Nvme = 3,
    /// T4, peers' memory over RDMA.
    Fabric = 4,
    /// T5, a parallel file system.
    Pfs = 5,
}

impl Tier {
    /// A stable lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hbm => "hbm",
            Self::Dram => "dram",
            Self::Cxl => "cxl",
            Self::Nvme => "nvme",
            Self::Fabric => "fabric",
            Self::Pfs => "pfs",
        }
    }
}

/// What a block holds, as the engine says; the reuse predictor's first axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[serde(rename_all = "lowercase")]
pub enum BlockType {
    /// Not told.
    #[default]
    Unknown = 0,
    /// System prompt.
    System = 1,
    /// Tool context.
    Tool = 2,
    /// User context.
    User = 3,
    /// Intermediate reasoning and output.
    Reasoning = 4,
}

impl BlockType {
    /// The type with this number in a record; an unknown number is [`BlockType::Unknown`].
    pub const fn from_u8(value: u8) -> Self {
        match value {
            1 => Self::System,
            2 => Self::Tool,
            3 => Self::User,
            4 => Self::Reasoning,
            _ => Self::Unknown,
        }
    }
}

/// How the bytes of a block came about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[serde(rename_all = "lowercase")]
pub enum ComputedBy {
    /// By prefill, many tokens at once.
    #[default]
    Prefill = 0,
    /// By decode, token by token: equal in meaning, not to the bit.
    Decode = 1,
}

/// What a caller tells of a block beside its bytes, and a record keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockInfo {
    /// Blocks before it in its chain: 0 for a root.
    pub depth: u32,
    /// Tokens it holds, at most the layout's `tokens_per_block`.
    pub tokens: u32,
    /// A prefill chunk ended at its last token.
    pub chunk_end: bool,
    /// How it was computed.
    pub computed: ComputedBy,
    /// What it holds.
    pub block_type: BlockType,
}

impl BlockInfo {
    /// The bits that [`BlockInfo::flags`] sets.
    pub(crate) const FLAGS: u8 = 3;

    /// The flags as one byte: bit 0 chunk end, bit 1 computed by decode.
    #[inline]
    pub const fn flags(&self) -> u8 {
        (self.chunk_end as u8) | ((self.computed as u8) << 1)
    }

    /// The information with the flags set from [`BlockInfo::flags`]' byte.
    #[must_use]
    pub const fn with_flags(mut self, flags: u8) -> Self {
        self.chunk_end = flags & 1 != 0;
        self.computed = if flags & 2 != 0 { ComputedBy::Decode } else { ComputedBy::Prefill };
        self
    }
}

/// Why a key was not served. Every miss has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum MissReason {
    /// Nothing is stored under the key.
    Absent = 1,
    /// The stored bytes failed verification; they are gone and the next store heals the key.
    Corrupt = 2,
    /// The device or file failed the read.
    IoError = 3,
    /// The deadline passed first.
    Deadline = 4,
    /// No memory slot could be had for the load.
    NoSpace = 5,
    /// Too many bytes are leased.
    LeaseCap = 6,
    /// Too many bytes are being loaded.
    LoadCap = 7,
    /// The stored length is not the length asked for.
    Length = 8,
    /// The caller cancelled.
    Cancelled = 9,
    /// The store closed.
    Closed = 10,
    /// The copy was replaced or deleted while it was being loaded.
    Superseded = 11,
    /// Its drive has stalled or failed repeatedly and is not asked until it answers again.
    CircuitOpen = 12,
    /// Computing it anew is estimated to be faster than loading it.
    Recompute = 13,
}

impl MissReason {
    /// Every reason, in the order of its number.
    pub const ALL: [Self; 13] = [
        Self::Absent,
        Self::Corrupt,
        Self::IoError,
        Self::Deadline,
        Self::NoSpace,
        Self::LeaseCap,
        Self::LoadCap,
        Self::Length,
        Self::Cancelled,
        Self::Closed,
        Self::Superseded,
        Self::CircuitOpen,
        Self::Recompute,
    ];

    /// A stable name, as `stats` and Python show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Corrupt => "corrupt",
            Self::IoError => "io_error",
            Self::Deadline => "deadline",
            Self::NoSpace => "no_space",
            Self::LeaseCap => "lease_cap",
            Self::LoadCap => "load_cap",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
            Self::Superseded => "superseded",
            Self::CircuitOpen => "circuit_open",
            Self::Recompute => "recompute",
        }
    }
}
