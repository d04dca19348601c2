//! The simulated world around the machine.

use super::Say;
use super::checks::Held;
use super::faults::Fault;
use super::memory::{Buffer, CANARY, fresh_slots, region};
use super::oracle::{Oracle, Promised};
use super::outcome::PutCall;
use super::restart::{hold_quota, machine};
use super::trace;
use crate::directory::open_journal;
use crate::index::{KeyHasher, ReadIndex};
use crate::log::LogEntry;
use crate::machine::{
    Access, Command, Doomed, DriveId, Event, Geometry, GetTarget, Machine, Now, OpId, PutItem,
    Quota, Told,
};
use crate::resident::Resident;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use tiered_kv_io::{Entropy, FileId, MemDisk, Region, RegionSlot, SeededEntropy};
use tiered_kv_types::{BlockInfo, BlockKey, ComputedBy, KvLayout, TenantId};

const KEYS: u64 = 24;
pub(super) const MEMORY: Geometry =
    Geometry { segment_bytes: 32 << 10, segments: 4, header_stride: 0 };
pub(super) const DRIVE: Geometry =
    Geometry { segment_bytes: 64 << 10, segments: 4, header_stride: 4096 };
pub(super) const STORE: [u8; 16] = [7; 16];
/// Few, so that runs fill the journal and retire tombstones.
pub(super) const JOURNAL_PAGES: u64 = 4;

/// A call in progress and what it was made with.
pub(super) enum Call {
    Put(PutCall),
    /// `choosy`: it has said in what time it would compute a block.
    Get {
        keys: Vec<BlockKey>,
        ns: u32,
        buffers: Vec<Buffer>,
        asked: u64,
        choosy: bool,
    },
    Flush {
        keys: Vec<Promised>,
        asked: u64,
    },
    Delete {
        ns: u32,
        doomed: Doomed,
        asked: Now,
    },
    Hold {
        keys: Vec<BlockKey>,
        expires: u64,
    },
    Scrub,
}

/// A command that was not performed yet.
pub(super) struct Pending {
    pub(super) command: Command,
    /// The caller's memory that it writes to.
    pub(super) buffer: Buffer,
    /// It stalls until this time.
    pub(super) until: u64,
}

pub(super) struct World {
    pub(super) machine: Machine,
    pub(super) index: Arc<ReadIndex>,
    pub(super) disks: Vec<MemDisk>,
    rng: SeededEntropy,
    pub(super) now: Now,
    pub(super) pending: Vec<Pending>,
    /// A region for each namespace, and its slots that no call uses.
    pub(super) regions: [Arc<Region>; 2],
    pub(super) idle: [Vec<RegionSlot>; 2],
    /// There is no T1.
    pub(super) staging: bool,
    /// Drives do as they are told, or say that they did not.
    pub(super) calm: bool,
    /// The drive whose journal may be damaged: every tombstone is on the other one too.
    pub(super) journal_victim: usize,
    /// Segments whose header page is not what was written.
    pub(super) bad_segments: BTreeSet<(DriveId, FileId)>,
    pub(super) calls: BTreeMap<OpId, Call>,
    pub(super) leases: Vec<(BlockKey, u64, Arc<Resident>)>,
    pub(super) holds: Vec<Held>,
    pub(super) oracle: Oracle,
    /// The events of the machine since it started, and their number before the last step.
    pub(super) log: Vec<LogEntry>,
    pub(super) logged_before: u64,
    pub(super) struck_by: [u64; Fault::ALL.len()],
    pub(super) figures: BTreeMap<&'static str, u64>,
    say: Option<Say>,
    step: usize,
    pub(super) layouts: [KvLayout; 2],
    next_op: u64,
    next_version: u64,
    /// The key of each version.
    pub(super) keys: BTreeMap<u64, BlockKey>,
    pub(super) seed: u64,
    pub(super) trace: u64,
}

const PATHS: u64 = 3;

fn key(ns: u32, path: u64, depth: u32) -> BlockKey {
    let mut bytes = [0; 32];
    // The first two blocks of every path are shared.
    bytes[0] = if depth < 2 { 0 } else { path as u8 + 1 };
    bytes[1] = depth as u8;
    // Neighbours lie on different drives.
    bytes[8] = depth as u8;
    bytes[9] = ns as u8;
    BlockKey(bytes)
}

/// The keys that follow this one on some path.
pub(super) fn children(of: &BlockKey) -> Vec<BlockKey> {
    let (ns, depth) = (u32::from(of.0[9]), u32::from(of.0[1]));
    let paths = (0..PATHS).filter(|path| key(ns, *path, depth) == *of);
    paths.map(|path| key(ns, path, depth + 1)).collect()
}

pub(super) fn payload(layout: &KvLayout, key: &BlockKey, version: u64) -> Vec<u8> {
    let len = usize::try_from(layout.block_bytes()).expect("small");
    let mut bytes: Vec<u8> = (0..len).map(|i| (i as u64 ^ version) as u8 ^ key.0[1]).collect();
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

pub(super) fn version_of(layout: &KvLayout, key: &BlockKey, bytes: &[u8]) -> u64 {
    let mut head = [0; 8];
    head.copy_from_slice(&bytes[..8]);
    let version = u64::from_le_bytes(head);
    let stored = payload(layout, key, version) == bytes;
    assert!(stored, "{key:?}: bytes that were never stored, marked as version {version}");
    version
}

/// Whether the world of this seed has no T1.
pub(super) fn is_staging(seed: u64) -> bool {
    seed % 3 == 2
}

/// Every fourth seed limits one of the namespaces, in memory only where that is a tier.
pub(super) fn quota_of(seed: u64) -> Option<Quota> {
    let dram = Some(48 << 10).filter(|_| !is_staging(seed));
    (seed % 4 == 2).then_some(Quota { dram_bytes: dram, nvme_bytes: Some(40 << 10) })
}

impl World {
    pub(super) fn new(seed: u64, say: Option<Say>) -> Self {
        let layouts = [
            KvLayout::uniform(16, 5000).expect("valid"),
            KvLayout::grid(16, 2, 1, vec![3000, 9000]).expect("valid"),
        ];
        let disks = vec![MemDisk::new(), MemDisk::new()];
        let staging = is_staging(seed);
        for disk in &disks {
            open_journal(disk, JOURNAL_PAGES).expect("there is room");
        }
        let (mut machine, index) = machine(disks.len(), &layouts, staging, seed);
        hold_quota(&mut machine, seed);
        // Slots on page addresses, and on none.
        let strides = [if seed.is_multiple_of(2) { 8192 } else { 5000 }, 12_000];
        let regions = [0, 1].map(|ns: usize| region(&layouts[ns], strides[ns]));
        let idle = [0, 1].map(|ns: usize| fresh_slots(&regions[ns]));
        Self {
            machine,
            index,
            disks,
            rng: SeededEntropy::new(seed),
            now: Now { mono: 0, unix_ns: 1_700_000_000_000_000_000 },
            pending: Vec::new(),
            regions,
            idle,
            staging,
            calm: seed % 4 == 1,
            journal_victim: usize::from(seed % 8 < 4),
            bad_segments: BTreeSet::new(),
            calls: BTreeMap::new(),
            leases: Vec::new(),
            holds: Vec::new(),
            oracle: Oracle::new(staging),
            log: Vec::new(),
            logged_before: 0,
            struck_by: Default::default(),
            figures: BTreeMap::new(),
            say,
            step: 0,
            layouts,
            next_op: 1,
            next_version: 1,
            keys: BTreeMap::new(),
            seed,
            trace: 0,
        }
    }

    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.rng.next_u64() % below
    }

    /// Tells of what happens, where somebody listens.
    pub(super) fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(say) = &mut self.say {
            say(&format!("{:>5}  {}", self.step, what()));
        }
    }

    pub(super) fn figure(&mut self, name: &'static str, n: u64) {
        *self.figures.entry(name).or_default() += n;
    }

    fn log_number(&self) -> u64 {
        self.log.last().map_or(0, |e| e.seq + 1)
    }

    pub(super) fn step(&mut self, step: usize) {
        self.step = step;
        match self.draw(200) {
            0..24 => self.put(),
            24..52 => self.get(),
            52..58 => self.flush(),
            58..64 => self.cancel(),
            64..68 => self.leases.clear(),
            68 => self.delete(),
            69 if self.draw(4) == 0 => self.scrub(),
            69 => self.hold(),
            70..73 => self.later(2_000_000_000),
            73 => self.cut_power(),
            74..76 => self.flip_bit(),
            76..80 if self.seed % 8 == 6 => self.hold(),
            76..80 => self.lookup(),
            _ => self.perform(),
        }
    }

    pub(super) fn feed(&mut self, event: Event) {
        self.note(|| format!("event {}", trace::event(&event)));
        self.now.mono += 1000;
        self.now.unix_ns += 1000;
        let mut commands = Vec::new();
        self.machine.step(self.now, [event], &mut commands);
        self.logged_before = self.log_number();
        let logged = self.machine.log.since(self.logged_before);
        for entry in &logged {
            self.note(|| format!("log {} {:?} {:?}", entry.kind.name(), entry.key, entry.tier));
        }
        self.check_evicted(&logged);
        self.log.extend(logged);
        for command in commands {
            self.note(|| format!("asks to {}", trace::command(&command)));
            let mark = format!("{command:?}").split(' ').next().map(str::to_owned);
            let hasher = KeyHasher::with_seed(self.trace);
            self.trace = hasher.hash_one((mark, self.now.mono));
            match command {
                Command::Complete { op, outcome } => self.completed(op, outcome),
                command => {
                    let buffer = self.lend(&command);
                    self.pending.push(Pending { command, buffer, until: 0 });
                }
            }
        }
    }

    pub(super) fn later(&mut self, by: u64) {
        self.now.mono += by;
        self.feed(Event::Tick);
    }

    /// A chain of keys of one namespace: runs along one of few paths, so that chains share roots.
    pub(super) fn chain(&mut self) -> (u32, Vec<(BlockKey, u32, Option<BlockKey>)>) {
        let ns = self.draw(2) as u32;
        let path = self.draw(PATHS);
        let len = 1 + self.draw(KEYS / 4) as u32;
        let key = |depth: u32| key(ns, path, depth);
        let item = |d: u32| (key(d), d, d.checked_sub(1).map(key));
        (ns, (0..len).map(item).collect())
    }

    pub(super) fn put(&mut self) {
        let (ns, chain) = self.chain();
        let computed = if self.draw(4) == 0 { ComputedBy::Decode } else { ComputedBy::Prefill };
        let item = |(key, depth, parent): (BlockKey, u32, Option<BlockKey>)| {
            let info = BlockInfo { depth, tokens: 16, computed, ..BlockInfo::default() };
            PutItem { key, parent, info, tenant: TenantId::NONE }
        };
        let items: Vec<PutItem> = chain.into_iter().map(item).collect();
        let keys: Vec<BlockKey> = items.iter().map(|i| i.key).collect();
        let versions: Vec<u64> = keys.iter().map(|_| self.version()).collect();
        for (key, version) in keys.iter().zip(&versions) {
            self.oracle.offered(*key, *version);
            self.keys.insert(*version, *key);
        }
        let waits = self.draw(3) == 0;
        self.note(|| format!("put of versions {versions:?}"));
        self.no_longer_held(&keys);
        let (log, asked) = (self.log_number(), self.now.mono);
        let call = PutCall { keys, versions, ns, waits, asked, log, outdated: false };
        let op = self.call(Call::Put(call));
        let deadline = self.now.mono + 5_000_000_000;
        let wait_until = if waits { self.now.mono + 1_000_000_000 } else { 0 };
        self.feed(Event::Put { op, ns, items, deadline, wait_until });
    }

    fn version(&mut self) -> u64 {
        self.next_version += 1;
        self.next_version
    }

    fn call(&mut self, call: Call) -> OpId {
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.calls.insert(op, call);
        op
    }

    fn get(&mut self) {
        let (ns, chain) = self.chain();
        let keys: Vec<BlockKey> = chain.into_iter().map(|(key, _, _)| key).collect();
        let slots = &mut self.idle[ns as usize];
        let in_slots = keys.len() <= slots.len() && !self.rng.next_u64().is_multiple_of(3);
        let mut target = if self.rng.next_u64().is_multiple_of(2) || self.staging {
            GetTarget::Buffers
        } else {
            GetTarget::Leases
        };
        let buffers: Vec<Buffer> = if in_slots && target == GetTarget::Buffers {
            if !self.rng.next_u64().is_multiple_of(3) {
                target = GetTarget::Slots;
            }
            keys.iter().map(|_| Buffer::Slot(slots.pop().expect("counted"))).collect()
        } else {
            let len = self.layouts[ns as usize].block_bytes() as usize;
            keys.iter().map(|_| Buffer::Heap(vec![CANARY; len])).collect()
        };
        let asked = self.now.mono;
        let recompute = (self.draw(4) == 0).then(|| self.draw(2_000_000));
        let choosy = recompute.is_some();
        let op = self.call(Call::Get { keys: keys.clone(), ns, buffers, asked, choosy });
        let deadline = self.now.mono + 1_000_000_000;
        let hold = self.holds.pop().map(|hold| hold.id);
        let keys_asked = keys.clone();
        self.feed(Event::Get { op, ns, keys: keys_asked, deadline, target, hold, recompute });
        self.finish_request(ns, keys);
    }

    /// Tells of a request that used these blocks, of a session or of none.
    fn finish_request(&mut self, ns: u32, keys: Vec<BlockKey>) {
        let session = Some(self.draw(6)).filter(|session| *session > 0);
        let bare = session.is_none() && self.draw(2) == 0;
        let output_tokens = self.draw(100) as u32;
        let told = Told { session, bare, output_tokens, ..Told::default() };
        let now = self.now.mono;
        self.feed(Event::Accessed(Access { ns, keys: keys.into(), now, told }));
    }

    fn flush(&mut self) {
        let keys = self.oracle.promised();
        let op = self.call(Call::Flush { keys, asked: self.now.mono });
        let deadline = self.now.mono + 60_000_000_000;
        self.feed(Event::Flush { op, deadline });
    }

    fn scrub(&mut self) {
        let op = self.call(Call::Scrub);
        let deadline = self.now.mono + 60_000_000_000;
        self.feed(Event::Scrub { op, deadline });
    }

    fn hold(&mut self) {
        let (ns, chain) = self.chain();
        let keys: Vec<BlockKey> = chain.into_iter().map(|(key, _, _)| key).collect();
        if self.draw(3) == 0 {
            return self.feed(Event::Prefetch { ns, keys });
        }
        let expires = self.now.mono + 3_000_000_000;
        let op = self.call(Call::Hold { keys: keys.clone(), expires });
        self.feed(Event::Hold { op, ns, keys, expires });
    }

    fn delete(&mut self) {
        let (ns, chain) = self.chain();
        let doomed = match self.draw(8) {
            0 => Doomed::StoredBefore(u64::MAX),
            1 => Doomed::StoredBefore(self.now.unix_ns.saturating_sub(200_000)),
            _ => Doomed::Keys(chain.into_iter().map(|(key, _, _)| key).collect()),
        };
        if matches!(doomed, Doomed::StoredBefore(u64::MAX)) {
            for call in self.calls.values_mut() {
                if let Call::Put(put) = call {
                    put.outdated |= put.ns == ns;
                }
            }
        }
        let op = self.call(Call::Delete { ns, doomed: doomed.clone(), asked: self.now });
        let deadline = self.now.mono + 60_000_000_000;
        self.feed(Event::Delete { op, ns, doomed, deadline });
    }

    fn cancel(&mut self) {
        let ops: Vec<OpId> = self.calls.keys().copied().collect();
        if !ops.is_empty() {
            let at = self.draw(ops.len() as u64) as usize;
            self.feed(Event::Cancel { op: ops[at] });
        }
    }

    /// Performs one pending command, chosen by the seed; one in forty fails, and some stall.
    pub(super) fn perform(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let at = self.draw(self.pending.len() as u64) as usize;
        if self.pending[at].until > self.now.mono {
            return;
        }
        if self.draw(100) == 0 {
            let until = self.now.mono + 500_000_000 * (1 + self.draw(16));
            self.pending[at].until = until;
            let what = trace::command(&self.pending[at].command);
            return self.struck(Fault::Stall, || what);
        }
        let Pending { command, buffer, .. } = self.pending.swap_remove(at);
        self.note(|| format!("does: {}", trace::command(&command)));
        let fails = self.draw(40) == 0;
        let event = self.execute(command, buffer, fails);
        self.feed(event);
    }
}
