//! The simulated world around the machine.

use super::memory::{Buffer, CANARY, REGION_SLOTS, fresh_slots, region};
use super::oracle::Oracle;
use crate::directory::{found_segments, open_journal, read_journal};
use crate::index::{FullKey, KeyHasher, ReadIndex};
use crate::io::segment_name;
use crate::machine::{
    Command, Doomed, DriveParts, Event, Geometry, GetTarget, HoldId, Limits, Machine, Now, OpId,
    Outcome, Parts, PutItem, PutStatus, Quota,
};
use crate::resident::{FreedSlots, Resident};
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use tiered_kv_io::{Arena, ArenaConfig, Disk, Entropy, MemDisk, Region, RegionSlot, SeededEntropy};
use tiered_kv_policy::Lru;
use tiered_kv_types::{
    BlockInfo, BlockKey, ComputedBy, KvLayout, MissReason, NamespaceId, TenantId,
};

const KEYS: u64 = 24;
const MEMORY: Geometry = Geometry { segment_bytes: 32 << 10, segments: 4, header_stride: 0 };
pub(super) const DRIVE: Geometry =
    Geometry { segment_bytes: 64 << 10, segments: 4, header_stride: 4096 };
const STORE: [u8; 16] = [7; 16];
/// Few, so that runs fill the journal and retire tombstones.
const JOURNAL_PAGES: u64 = 4;

/// A call in progress and what it was made with.
pub(super) enum Call {
    Put { keys: Vec<BlockKey>, versions: Vec<u64>, ns: u32, waits: bool },
    Get { keys: Vec<BlockKey>, ns: u32, buffers: Vec<Buffer>, asked: u64 },
    Flush { keys: Vec<BlockKey>, asked: u64 },
    Delete { ns: u32, doomed: Doomed, asked: Now },
    Hold,
    Scrub,
}

pub(super) struct World {
    pub(super) machine: Machine,
    index: Arc<ReadIndex>,
    pub(super) disks: Vec<MemDisk>,
    rng: SeededEntropy,
    now: Now,
    pending: Vec<(Command, Buffer)>,
    /// A region for each namespace, and its slots that no call uses.
    regions: [Arc<Region>; 2],
    pub(super) idle: [Vec<RegionSlot>; 2],
    /// There is no T1.
    staging: bool,
    pub(super) calls: BTreeMap<OpId, Call>,
    leases: Vec<(BlockKey, u64, Arc<Resident>)>,
    holds: Vec<HoldId>,
    oracle: Oracle,
    pub(super) layouts: [KvLayout; 2],
    next_op: u64,
    next_version: u64,
    pub(super) seed: u64,
    pub(super) trace: u64,
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
    assert_eq!(bytes, payload(layout, key, version), "{key:?}: bytes that were never stored");
    version
}

/// Whether the world of this seed has no T1.
pub(super) fn is_staging(seed: u64) -> bool {
    seed % 3 == 2
}

/// Every fourth seed limits one of the namespaces, in memory only where that is a tier.
pub(super) fn quota_of(seed: u64) -> Option<Quota> {
    let dram = Some(48 << 10).filter(|_| !is_staging(seed));
    (seed % 4 == 1).then_some(Quota { dram_bytes: dram, nvme_bytes: Some(40 << 10) })
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let layouts = [
            KvLayout::uniform(16, 5000).expect("valid"),
            KvLayout::grid(16, 2, 1, vec![3000, 9000]).expect("valid"),
        ];
        let disks = vec![MemDisk::new(), MemDisk::new()];
        let staging = is_staging(seed);
        let (machine, index) = boot(&disks, &layouts, staging, quota_of(seed));
        // Slots on page addresses, and on none.
        let strides = [if seed.is_multiple_of(2) { 8192 } else { 5000 }, 12_000];
        let regions = [0, 1].map(|ns: usize| region(&layouts[ns], strides[ns]));
        let idle = [0, 1].map(|ns: usize| fresh_slots(&regions[ns]));
        Self {
            machine,
            index,
            disks,
            rng: SeededEntropy::new(seed),
            now: Now::default(),
            pending: Vec::new(),
            regions,
            idle,
            staging,
            calls: BTreeMap::new(),
            leases: Vec::new(),
            holds: Vec::new(),
            oracle: Oracle::default(),
            layouts,
            next_op: 1,
            next_version: 1,
            seed,
            trace: 0,
        }
    }

    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.rng.next_u64() % below
    }

    fn log_number(&self) -> u64 {
        self.machine.log.since(0).last().map_or(0, |e| e.seq + 1)
    }

    pub(super) fn step(&mut self) {
        match self.draw(100) {
            0..18 => self.put(),
            18..36 => self.get(),
            36 if self.draw(4) == 0 => self.scrub(),
            37 if self.draw(4) == 0 => self.damage(),
            36..40 => self.flush(),
            40..44 => self.cancel(),
            44..47 => self.leases.clear(),
            47 if self.draw(2) == 0 => self.delete(),
            47 => self.hold(),
            48..50 => self.later(2_000_000_000),
            50 if self.draw(4) == 0 => self.cut_power(),
            _ => self.perform(),
        }
    }

    fn feed(&mut self, event: Event) {
        self.now.mono += 1000;
        self.now.unix_ns += 1000;
        let mut commands = Vec::new();
        self.machine.step(self.now, [event], &mut commands);
        for command in commands {
            let mark = format!("{command:?}").split(' ').next().map(str::to_owned);
            let hasher = KeyHasher::with_seed(self.trace);
            self.trace = hasher.hash_one((mark, self.now.mono));
            match command {
                Command::Complete { op, outcome } => self.completed(op, outcome),
                other => {
                    let buffer = self.lend(&other);
                    self.pending.push((other, buffer));
                }
            }
        }
    }

    fn later(&mut self, by: u64) {
        self.now.mono += by;
        self.feed(Event::Tick);
    }

    /// A chain of keys of one namespace: runs along one of few paths, so that chains share roots.
    fn chain(&mut self) -> (u32, Vec<(BlockKey, u32, Option<BlockKey>)>) {
        let ns = self.draw(2) as u32;
        let path = self.draw(3);
        let len = 1 + self.draw(KEYS / 4) as u32;
        let key = |depth: u32| {
            let mut bytes = [0; 32];
            // The first two blocks of every path are shared.
            bytes[0] = if depth < 2 { 0 } else { path as u8 + 1 };
            bytes[1] = depth as u8;
            // Neighbours lie on different drives.
            bytes[8] = depth as u8;
            bytes[9] = ns as u8;
            BlockKey(bytes)
        };
        let item = |d: u32| (key(d), d, d.checked_sub(1).map(key));
        (ns, (0..len).map(item).collect())
    }

    fn put(&mut self) {
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
        }
        let waits = self.draw(3) == 0;
        let op = self.call(Call::Put { keys, versions, ns, waits });
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
        let op = self.call(Call::Get { keys: keys.clone(), ns, buffers, asked });
        let deadline = self.now.mono + 1_000_000_000;
        let hold = self.holds.pop();
        self.feed(Event::Get { op, ns, keys, deadline, target, count: true, hold });
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

    /// Flips a bit in a payload, or where one may be: the last half of a segment has no headers.
    fn damage(&mut self) {
        let (disk, half) = (self.draw(2) as usize, DRIVE.segment_bytes / 2);
        let name = segment_name(self.draw(u64::from(DRIVE.segments)) as u32);
        let (at, bit) = (half + self.draw(half), 1 << self.draw(8));
        let files = self.disks[disk].list().expect("the simulated disk lists");
        if files.iter().any(|(file, _)| *file == name) {
            self.disks[disk].flip(&name, at, bit);
        }
    }

    fn hold(&mut self) {
        let (ns, chain) = self.chain();
        let keys: Vec<BlockKey> = chain.into_iter().map(|(key, _, _)| key).collect();
        if self.draw(3) == 0 {
            return self.feed(Event::Prefetch { ns, keys });
        }
        let op = self.call(Call::Hold);
        let expires = self.now.mono + 3_000_000_000;
        self.feed(Event::Hold { op, ns, keys, expires });
    }

    fn delete(&mut self) {
        let (ns, chain) = self.chain();
        let doomed = match self.draw(8) {
            0 => Doomed::StoredBefore(u64::MAX),
            1 => Doomed::StoredBefore(self.now.unix_ns.saturating_sub(200_000)),
            _ => Doomed::Keys(chain.into_iter().map(|(key, _, _)| key).collect()),
        };
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

    /// Performs one pending command, chosen by the seed; one in forty fails.
    fn perform(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let at = self.draw(self.pending.len() as u64) as usize;
        let (command, buffer) = self.pending.swap_remove(at);
        let fails = self.draw(40) == 0;
        let event = self.execute(command, buffer, fails);
        self.feed(event);
    }

    fn completed(&mut self, op: OpId, outcome: Outcome) {
        let call = self.calls.remove(&op).expect("a call completes once");
        let log = self.log_number();
        match (call, outcome) {
            (Call::Put { keys, versions, waits, .. }, Outcome::Put(statuses)) => {
                let several = keys.len() > 1;
                for ((key, version), status) in keys.into_iter().zip(versions).zip(statuses) {
                    if status == PutStatus::Stored && (waits || (self.staging && several)) {
                        self.oracle.stored_some_time(key, version, self.now.mono);
                    } else if status == PutStatus::Stored {
                        self.oracle.stored(key, version, log, self.now.mono);
                    }
                    if status == PutStatus::Stored && self.staging {
                        self.oracle.stored_durably(key);
                    }
                }
            }
            (Call::Get { keys, ns, asked, .. }, Outcome::Get(items)) => {
                for (key, item) in keys.into_iter().zip(items) {
                    match item.result {
                        Ok(resident) => self.leased(ns, key, resident, asked),
                        Err(reason) => self.missed(key, reason, asked),
                    }
                }
            }
            (Call::Get { keys, ns, buffers, asked }, Outcome::Into(items)) => {
                for ((key, item), mut buffer) in keys.into_iter().zip(items).zip(buffers) {
                    // Panics where the memory is still out: the call must not have ended then.
                    let bytes = buffer.bytes();
                    match item {
                        Ok(_) => {
                            let version = version_of(&self.layouts[ns as usize], &key, bytes);
                            self.oracle.returned(key, version, asked);
                        }
                        Err(reason) => self.missed(key, reason, asked),
                    }
                    if let Buffer::Slot(mut slot) = buffer {
                        slot.as_mut_slice().fill(CANARY);
                        self.idle[ns as usize].push(slot);
                    }
                }
            }
            (Call::Flush { keys, asked }, Outcome::Flush(report)) => {
                if report.all_durable() {
                    self.oracle.durable(keys, asked);
                }
            }
            (Call::Delete { ns, doomed, asked }, Outcome::Deleted(report)) => {
                if report.durable {
                    self.oracle.deleted(ns, &doomed, asked);
                }
            }
            (Call::Hold, Outcome::Held(id, _)) => self.holds.push(id),
            (Call::Scrub, Outcome::Scrubbed(_)) => {}
            (_, outcome) => panic!("another kind of outcome: {outcome:?}"),
        }
    }

    fn missed(&mut self, key: BlockKey, reason: MissReason, asked: u64) {
        let log = self.machine.log.since(0);
        self.oracle.missed(key, reason, &log, asked);
    }

    fn leased(&mut self, ns: u32, key: BlockKey, resident: Arc<Resident>, asked: u64) {
        let bytes: Vec<u8> =
            (0..resident.slabs()).flat_map(|s| resident.slab(s).to_vec()).collect();
        let version = version_of(&self.layouts[ns as usize], &key, &bytes);
        self.oracle.returned(key, version, asked);
        if self.draw(3) == 0 {
            self.leases.push((key, version, resident));
        }
        // A lease is never invalidated: what it showed it still shows.
        for (key, version, lease) in &self.leases {
            let bytes: Vec<u8> = (0..lease.slabs()).flat_map(|s| lease.slab(s).to_vec()).collect();
            assert_eq!(version_of(&self.layouts[key.0[9] as usize], key, &bytes), *version);
        }
    }

    fn cut_power(&mut self) {
        let log = self.machine.log.since(0);
        let seed = self.seed ^ self.now.mono;
        let coin = SeededEntropy::new(seed);
        self.leases.clear();
        self.holds.clear();
        self.pending.clear();
        self.calls.clear();
        // Those of the calls that the crash ended.
        for (idle, region) in self.idle.iter_mut().zip(&self.regions) {
            idle.clear();
            *idle = fresh_slots(region);
        }
        let crash = |disk: &MemDisk| disk.crash(|_| coin.next_u64().is_multiple_of(2));
        self.disks = self.disks.iter().map(crash).collect();
        let (machine, index) = boot(&self.disks, &self.layouts, self.staging, quota_of(self.seed));
        self.machine = machine;
        self.index = index;
        let index = &self.index;
        self.oracle.power_cut(&log, |key| {
            let full = FullKey { ns: u32::from(key.0[9]), key: *key };
            index.residency(&full).0.is_hit()
        });
    }

    /// Lets everything in flight end.
    pub(super) fn drain(&mut self) {
        self.leases.clear();
        let mut left = 100_000;
        for _ in 0..3 {
            while !self.pending.is_empty() {
                left -= 1;
                assert!(left > 0, "seed {}: the machine never comes to rest", self.seed);
                let (command, buffer) = self.pending.swap_remove(0);
                let event = self.execute(command, buffer, false);
                self.feed(event);
            }
            self.later(100_000_000_000);
        }
        // Gets that ended meanwhile may have taken leases.
        self.leases.clear();
        assert!(self.calls.is_empty(), "seed {}: a call never ended", self.seed);
        let idle: usize = self.idle.iter().map(Vec::len).sum();
        assert_eq!(idle, 2 * REGION_SLOTS, "seed {}: a slot was lost", self.seed);
        self.check_canaries();
    }
}

/// A machine on what the disk holds.
fn boot(
    disks: &[MemDisk],
    layouts: &[KvLayout],
    staging: bool,
    quota: Option<Quota>,
) -> (Machine, Arc<ReadIndex>) {
    let mut arena = ArenaConfig::new(MEMORY.segment_bytes * u64::from(MEMORY.segments));
    arena.huge_pages = false;
    let index = Arc::new(ReadIndex::new(1, staging));
    let mut machine = Machine::new(Parts {
        arena: Arena::new(arena).expect("a small arena"),
        index: index.clone(),
        freed: FreedSlots::default(),
        policy: Box::new(Lru::new()),
        limits: Limits {
            dirty_high_bytes: 96 << 10,
            dirty_low_bytes: 48 << 10,
            load_high_bytes: 64 << 10,
            held_high_bytes: 64 << 10,
            stall: 1_500_000_000,
            retry: 1_000_000_000,
            scrub_bytes_per_s: 8 << 10,
        },
        memory: MEMORY,
        staging,
        drives: disks.iter().map(|_| DriveParts { store: STORE, geometry: DRIVE }).collect(),
        journal_pages: JOURNAL_PAGES,
        hasher: KeyHasher::with_seed(2),
        log_entries: 1 << 20,
    });
    for (ns, layout) in layouts.iter().enumerate() {
        let id = NamespaceId([ns as u8 + 1; 32]);
        let number = machine.open_namespace(id, layout).expect("it fits");
        assert_eq!(number as usize, ns);
    }
    let mut events = Vec::new();
    let mut tombstones = Vec::new();
    let mut pages = 0;
    for (number, disk) in (0..).zip(disks) {
        events
            .extend(found_segments(disk, number, &DRIVE, None).expect("the simulated disk reads"));
        let (file, used) = open_journal(disk, JOURNAL_PAGES).expect("there is room");
        let (found, last) = read_journal(disk, file, used, &STORE).expect("reads");
        tombstones.extend(found);
        pages = last.max(pages);
    }
    events.push(Event::FoundTombstones { tombstones, pages });
    events.push(Event::Recovered { complete: true, tables_read: true });
    machine.recover(Now::default(), events);
    // What recovery brings back beyond it goes at once: nothing is leased or being written yet.
    let within = quota.is_none_or(|quota| machine.set_quota(0, quota) == Some(true));
    assert!(within, "a quota holds from the first write");
    (machine, index)
}
