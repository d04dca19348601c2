//! A machine on two drives, opened as a store is and performed by hand in a fixed order.

use crate::directory::{Drive, OpenFiles, open_drive};
use crate::index::{FullKey, KeyHasher, ReadIndex};
use crate::io::{segment_name, verify};
use crate::log::LogEntry;
use crate::machine::{
    Command, Event, Geometry, GetTarget, Limits, LoadFault, Machine, Now, OpId, Outcome, Parts,
    PutItem,
};
use crate::open::recover;
use crate::resident::FreedSlots;
use crate::seams::Seams;
use crate::sim::world::{payload, version_of};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use tiered_kv_io::{Alignment, Arena, ArenaConfig, Disk, ManualClock, MemDisk, SeededEntropy};
use tiered_kv_policy::{BetaOptions, Predictor};
use tiered_kv_types::config::MIN_METADATA_BYTES;
use tiered_kv_types::{BlockKey, KvLayout, MissReason, NamespaceId, StoreConfig};

pub(in crate::sim) const DRIVES: usize = 2;
const SEGMENT: u64 = 32 << 10;
/// Three segments of 32 KiB on each drive, beside the journal's eight pages.
const CAPACITY: u64 = (64 << 10) + 8 * 4096 + 3 * SEGMENT;
const MEMORY: Geometry = Geometry { segment_bytes: SEGMENT, segments: 6, header_stride: 0 };
/// Far more commands than any call needs.
const MOST_STEPS: usize = 1000;

/// Which of the I/O commands in flight is performed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) enum Order {
    OldestFirst,
    NewestFirst,
}

pub(in crate::sim) type OnLog = Box<dyn FnMut(&LogEntry)>;

pub(in crate::sim) struct Bench {
    pub(in crate::sim) machine: Machine,
    index: Arc<ReadIndex>,
    drives: Vec<Drive>,
    /// Numbers of the two namespaces: blocks of one slab, blocks of two.
    pub(in crate::sim) ns: [u32; 2],
    layouts: [KvLayout; 2],
    now: Now,
    order: Order,
    copies: Vec<Command>,
    io: VecDeque<Command>,
    puts: BTreeMap<OpId, (usize, Vec<(BlockKey, u64)>)>,
    done: BTreeMap<OpId, Outcome>,
    next_op: u64,
    logged: u64,
    on_log: Option<OnLog>,
    /// Copies out of memory find other bytes than were stored.
    damaged: bool,
    /// Segments that were given to another size class.
    pub(in crate::sim) class_changes: usize,
}

/// An empty drive that writes single sectors.
pub(in crate::sim) fn blank() -> MemDisk {
    MemDisk::with_alignment(Alignment { memory: 1, offset: 512 })
}

pub(in crate::sim) fn layouts() -> [KvLayout; 2] {
    [
        KvLayout::uniform(16, 5000).expect("valid"),
        KvLayout::grid(16, 2, 1, vec![3000, 9000]).expect("valid"),
    ]
}

impl Bench {
    /// Opens what the disks hold, by the code that opens a store.
    pub(in crate::sim) fn open(disks: &[Arc<MemDisk>], unix_ns: u64, order: Order) -> Self {
        Self::open_with(disks, unix_ns, order, false)
    }

    /// The same, where `staging` without T1: a put ends when it is durable.
    pub(in crate::sim) fn open_with(
        disks: &[Arc<MemDisk>],
        unix_ns: u64,
        order: Order,
        staging: bool,
    ) -> Self {
        let paths = (0..DRIVES).map(|n| n.to_string().into());
        let config = StoreConfig {
            nvme_paths: paths.collect(),
            nvme_capacity: CAPACITY,
            segment_bytes: Some(SEGMENT),
            ..StoreConfig::default()
        };
        let all = disks.to_vec();
        let seams = Seams {
            clock: Arc::new(ManualClock::new(unix_ns)),
            entropy: Arc::new(SeededEntropy::new(unix_ns)),
            open_disk: Arc::new(move |path: &Path| {
                let number: usize = path.display().to_string().parse().expect("a number");
                Ok(all[number].clone() as Arc<dyn Disk>)
            }),
            lock_directory: false,
            ..Seams::default()
        };
        let open = |(number, path): (u16, &std::path::PathBuf)| {
            open_drive(&config, &seams, path, number, &OpenFiles::of(DRIVES)).expect("opens")
        };
        let drives: Vec<Drive> = (0..).zip(&config.nvme_paths).map(open).collect();
        let (mut machine, index) = machine(&drives, staging);
        recover(&drives, true, &mut machine, &seams).expect("reads");
        let layouts = layouts();
        let ns = [0, 1].map(|n| {
            let id = NamespaceId([n as u8 + 1; 32]);
            machine.open_namespace(id, &layouts[n]).expect("it fits")
        });
        Self {
            machine,
            index,
            drives,
            ns,
            layouts,
            now: Now { mono: 0, unix_ns },
            order,
            copies: Vec::new(),
            io: VecDeque::new(),
            puts: BTreeMap::new(),
            done: BTreeMap::new(),
            next_op: 1,
            logged: 0,
            on_log: None,
            damaged: false,
            class_changes: 0,
        }
    }

    pub(in crate::sim) fn on_log(&mut self, on_log: OnLog) {
        self.on_log = Some(on_log);
    }

    pub(in crate::sim) fn unix_ns(&self) -> u64 {
        self.now.unix_ns
    }

    fn feed(&mut self, event: Event) {
        self.now.mono += 1000;
        self.now.unix_ns += 1000;
        let mut commands = Vec::new();
        self.machine.step(self.now, [event], &mut commands);
        for entry in self.machine.log.since(self.logged) {
            self.logged = entry.seq + 1;
            if let Some(on_log) = &mut self.on_log {
                on_log(&entry);
            }
        }
        for command in commands {
            match command {
                Command::Complete { op, outcome } => drop(self.done.insert(op, outcome)),
                Command::CopyIn { .. } | Command::CopyOut { .. } => self.copies.push(command),
                io => self.io.push_back(io),
            }
        }
    }

    /// Performs one command, copies before I/O; says whether there was one.
    pub(in crate::sim) fn perform(&mut self) -> bool {
        let io = match self.order {
            Order::OldestFirst => VecDeque::pop_front,
            Order::NewestFirst => VecDeque::pop_back,
        };
        let Some(command) = self.copies.pop().or_else(|| io(&mut self.io)) else { return false };
        let event = self.execute(command);
        self.feed(event);
        true
    }

    /// Performs the I/O commands in flight for which `wanted` holds, and no others.
    pub(in crate::sim) fn perform_where(&mut self, wanted: impl Fn(&Command) -> bool) {
        let (now, later) = std::mem::take(&mut self.io).into_iter().partition(&wanted);
        self.io = later;
        let now: VecDeque<Command> = now;
        for command in now {
            let event = self.execute(command);
            self.feed(event);
        }
    }

    /// Makes a call of which nothing is performed yet.
    pub(in crate::sim) fn begin(&mut self, event: impl FnOnce(OpId) -> Event) {
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.feed(event(op));
    }

    /// Makes a call and performs commands until it has ended; others may be left in flight.
    pub(in crate::sim) fn call(&mut self, event: impl FnOnce(OpId) -> Event) -> Outcome {
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.feed(event(op));
        for _ in 0..MOST_STEPS {
            if let Some(outcome) = self.done.remove(&op) {
                return outcome;
            }
            assert!(self.perform(), "a call that waits for nothing");
        }
        panic!("a call that never ends: {:?}", self.io);
    }

    pub(in crate::sim) fn put(
        &mut self,
        ns: usize,
        items: Vec<PutItem>,
        versions: &[u64],
    ) -> Outcome {
        let contents = items.iter().map(|i| i.key).zip(versions.iter().copied());
        self.puts.insert(OpId(self.next_op), (ns, contents.collect()));
        let ns = self.ns[ns];
        self.call(|op| Event::Put { op, ns, items, deadline: u64::MAX, wait_until: 0 })
    }

    /// Lets everything in flight end, and what follows from a tick.
    pub(in crate::sim) fn settle(&mut self) {
        self.feed(Event::Tick);
        for _ in 0..MOST_STEPS {
            if !self.perform() {
                return;
            }
        }
        panic!("the machine never comes to rest: {:?}", self.io);
    }

    /// The version stored under a key, read as a caller would.
    pub(in crate::sim) fn get(&mut self, ns: usize, key: BlockKey) -> Result<u64, MissReason> {
        let full = FullKey { ns: self.ns[ns], key };
        if !self.index.residency(&full).0.is_hit() {
            return Err(MissReason::Absent);
        }
        let (number, keys, deadline) = (self.ns[ns], vec![key], u64::MAX);
        let outcome = self.call(|op| Event::Get {
            op,
            ns: number,
            keys,
            deadline,
            target: GetTarget::Leases,
            hold: None,
            recompute: None,
        });
        let Outcome::Get(mut items) = outcome else { panic!("a get ends as a get") };
        let lease = items.pop().expect("one key, one answer").result?;
        let bytes: Vec<u8> = (0..lease.slabs()).flat_map(|s| lease.slab(s).to_vec()).collect();
        Ok(version_of(&self.layouts[ns], &key, &bytes))
    }

    /// I/O commands in flight, in the order in which they came.
    pub(in crate::sim) fn in_flight(&self) -> impl Iterator<Item = &Command> {
        self.io.iter()
    }

    /// The generation of the copy in memory.
    pub(in crate::sim) fn generation(&self, ns: usize, key: BlockKey) -> u64 {
        self.index.pin(&FullKey { ns: self.ns[ns], key }).expect("in memory").generation()
    }

    /// A get into a caller's buffer of a copy in memory whose bytes no longer have their checksum.
    pub(in crate::sim) fn damaged_get(
        &mut self,
        ns: usize,
        key: BlockKey,
    ) -> Result<(), MissReason> {
        self.damaged = true;
        let ns = self.ns[ns];
        let outcome = self.call(|op| Event::Get {
            op,
            ns,
            keys: vec![key],
            deadline: u64::MAX,
            target: GetTarget::Buffers,
            hold: None,
            recompute: None,
        });
        self.damaged = false;
        let Outcome::Into(mut items) = outcome else { panic!("a get_into ends as one") };
        items.pop().expect("one key, one answer").map(drop)
    }

    /// Closes as a store does, leaving a checkpoint on each drive.
    pub(in crate::sim) fn close(mut self) {
        self.call(|op| Event::Close { op, deadline: u64::MAX });
        assert!(self.io.is_empty(), "a close ends when nothing is in flight");
        for (number, drive) in (0..).zip(&self.drives) {
            drive.write_checkpoint(&self.machine.checkpoint(number)).expect("written");
        }
    }

    fn execute(&mut self, command: Command) -> Event {
        match command {
            Command::CopyIn { op, item, into } => {
                let (ns, contents) = &self.puts[&op];
                let (key, version) = contents[item];
                let bytes = payload(&self.layouts[*ns], &key, version);
                Event::CopiedIn { op, item, filled: Some(into.fill_from(&bytes)) }
            }
            Command::CopyOut { op, item, from } => {
                let intact = Some(!self.damaged);
                Event::CopiedOut { op, item, intact, generation: from.generation() }
            }
            Command::Load { block, drive, reads, mut into, .. } => {
                let disk = &self.drives[usize::from(drive)].disk;
                let mut slots = into.take_slots();
                for (slot, read) in slots.iter_mut().zip(&reads) {
                    disk.read_at(read.file, read.offset, slot.as_mut_slice()).expect("reads");
                }
                let crcs: Vec<u32> = reads.iter().map(|r| r.crc).collect();
                let slots = slots.into_iter().map(Some).collect();
                let result = verify(into, slots, &[], &crcs).ok_or(LoadFault::Corrupt);
                Event::LoadDone { block, result }
            }
            write => self.write(write),
        }
    }

    fn write(&mut self, command: Command) -> Event {
        let disk_of = |drive: u16| &self.drives[usize::from(drive)].disk;
        match command {
            Command::PrepareSegment { drive, segment, file, image } => {
                let disk = disk_of(drive);
                self.class_changes += usize::from(file.is_some());
                let file = file.unwrap_or_else(|| {
                    disk.create(&segment_name(segment), SEGMENT).expect("there is room")
                });
                disk.write_at(file, 0, &image).expect("writes");
                disk.sync(file).expect("syncs");
                Event::SegmentReady { drive, segment, result: Ok(file) }
            }
            Command::WriteSlabs { group, block, drive, from, to } => {
                for (index, (file, offset)) in to.into_iter().enumerate() {
                    let slab = crate::resident::SlabWrite { resident: from.clone(), index };
                    let bytes = tiered_kv_io::ReadBuf::as_slice(&slab);
                    disk_of(drive).write_at(file, offset, bytes).expect("writes");
                }
                Event::SlabsWritten { group, block, ok: true }
            }
            Command::WriteHeaders { group, drive, writes } => {
                for write in writes {
                    let written = disk_of(drive).write_at(write.file, write.offset, &write.bytes);
                    written.expect("writes");
                }
                Event::HeadersWritten { group, drive, ok: true }
            }
            Command::Sync { group, drive, files } => {
                files.iter().for_each(|file| disk_of(drive).sync(*file).expect("syncs"));
                Event::Synced { group, drive, ok: true }
            }
            Command::WriteJournal { drive, page, bytes, zero } => {
                let journal = self.drives[usize::from(drive)].journal;
                disk_of(drive).write_at(journal, page * 4096, &bytes).expect("writes");
                disk_of(drive).sync(journal).expect("syncs");
                Event::JournalWritten { drive, zero, ok: true }
            }
            other => unreachable!("{other:?} writes nothing"),
        }
    }
}

fn machine(drives: &[Drive], staging: bool) -> (Machine, Arc<ReadIndex>) {
    let capacity = MEMORY.segment_bytes * u64::from(MEMORY.segments);
    let mut arena = ArenaConfig::new(capacity);
    arena.huge_pages = false;
    let index = Arc::new(ReadIndex::new(1, staging, FreedSlots::default()));
    let machine = Machine::new(Parts {
        arena: Arena::new(arena).expect("a small arena"),
        index: index.clone(),
        freed: FreedSlots::default(),
        policy: Box::new(Predictor::new(BetaOptions::DEFAULT, MIN_METADATA_BYTES, 1)),
        limits: Limits {
            dirty_high_bytes: capacity,
            dirty_low_bytes: capacity,
            load_high_bytes: capacity,
            held_high_bytes: capacity,
            stall: u64::MAX,
            retry: 1,
            write_bytes_per_s: 0,
            ahead_waste: 0.0,
            scrub_bytes_per_s: 0,
        },
        memory: MEMORY,
        staging,
        drives: drives.iter().map(Drive::parts).collect(),
        journal_pages: drives.iter().map(|d| d.journal_pages).min().expect("two drives"),
        hasher: KeyHasher::with_seed(2),
        log_entries: 1 << 12,
    });
    (machine, index)
}
