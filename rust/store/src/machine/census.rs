//! What operators may see of the machine: namespaces, blocks, and why a key is not there. Each
//! answer is one bounded page, so that none keeps callers waiting.

use super::table::{Block, OnDrive};
use super::{Machine, Quota, Usage};
use crate::index::Residency;
use crate::log::{LogEntry, LogKind};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use tiered_kv_types::{BlockKey, NamespaceId};

/// Block numbers that one page looks at.
const PAGE_SCANS: u32 = 4096;
/// Blocks of one page.
pub(crate) const PAGE_BLOCKS: usize = 2048;
/// Namespaces of one page.
pub(crate) const PAGE_NAMESPACES: usize = 32;
/// Keys that one question of `explain` names at most.
pub(crate) const MAX_EXPLAINED: usize = 1024;
/// Tenants of a namespace that a page names.
const MAX_TENANTS: usize = 8;
/// Events of a key that are told, the newest ones.
const MAX_EVENTS: usize = 4;

/// Where a block stands on the drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNvme {
    /// Not there.
    #[default]
    No,
    /// On its way.
    Writing,
    /// Durable.
    Durable,
}

impl OnNvme {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Writing => "writing",
            Self::Durable => "durable",
        }
    }
}

/// One slab of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlabRow {
    /// Payload bytes.
    pub bytes: u64,
    /// Payload checksum.
    pub crc32c: u32,
    /// Segment and slot on the drive, where it is on one.
    pub place: Option<(u32, u32)>,
}

/// One block, as operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRow {
    /// Digest of its namespace.
    pub namespace: [u8; 32],
    /// Its key.
    pub key: [u8; 32],
    /// Key of the block before it in its chain.
    pub parent: Option<[u8; 32]>,
    /// Digest of the tenant that pays for it, zero for none.
    pub tenant: [u8; 16],
    /// Blocks before it in its chain.
    pub depth: u32,
    /// Tokens in it.
    pub tokens: u32,
    /// Bit 0: a prefill chunk ended with it; bit 1: computed by decode.
    pub flags: u8,
    /// What it holds, by the number in its record.
    pub block_type: u8,
    /// Payload bytes.
    pub bytes: u64,
    /// In memory.
    pub in_dram: bool,
    /// On a drive.
    pub nvme: OnNvme,
    /// Which drive, where it is on one.
    pub drive: u16,
    /// Holds in force.
    pub holds: u32,
    /// No stored chain of parents leads to it.
    pub orphan: bool,
    /// Its generation.
    pub generation: u64,
    /// The put that stored it.
    pub put_id: u64,
    /// When it was stored, ns since 1970.
    pub stored_unix_ns: u64,
    /// Its slabs; only where one block is inspected.
    pub slabs: Vec<SlabRow>,
}

/// Which blocks are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockFilter {
    /// Of this namespace.
    pub namespace: Option<[u8; 32]>,
    /// Of this tenant; zero for blocks without one.
    pub tenant: Option<[u8; 16]>,
    /// Stored before this time, ns since 1970.
    pub stored_before_unix_ns: Option<u64>,
}

/// One page, and where the next begins; `None` after the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// What to pass for the next page.
    pub next: Option<u32>,
}

/// What one page of blocks says of a namespace; pages add up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurveyRow {
    /// Digest of the namespace.
    pub namespace: [u8; 32],
    /// Blocks in any tier.
    pub blocks: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// When the first of them was stored, ns since 1970.
    pub oldest_unix_ns: u64,
    /// When the last of them was stored, ns since 1970.
    pub newest_unix_ns: u64,
    /// Some of the tenants that pay for them.
    pub tenants: Vec<[u8; 16]>,
}

/// One namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceRow {
    /// Its digest.
    pub namespace: [u8; 32],
    /// Its specification by field, where the store knows it; `salt` as a digest.
    pub fields: Option<BTreeMap<String, String>>,
    /// What it uses.
    pub usage: Usage,
    /// What it may use.
    pub quota: Quota,
}

/// Something that happened to a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Happened {
    /// When, ns since 1970.
    pub unix_ns: u64,
    /// What: a kind of the event log.
    pub kind: String,
    /// Of a fault, which.
    pub reason: Option<String>,
    /// The tier concerned.
    pub tier: Option<String>,
}

/// Why a key is where it is, or is nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// It is there.
    Resident,
    /// It is there, and a load of it was slower than its caller would wait.
    TooSlow,
    /// It is there, and computing it anew would have been faster than loading it.
    Recompute,
    /// It is on a drive that is not asked at present.
    CircuitOpen,
    /// A put of it is under way.
    Writing,
    /// It made room for others.
    Evicted,
    /// A caller deleted it.
    Deleted,
    /// Its bytes failed their checksum, or could not be read.
    Fault,
    /// A put of it was refused.
    Throttled,
    /// Nothing has happened to it since the store was opened.
    NeverStored,
    /// Nothing is known of it, and the log does not go back to the open.
    Unknown,
}

impl Cause {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::TooSlow => "too_slow",
            Self::Recompute => "recompute",
            Self::CircuitOpen => "circuit_open",
            Self::Writing => "writing",
            Self::Evicted => "evicted",
            Self::Deleted => "deleted",
            Self::Fault => "fault",
            Self::Throttled => "throttled",
            Self::NeverStored => "never_stored",
            Self::Unknown => "unknown",
        }
    }
}

/// What is known of one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explained {
    /// Where it is.
    pub residency: Residency,
    /// Why.
    pub cause: Cause,
    /// What happened to it last, the newest first.
    pub events: Vec<Happened>,
}

/// What is known of some keys, and since when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// One entry a key.
    pub keys: Vec<Explained>,
    /// How far back the events go, ns since 1970.
    pub since_unix_ns: u64,
    /// That is when the store was opened: no event is missing.
    pub complete: bool,
}

impl From<&LogEntry> for Happened {
    fn from(entry: &LogEntry) -> Self {
        let reason = match entry.kind {
            LogKind::Fault(reason) => Some(reason.name().to_owned()),
            _ => None,
        };
        Self {
            unix_ns: entry.unix_ns,
            kind: entry.kind.name().to_owned(),
            reason,
            tier: entry.tier.map(|tier| tier.name().to_owned()),
        }
    }
}

/// The cause, from where a key is and its events, the newest first.
fn cause(residency: Residency, events: &[&LogEntry], complete: bool) -> Cause {
    let newest = events.first().map(|entry| entry.kind);
    match residency {
        Residency::In(tiered_kv_types::Tier::Dram) => return Cause::Resident,
        Residency::In(_) | Residency::Loading => {
            return match newest {
                Some(LogKind::Slow) => Cause::TooSlow,
                Some(LogKind::Recompute) => Cause::Recompute,
                _ => Cause::Resident,
            };
        }
        Residency::Writing => return Cause::Writing,
        Residency::Shut => return Cause::CircuitOpen,
        Residency::Absent => {}
    }
    let told = events.iter().find_map(|entry| match entry.kind {
        LogKind::Evicted => Some(Cause::Evicted),
        LogKind::Deleted => Some(Cause::Deleted),
        LogKind::Fault(_) => Some(Cause::Fault),
        LogKind::Throttled => Some(Cause::Throttled),
        LogKind::Undurable | LogKind::Slow | LogKind::Recompute => None,
    });
    told.unwrap_or(if complete { Cause::NeverStored } else { Cause::Unknown })
}

impl Machine {
    fn row(&self, block: &Block) -> BlockRow {
        BlockRow {
            namespace: self.namespaces[block.key.ns as usize].id.0,
            key: block.key.key.0,
            parent: block.parent.map(|key| key.0),
            tenant: block.tenant.0,
            depth: block.info.depth,
            tokens: block.info.tokens,
            flags: block.info.flags(),
            block_type: block.info.block_type as u8,
            bytes: block.bytes(),
            in_dram: block.in_dram,
            nvme: match block.drive {
                OnDrive::None => OnNvme::No,
                OnDrive::Writing(_) => OnNvme::Writing,
                OnDrive::Durable(_) => OnNvme::Durable,
            },
            drive: block.home,
            holds: block.holds,
            orphan: block.orphan,
            generation: block.generation,
            put_id: block.put_id,
            stored_unix_ns: block.stored_unix_ns,
            slabs: Vec::new(),
        }
    }

    /// Blocks from number `from` on. Blocks that come or go meanwhile may be on no page, or on two.
    pub(crate) fn blocks_page(&self, from: u32, filter: &BlockFilter) -> Page<BlockRow> {
        let ns = match filter.namespace.map(|id| self.known_namespace(&NamespaceId(id))) {
            Some(None) => return Page { rows: Vec::new(), next: None },
            other => other.flatten(),
        };
        let meant = |b: &&Block| {
            ns.is_none_or(|ns| b.key.ns == ns)
                && filter.tenant.is_none_or(|tenant| b.tenant.0 == tenant)
                && filter.stored_before_unix_ns.is_none_or(|before| b.stored_unix_ns < before)
        };
        // A page of numbers never has more blocks than fit.
        let to = from.saturating_add(PAGE_BLOCKS as u32);
        let (blocks, more) = self.table.page(from, to);
        let rows = blocks.filter(meant).map(|block| self.row(block)).collect();
        Page { rows, next: more.then_some(to) }
    }

    /// What the blocks from number `from` on say of their namespaces.
    pub(crate) fn survey_page(&self, from: u32) -> Page<SurveyRow> {
        let to = from.saturating_add(PAGE_SCANS);
        let (blocks, more) = self.table.page(from, to);
        let mut rows: BTreeMap<u32, SurveyRow> = BTreeMap::new();
        for block in blocks {
            let row = rows.entry(block.key.ns).or_insert_with(|| SurveyRow {
                namespace: self.namespaces[block.key.ns as usize].id.0,
                oldest_unix_ns: u64::MAX,
                ..SurveyRow::default()
            });
            row.blocks += 1;
            row.bytes += block.bytes();
            row.oldest_unix_ns = row.oldest_unix_ns.min(block.stored_unix_ns);
            row.newest_unix_ns = row.newest_unix_ns.max(block.stored_unix_ns);
            if row.tenants.len() < MAX_TENANTS && !row.tenants.contains(&block.tenant.0) {
                row.tenants.push(block.tenant.0);
            }
        }
        // No page has more namespaces, or tenants, than blocks: it fits in a frame.
        Page { rows: rows.into_values().collect(), next: more.then_some(to) }
    }

    /// Namespaces from number `from` on, without their fields.
    pub(crate) fn namespaces_page(&self, from: u32) -> Page<NamespaceRow> {
        let (from, len) = (from as usize, self.namespaces.len());
        let to = from.saturating_add(PAGE_NAMESPACES).min(len);
        let row = |entry: &super::Namespace| NamespaceRow {
            namespace: entry.id.0,
            fields: None,
            usage: entry.usage,
            quota: entry.quota,
        };
        let rows = self.namespaces[from.min(to)..to].iter().map(row).collect();
        let next = (to < len).then(|| u32::try_from(to).expect("namespace numbers are u32"));
        Page { rows, next }
    }

    /// The namespaces that use most.
    pub(crate) fn largest_namespaces(&self, most: usize) -> Vec<NamespaceRow> {
        let mut order: Vec<usize> = (0..self.namespaces.len()).collect();
        let bytes = |at: &usize| {
            let usage = self.namespaces[*at].usage;
            std::cmp::Reverse(usage.dram_bytes + usage.nvme_bytes)
        };
        if order.len() > most {
            order.select_nth_unstable_by_key(most, bytes);
            order.truncate(most);
        }
        order.sort_by_key(bytes);
        let one = |at: usize| self.namespaces_page(u32::try_from(at).expect("u32")).rows.remove(0);
        order.into_iter().map(one).collect()
    }

    /// A key in one namespace, or in all of them.
    pub(crate) fn inspect(&self, namespace: Option<NamespaceId>, key: BlockKey) -> Vec<BlockRow> {
        let all = 0..u32::try_from(self.namespaces.len()).expect("namespace numbers are u32");
        let meant = |ns: &u32| namespace.is_none_or(|id| self.namespaces[*ns as usize].id == id);
        let found = all.filter(meant).filter_map(|ns| self.table.id(&Self::full(ns, key)));
        let row = |id| {
            let block = self.table.get(id).expect("mapped blocks exist");
            let mut row = self.row(block);
            let places: &[super::SlotId] = match &block.drive {
                OnDrive::None => &[],
                OnDrive::Writing(slots) | OnDrive::Durable(slots) => slots,
            };
            let slab = |(at, (bytes, crc32c)): (usize, &(u64, u32))| SlabRow {
                bytes: *bytes,
                crc32c: *crc32c,
                place: places.get(at).map(|slot| (slot.segment, slot.index)),
            };
            row.slabs = block.slabs.iter().enumerate().map(slab).collect();
            row
        };
        found.map(row).take(PAGE_BLOCKS / 8).collect()
    }

    /// Why keys of a namespace are where they are, or are nowhere.
    pub(crate) fn explain(&self, namespace: &NamespaceId, keys: &[BlockKey]) -> Explanation {
        let ns = self.known_namespace(namespace);
        let mut events: HashMap<BlockKey, Vec<&LogEntry>> = HashMap::new();
        let asked: HashSet<&BlockKey> = keys.iter().collect();
        if let Some(ns) = ns {
            for entry in self.log.newest_first() {
                if entry.ns == ns && asked.contains(&entry.key) {
                    let told = events.entry(entry.key).or_default();
                    if told.len() < MAX_EVENTS {
                        told.push(entry);
                    }
                }
            }
        }
        let complete = self.log.is_complete();
        let one = |key: &BlockKey| {
            let none = Vec::new();
            let events = events.get(key).unwrap_or(&none);
            let residency =
                ns.map_or(Residency::Absent, |ns| self.index.residency(&Self::full(ns, *key)).0);
            Explained {
                residency,
                cause: cause(residency, events, complete),
                events: events.iter().map(|entry| Happened::from(*entry)).collect(),
            }
        };
        Explanation {
            keys: keys.iter().map(one).collect(),
            since_unix_ns: self.log.since_unix_ns(),
            complete,
        }
    }
}
