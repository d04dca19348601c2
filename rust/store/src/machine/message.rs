//! What goes into the state machine and what comes out of it.

use crate::machine::{Access, DeleteReport, Doomed, DriveId, HoldId, Records, ScrubReport};
use crate::resident::{Filled, Filling, Resident};
use crate::sync::Arc;
use smallvec::SmallVec;
use std::collections::BTreeSet;
use tiered_kv_io::{CancelFlag, FileId, Nanos};
use tiered_kv_types::{BlockInfo, BlockKey, MissReason, SegmentHeader, TenantId, Tier, Tombstone};

/// Number of a call in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// Number of a block in the table; reused after the block is gone.
pub(crate) type BlockId = tiered_kv_policy::BlockId;

/// The time at which a step happens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Now {
    /// Monotonic nanoseconds.
    pub(crate) mono: Nanos,
    /// Nanoseconds since 1970.
    pub(crate) unix_ns: u64,
}

/// One block of a put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PutItem {
    /// Its key.
    pub(crate) key: BlockKey,
    /// The key of the block before it in its chain.
    pub(crate) parent: Option<BlockKey>,
    /// What is known of it.
    pub(crate) info: BlockInfo,
    /// Who pays for it.
    pub(crate) tenant: TenantId,
}

/// What became of one block of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PutStatus {
    /// Stored and visible.
    Stored = 0,
    /// The key was stored already: nothing was written.
    Exists = 1,
    /// Too many bytes wait to be written, or no slot could be freed: try again later.
    Throttled = 2,
    /// The deadline passed, or the call was cancelled: nothing was stored. Without T1, a block
    /// whose write was under way may still be.
    Ended = 3,
    /// Without T1: the block could not be written to a drive, and is not stored.
    Failed = 4,
}

/// Where a get puts its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GetTarget {
    /// Nowhere: leases.
    Leases,
    /// Into buffers, copied from memory.
    Buffers,
    /// Into slots of a region, read there from a drive.
    Slots,
}

/// One block of a finished get.
#[derive(Debug)]
pub(crate) struct GetItem {
    pub(crate) result: Result<Arc<Resident>, MissReason>,
    /// The tier that it came from, on a hit.
    pub(crate) source: Tier,
}

/// What a flush achieved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushReport {
    /// Blocks that wait still, because the deadline passed first.
    pub pending: u64,
    /// Blocks that could not be made durable: they are in memory only.
    pub failed: u64,
    /// There is no durable tier.
    pub no_durable_tier: bool,
}

impl FlushReport {
    /// Whether everything stored before the call is durable.
    pub fn all_durable(&self) -> bool {
        self.pending == 0 && self.failed == 0 && !self.no_durable_tier
    }
}

/// How a call ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Put(Vec<PutStatus>),
    Get(Vec<GetItem>),
    Into(Vec<Result<Tier, MissReason>>),
    Flush(FlushReport),
    Reserved(Vec<Result<Filling, PutStatus>>),
    Deleted(DeleteReport),
    Scrubbed(ScrubReport),
    Held(HoldId, Vec<bool>),
    /// Blocks that were dropped undurable.
    Closed(u64),
}

/// Why a load failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadFault {
    Io,
    Corrupt,
    /// Nobody wanted it any more before the device had it.
    Cancelled,
    /// Memory for the part that no read can fill in place could not be had.
    NoMemory,
}

/// A segment file as recovery read it.
#[derive(Debug)]
pub(crate) struct FoundSegment {
    pub(crate) drive: DriveId,
    pub(crate) segment: u32,
    pub(crate) file: FileId,
    /// `None` where the header page is not sound or not ours: the segment is then prepared anew.
    pub(crate) header: Option<SegmentHeader>,
    pub(crate) records: Records,
    pub(crate) damaged: u64,
    /// The drive did not give its header or its table, and may another time.
    pub(crate) unread: bool,
}

/// Something that happened outside.
#[derive(Debug)]
pub(crate) enum Event {
    Put {
        op: OpId,
        ns: u32,
        items: Vec<PutItem>,
        deadline: Nanos,
        /// Until when a block that is throttled waits for room.
        wait_until: Nanos,
    },
    CopiedIn {
        op: OpId,
        item: usize,
        /// `None` where the caller's memory could not be read.
        filled: Option<Filled>,
    },
    Reserve {
        op: OpId,
        ns: u32,
        items: Vec<PutItem>,
    },
    Publish {
        op: OpId,
        ns: u32,
        items: Vec<(PutItem, Filled)>,
    },
    Get {
        op: OpId,
        ns: u32,
        keys: Vec<BlockKey>,
        deadline: Nanos,
        target: GetTarget,
        hold: Option<HoldId>,
        /// Nanoseconds in which the caller would compute one block.
        recompute: Option<Nanos>,
    },
    Hold {
        op: OpId,
        ns: u32,
        keys: Vec<BlockKey>,
        expires: Nanos,
    },
    Release {
        hold: HoldId,
    },
    Prefetch {
        ns: u32,
        keys: Vec<BlockKey>,
    },
    CopiedOut {
        op: OpId,
        item: usize,
        /// Whether the copy still had its checksums; `None` where the caller's memory could not be
        /// written.
        intact: Option<bool>,
        generation: u64,
    },
    LoadDone {
        block: BlockId,
        result: Result<Filled, LoadFault>,
    },
    /// A direct read has ended; nobody but its caller has the slot any more.
    LoadedInto {
        op: OpId,
        item: usize,
        block: BlockId,
        result: Result<(), LoadFault>,
    },
    Scrub {
        op: OpId,
        deadline: Nanos,
    },
    /// A block was read back, for a caller's pass or in the background.
    Scrubbed {
        block: BlockId,
        pass: Option<OpId>,
        result: Result<(), LoadFault>,
    },
    Probed {
        drive: DriveId,
        ok: bool,
    },
    SegmentReady {
        drive: DriveId,
        segment: u32,
        result: std::io::Result<FileId>,
    },
    SlabsWritten {
        group: u64,
        block: BlockId,
        ok: bool,
    },
    HeadersWritten {
        group: u64,
        drive: DriveId,
        ok: bool,
    },
    Synced {
        group: u64,
        drive: DriveId,
        ok: bool,
    },
    JournalWritten {
        drive: DriveId,
        zero: bool,
        ok: bool,
    },
    Delete {
        op: OpId,
        ns: u32,
        doomed: Doomed,
        deadline: Nanos,
    },
    /// A request has used its blocks.
    Accessed(Access),
    Flush {
        op: OpId,
        deadline: Nanos,
    },
    Cancel {
        op: OpId,
    },
    Close {
        op: OpId,
        deadline: Nanos,
    },
    Found(FoundSegment),
    /// Tombstones of the drives' journals, and the pages that they take up.
    FoundTombstones {
        tombstones: Vec<Tombstone>,
        pages: u64,
    },
    /// Everything was read; `complete` where no drive of the configuration is missing.
    /// `tables_read` where that was the header tables, not checkpoints.
    Recovered {
        complete: bool,
        tables_read: bool,
    },
    Tick,
}

/// One slab of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlabRead {
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    /// Payload bytes.
    pub(crate) bytes: u64,
    pub(crate) crc: u32,
}

/// Bytes for the header table of a segment.
#[derive(Debug)]
pub(crate) struct HeaderWrite {
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Something to be done outside.
#[derive(Debug)]
pub(crate) enum Command {
    CopyIn {
        op: OpId,
        item: usize,
        into: Filling,
    },
    CopyOut {
        op: OpId,
        item: usize,
        from: Arc<Resident>,
    },
    Load {
        block: BlockId,
        drive: DriveId,
        reads: SmallVec<[SlabRead; 1]>,
        into: Filling,
        cancel: CancelFlag,
    },
    /// Read into the slot that the call gave for `item`.
    LoadInto {
        op: OpId,
        item: usize,
        block: BlockId,
        drive: DriveId,
        reads: SmallVec<[SlabRead; 1]>,
        cancel: CancelFlag,
    },
    /// Read and verify, after everything else.
    Scrub {
        block: BlockId,
        drive: DriveId,
        reads: SmallVec<[SlabRead; 1]>,
        pass: Option<OpId>,
    },
    /// Read a page, to see whether the drive answers.
    Probe {
        drive: DriveId,
    },
    /// Create the file, or rewrite its header page and table (`image`).
    PrepareSegment {
        drive: DriveId,
        segment: u32,
        file: Option<FileId>,
        image: Vec<u8>,
    },
    WriteSlabs {
        group: u64,
        block: BlockId,
        drive: DriveId,
        from: Arc<Resident>,
        to: Vec<(FileId, u64)>,
    },
    WriteHeaders {
        group: u64,
        drive: DriveId,
        writes: Vec<HeaderWrite>,
    },
    Sync {
        group: u64,
        drive: DriveId,
        files: BTreeSet<FileId>,
    },
    /// Pages of the journal, written and synced.
    WriteJournal {
        drive: DriveId,
        page: u64,
        bytes: Vec<u8>,
        zero: bool,
    },
    Complete {
        op: OpId,
        outcome: Outcome,
    },
}
