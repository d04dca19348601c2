//! The state machine: every decision of the store, without threads, clocks or I/O.
//!
//! `step(now, events) -> commands`. What is resident, what is loading, who waits, what is written
//! behind
//! and in which group, what is evicted, what recovery believes: all of it is decided here, one step
//! at a time, so that a seeded simulator drives the very same code as production.

mod accesses;
mod ahead;
mod alloc;
mod audit;
mod census;
mod circuit;
mod commit;
mod delete;
mod direct;
mod drive;
mod evict;
mod flush;
mod get;
mod handover;
mod hold;
mod message;
mod offload;
mod put;
mod records;
mod recover;
mod relocate;
mod scrub;
mod staging;
mod table;
mod usage;
mod wear;
mod worth;

pub(crate) use accesses::{Access, Sizes, Told};
pub(crate) use alloc::{Geometry, SlotAllocator, SlotId};
pub use audit::Audit;
pub use census::{
    BlockFilter, BlockRow, Cause, Explained, Explanation, Happened, NamespaceRow, OnNvme, Page,
    SlabRow, SurveyRow,
};
pub(crate) use census::{MAX_EXPLAINED, PAGE_NAMESPACES};
pub use delete::DeleteReport;
pub(crate) use delete::Doomed;
pub(crate) use drive::{DriveCondition, DriveId};
pub use hold::HoldId;
pub(crate) use message::*;
pub use message::{FlushReport, OpId, PutStatus};
pub(crate) use records::Records;
pub(crate) use relocate::{SlabMove, SlabPlace};
pub use scrub::ScrubReport;
pub use usage::{Quota, Usage};

use crate::index::{FullKey, KeyHasher, ReadIndex};
use crate::latency::Latencies;
use crate::log::EventLog;
use crate::resident::{EnteringBytes, FreedSlots};
use crate::stats::Counters;
use crate::sync::Arc;
use drive::Drive;
use flush::FlushOp;
use get::GetOp;
use hashbrown::HashMap;
use offload::Groups;
use put::PutOp;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use table::BlockTable;
use tiered_kv_io::{Arena, Nanos};
use tiered_kv_policy::Policy;
use tiered_kv_types::{KvLayout, NamespaceId, round_up_to_page};

/// Bounds that the configuration sets, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) dirty_high_bytes: u64,
    pub(crate) load_high_bytes: u64,
    pub(crate) held_high_bytes: u64,
    pub(crate) dirty_low_bytes: u64,
    /// How long a drive may leave all reads unanswered before it counts as stalled.
    pub(crate) stall: Nanos,
    /// How long a drive that fails is left alone.
    pub(crate) retry: Nanos,
    /// Bytes a second that may be written to each drive, over the hours; 0: no bound.
    pub(crate) write_bytes_per_s: u64,
    /// Part of what is moved up from drives that may be so for nothing; 0: only what is asked for.
    pub(crate) ahead_waste: f64,
    /// Bytes a second read back in the background.
    pub(crate) scrub_bytes_per_s: u64,
}

/// What the machine works on and shares with its drivers.
pub(crate) struct Parts {
    pub(crate) arena: Arc<Arena>,
    pub(crate) index: Arc<ReadIndex>,
    pub(crate) freed: FreedSlots,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) limits: Limits,
    pub(crate) memory: Geometry,
    /// There is no T1: what is in memory only passes through.
    pub(crate) staging: bool,
    pub(crate) drives: Vec<DriveParts>,
    /// Pages of every drive's journal.
    pub(crate) journal_pages: u64,
    pub(crate) hasher: KeyHasher,
    pub(crate) log_entries: usize,
}

/// Geometry and identity of a drive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriveParts {
    pub(crate) store: [u8; 16],
    pub(crate) geometry: Geometry,
}

#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) id: NamespaceId,
    /// Known once a caller opened the namespace; recovery knows digests only.
    pub(crate) layout: Option<KvLayout>,
    shape: Option<u32>,
    /// The shape is for this namespace alone, since it has or had a quota.
    own_shape: bool,
    pub(crate) usage: Usage,
    pub(crate) quota: Quota,
    /// Generation of the last epoch: what was begun before it is not published after it.
    epoch: u64,
}

impl Namespace {
    fn new(id: NamespaceId) -> Self {
        Self {
            id,
            layout: None,
            shape: None,
            own_shape: false,
            usage: Usage::default(),
            quota: Quota::default(),
            epoch: 0,
        }
    }
}

/// A call in progress.
#[derive(Debug)]
enum Op {
    Put(PutOp),
    Get(GetOp),
    Flush(FlushOp),
    Delete(delete::DeleteOp),
    Scrub(scrub::ScrubOp),
    Close { deadline: Nanos },
}

pub(crate) struct Machine {
    now: Now,
    limits: Limits,
    arena: Arc<Arena>,
    index: Arc<ReadIndex>,
    freed: FreedSlots,
    policy: Box<dyn Policy>,
    scratch: accesses::Scratch,
    memory: SlotAllocator,
    owners: usage::SlotOwners,
    drives: Vec<Drive>,
    groups: Groups,
    journal: delete::Journal,
    table: BlockTable,
    namespaces: Vec<Namespace>,
    ns_by_id: HashMap<NamespaceId, u32, KeyHasher>,
    /// One entry for each combination met.
    shapes: Vec<usage::Shape>,
    ops: HashMap<OpId, Op, KeyHasher>,
    timers: BTreeSet<(Nanos, OpId)>,
    /// Blocks that wait to be durable, in the order in which they became visible.
    dirty: BTreeMap<u64, BlockId>,
    dirty_bytes: u64,
    /// Bytes on their way in; they count as dirty.
    entering: EnteringBytes,
    loading_bytes: u64,
    dram_blocks: u64,
    nvme_blocks: u64,
    flushes: BTreeSet<OpId>,
    handovers: handover::Attempts,
    holds: hold::Holds,
    /// Puts with blocks that wait for room.
    waiting_puts: BTreeSet<OpId>,
    /// Dirty bytes rose above the high mark and have not yet fallen below the low one.
    throttling: bool,
    /// Blocks that will not become durable and that no flush has reported yet.
    undurable_unreported: u64,
    closing: Option<OpId>,
    /// The close has ended: the drives take nothing more.
    closed: bool,
    /// Waiters of loads whose block was removed, told at the end of the step.
    load_missed: Vec<(OpId, usize, tiered_kv_types::MissReason)>,
    staging: staging::Staging,
    scrub: scrub::Scrub,
    ahead: ahead::Ahead,
    next_dirty: u64,
    next_generation: u64,
    next_put: u64,
    found: Option<recover::Found>,
    pub(crate) counters: Counters,
    latencies: Latencies,
    pub(crate) log: EventLog,
}

fn drives(parts: Vec<DriveParts>, limits: &Limits) -> Vec<Drive> {
    parts.into_iter().map(|drive| Drive::new(drive, limits)).collect()
}

impl Machine {
    pub(crate) fn new(parts: Parts) -> Self {
        let hasher = parts.hasher;
        Self {
            now: Now::default(),
            limits: parts.limits,
            arena: parts.arena,
            index: parts.index,
            freed: parts.freed,
            policy: parts.policy,
            scratch: accesses::Scratch::default(),
            memory: SlotAllocator::new(parts.memory, false),
            owners: usage::SlotOwners::default(),
            drives: drives(parts.drives, &parts.limits),
            groups: Groups::default(),
            journal: delete::Journal::new(parts.journal_pages),
            table: BlockTable::new(hasher.clone()),
            namespaces: Vec::new(),
            ns_by_id: HashMap::with_hasher(hasher.clone()),
            shapes: Vec::new(),
            ops: HashMap::with_hasher(hasher),
            timers: BTreeSet::new(),
            dirty: BTreeMap::new(),
            dirty_bytes: 0,
            entering: EnteringBytes::default(),
            loading_bytes: 0,
            dram_blocks: 0,
            nvme_blocks: 0,
            flushes: BTreeSet::new(),
            handovers: handover::Attempts::default(),
            holds: hold::Holds::default(),
            waiting_puts: BTreeSet::new(),
            throttling: false,
            undurable_unreported: 0,
            closing: None,
            closed: false,
            load_missed: Vec::new(),
            staging: staging::Staging::new(parts.staging),
            scrub: scrub::Scrub::new(parts.limits.scrub_bytes_per_s),
            ahead: ahead::Ahead::new(parts.limits.ahead_waste),
            next_dirty: 0,
            next_generation: 1,
            next_put: 1,
            found: None,
            counters: Counters::default(),
            latencies: Latencies::default(),
            log: EventLog::new(parts.log_entries),
        }
    }

    /// Takes in what happened and says what is to be done.
    pub(crate) fn step(
        &mut self,
        now: Now,
        events: impl IntoIterator<Item = Event>,
        out: &mut Vec<Command>,
    ) {
        self.now.mono = self.now.mono.max(now.mono);
        self.now.unix_ns = now.unix_ns;
        self.reclaim();
        self.keep_few();
        for event in events {
            self.handle(event, out);
        }
        self.expire(out);
        self.expire_holds();
        self.watch_drives(out);
        self.retry_puts(out);
        self.settle_missed(out);
        self.drop_unstored();
        self.pump_journal(out);
        self.pump_offload(out);
        self.settle_staging(out);
        self.settle_missed(out);
        self.settle_flushes(out);
        self.pump_ahead(out);
        self.pump_scrub(out);
    }

    /// Takes in what recovery read. What is to be done about it follows with the next step.
    pub(crate) fn recover(&mut self, now: Now, events: Vec<Event>) {
        self.now = now;
        self.log.begun_unix_ns = now.unix_ns;
        for event in events {
            self.handle(event, &mut Vec::new());
        }
    }

    fn handle(&mut self, event: Event, out: &mut Vec<Command>) {
        match event {
            Event::Put { op, ns, items, deadline, wait_until } => {
                self.put(op, PutOp::new(ns, items, deadline, wait_until), out);
            }
            Event::CopiedIn { op, item, filled } => self.copied_in(op, item, filled, out),
            Event::Reserve { op, ns, items } => self.reserve(op, ns, &items, out),
            Event::Publish { op, ns, items } => self.publish_filled(op, ns, items, out),
            Event::Get { op, ns, keys, deadline, target, hold, recompute } => {
                self.get(op, GetOp::new(ns, keys, deadline, target, hold, recompute), out);
            }
            Event::Hold { op, ns, keys, expires } => self.hold(op, ns, &keys, expires, out),
            Event::Release { hold } => self.release(hold),
            Event::Prefetch { ns, keys } => self.prefetch(ns, &keys, out),
            Event::CopiedOut { op, item, intact, generation } => {
                self.copied_out(op, item, intact, generation, out);
            }
            Event::LoadDone { block, result } => self.load_done(block, result, out),
            Event::LoadedInto { op, item, block, result } => {
                self.loaded_into(op, item, block, result, out);
            }
            Event::Scrub { op, deadline } => self.scrub(op, deadline),
            Event::Scrubbed { block, pass, result } => self.scrubbed(block, pass, result, out),
            Event::Probed { drive, ok } => self.probed(drive, ok, out),
            Event::SegmentReady { drive, segment, result } => {
                self.segment_ready(drive, segment, result);
            }
            Event::SlabsWritten { group, block, ok } => self.slabs_written(group, block, ok, out),
            Event::HeadersWritten { group, drive, ok } => {
                self.headers_written(group, drive, ok, out);
            }
            Event::Synced { group, drive, ok } => self.synced(group, drive, ok, out),
            Event::JournalWritten { drive, zero, ok } => {
                self.journal_written(drive, zero, ok, out);
            }
            Event::Delete { op, ns, doomed, deadline } => {
                self.delete(op, ns, doomed, deadline, out);
            }
            Event::Accessed(access) => self.accessed(&access),
            Event::Flush { op, deadline } => self.flush(op, deadline),
            Event::Cancel { op } => self.end_op(op, tiered_kv_types::MissReason::Cancelled, out),
            Event::Close { op, deadline } => self.close(op, deadline, out),
            Event::Found(found) => self.found_segment(found),
            Event::FoundTombstones { tombstones, pages } => {
                self.found_tombstones(tombstones, pages);
            }
            Event::Recovered { complete, tables_read } => self.recovered(complete, tables_read),
            Event::Tick => {}
        }
    }

    /// Gives slots whose last owner is gone back to the allocator.
    fn reclaim(&mut self) {
        while let Some(slot) = self.freed.pop() {
            self.free_memory(slot);
        }
    }

    /// Ends every call whose deadline has passed.
    fn expire(&mut self, out: &mut Vec<Command>) {
        while let Some((deadline, op)) = self.timers.first().copied() {
            if deadline > self.now.mono {
                break;
            }
            self.timers.remove(&(deadline, op));
            self.end_op(op, tiered_kv_types::MissReason::Deadline, out);
        }
    }

    /// When the next step is due if nothing else happens.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let timer = self.timers.first().map(|(deadline, _)| *deadline);
        let retries = self.drives.iter().filter_map(Drive::retry_at);
        let journal = self.journal.retry_at().filter(|at| *at > self.now.mono);
        timer
            .into_iter()
            .chain(self.holds.next_expiry())
            .chain(self.next_wait())
            .chain(retries)
            .chain(self.next_watch())
            .chain(self.next_scrub())
            .chain(journal)
            .min()
    }

    /// The number of a namespace, met before or not.
    pub(crate) fn namespace(&mut self, id: NamespaceId) -> u32 {
        if let Some(ns) = self.ns_by_id.get(&id) {
            return *ns;
        }
        let ns = u32::try_from(self.namespaces.len()).expect("fewer than 2^32 namespaces");
        self.namespaces.push(Namespace::new(id));
        self.ns_by_id.insert(id, ns);
        ns
    }

    /// How many namespaces were met.
    pub(crate) fn namespaces(&self) -> u32 {
        u32::try_from(self.namespaces.len()).expect("fewer than 2^32 namespaces")
    }

    /// The number of a namespace that was met before.
    pub(crate) fn known_namespace(&self, id: &NamespaceId) -> Option<u32> {
        self.ns_by_id.get(id).copied()
    }

    /// Opens a namespace for a caller. `Err` says which tier's slots are too small, and the slot's
    /// bytes; without T1, the bytes that the staging memory should have.
    pub(crate) fn open_namespace(
        &mut self,
        id: NamespaceId,
        layout: &KvLayout,
    ) -> Result<u32, (tiered_kv_types::Tier, u64)> {
        let classes: SmallVec<[u64; 1]> =
            layout.slab_bytes().iter().map(|b| round_up_to_page(*b)).collect();
        for class in &classes {
            if !self.staging.on && !self.memory.fits(*class) {
                return Err((tiered_kv_types::Tier::Dram, *class));
            }
            if self.drives.iter().any(|d| !d.slots.fits(*class)) {
                return Err((tiered_kv_types::Tier::Nvme, *class));
            }
        }
        if self.staging.on {
            self.staging_fits(&classes).map_err(|bytes| (tiered_kv_types::Tier::Dram, bytes))?;
        }
        let ns = self.namespace(id);
        let owner = self.namespaces[ns as usize].own_shape.then_some(ns);
        let shape = self.shape(&classes, owner);
        let entry = &mut self.namespaces[ns as usize];
        entry.layout = Some(layout.clone());
        entry.shape = Some(shape);
        Ok(ns)
    }

    pub(crate) fn namespace_id(&self, ns: u32) -> NamespaceId {
        self.namespaces[ns as usize].id
    }

    fn layout(&self, ns: u32) -> &KvLayout {
        let layout = self.namespaces[ns as usize].layout.as_ref();
        layout.expect("calls name a namespace that was opened")
    }

    fn full(ns: u32, key: tiered_kv_types::BlockKey) -> FullKey {
        FullKey { ns, key }
    }

    /// Ends a call early: by deadline, cancellation or close.
    fn end_op(&mut self, op: OpId, reason: tiered_kv_types::MissReason, out: &mut Vec<Command>) {
        match self.ops.get_mut(&op) {
            Some(Op::Put(_)) => self.end_put(op, out),
            Some(Op::Get(_)) => self.end_get(op, reason, out),
            Some(Op::Flush(_)) => self.end_flush(op, out),
            Some(Op::Delete(_)) => self.end_delete(op, out),
            Some(Op::Scrub(_)) => self.end_scrub(op, false, out),
            Some(Op::Close { .. }) => self.finish_close(op, out),
            None => {}
        }
    }

    fn complete(&mut self, op: OpId, deadline: Nanos, outcome: Outcome, out: &mut Vec<Command>) {
        self.timers.remove(&(deadline, op));
        self.ops.remove(&op);
        out.push(Command::Complete { op, outcome });
    }
}
