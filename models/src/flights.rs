//! The state machine between callers and an engine: one load for all waiters, given up only when
//! nobody waits.

use crate::cancel::CancelFlag;
use crate::index::{FullKey, KeyHasher, ReadIndex};
use crate::machine::{
    Command, DriveParts, Event, FoundSegment, Geometry, GetTarget, Limits, LoadFault, Machine, Now,
    OpId, Outcome, Parts, Records,
};
use crate::memory::{Arena, FileId, crc32c};
use crate::resident::{Filling, FreedSlots};
use crate::sync::{Arc, Condvar, Mutex};
use loom::thread;
use tiered_kv_policy::Lru;
use tiered_kv_types::{
    BlockInfo, BlockKey, KvLayout, MissReason, NamespaceId, RecordHeader, SegmentHeader, Tier,
};

const STORE: [u8; 16] = [1; 16];
const NAMESPACE: NamespaceId = NamespaceId([1; 32]);
const KEY: BlockKey = BlockKey([7; 32]);
const FULL: FullKey = FullKey { ns: 0, key: KEY };
const PAYLOAD: [u8; 8] = *b"verified";
const SEGMENT: u64 = 64 << 10;
const FIRST: OpId = OpId(1);
const SECOND: OpId = OpId(2);

/// What the engine has to do and what the callers were told.
#[derive(Debug, Default)]
struct Work {
    load: Option<(u32, Filling, CancelFlag)>,
    /// A load was begun and its end is not told yet.
    loading: bool,
    loads: u32,
    ended: Vec<(OpId, Outcome)>,
}

struct Driver {
    machine: Mutex<Machine>,
    index: Arc<ReadIndex>,
    arena: Arena,
    work: Mutex<Work>,
    changed: Condvar,
}

/// A store whose only block is on its drive, and two slots of memory.
fn machine(arena: &Arena, index: &Arc<ReadIndex>) -> Machine {
    let drive = Geometry { segment_bytes: SEGMENT, segments: 1, header_stride: 512 };
    let mut machine = Machine::new(Parts {
        arena: Arc::new(arena.clone()),
        index: index.clone(),
        freed: FreedSlots::default(),
        policy: Box::new(Lru::new()),
        limits: Limits {
            dirty_high_bytes: SEGMENT,
            dirty_low_bytes: SEGMENT,
            load_high_bytes: SEGMENT,
            held_high_bytes: SEGMENT,
            stall: u64::MAX / 2,
            retry: u64::MAX / 2,
            write_bytes_per_s: 0,
            ahead_waste: 0.0,
            scrub_bytes_per_s: 0,
        },
        memory: Geometry { segment_bytes: 8192, segments: 1, header_stride: 0 },
        staging: false,
        drives: vec![DriveParts { store: STORE, geometry: drive }],
        journal_pages: 8,
        hasher: KeyHasher::with_seed(2),
        log_entries: 0,
    });
    let layout = KvLayout::uniform(16, PAYLOAD.len() as u64).expect("valid");
    machine.open_namespace(NAMESPACE, &layout).expect("it fits");
    let (slots, data_offset) = drive.cut(4096);
    let header = SegmentHeader {
        store: STORE,
        segment: 0,
        class_epoch: 1,
        slot_bytes: 4096,
        slots,
        header_stride: 512,
        segment_bytes: SEGMENT,
        data_offset,
    };
    let record = RecordHeader {
        store: STORE,
        namespace: NAMESPACE,
        key: KEY,
        parent: None,
        segment: 0,
        slot: 0,
        class_epoch: 1,
        info: BlockInfo::default(),
        coordinate: (0, 0),
        slab: 0,
        parts: 1,
        put_id: 1,
        generation: 1,
        stored_unix_ns: 1,
        payload_bytes: PAYLOAD.len() as u64,
        checksum: crc32c(&PAYLOAD),
        tenant: [0; 16],
    };
    let found = Event::Found(FoundSegment {
        drive: 0,
        segment: 0,
        file: FileId(0),
        header: Some(header),
        records: Records::Table(vec![(0, record)]),
        damaged: 0,
        unread: false,
    });
    let recovered = Event::Recovered { complete: true, tables_read: true };
    machine.step(Now::default(), [found, recovered], &mut Vec::new());
    machine
}

impl Driver {
    fn new() -> Arc<Self> {
        let (arena, index) =
            (Arena::new(2), Arc::new(ReadIndex::new(1, false, FreedSlots::default())));
        let machine = Mutex::new(machine(&arena, &index));
        assert!(index.residency(&FULL).0.is_hit(), "recovered");
        let work = Mutex::new(Work::default());
        Arc::new(Self { machine, index, arena, work, changed: Condvar::new() })
    }

    /// As the store's driver: one step under the lock, its commands after it.
    fn step(&self, event: Event) {
        let mut commands = Vec::new();
        let mut machine = self.machine.lock();
        machine.step(Now::default(), [event], &mut commands);
        drop(machine);
        for command in commands {
            let mut work = self.work.lock();
            match command {
                Command::Load { block, into, cancel, .. } => {
                    assert!(!work.loading, "two loads of one block at once");
                    (work.loading, work.loads) = (true, work.loads + 1);
                    work.load = Some((block, into, cancel));
                }
                Command::Complete { op, outcome } => work.ended.push((op, outcome)),
                // Nothing else happens to a block that is read.
                other => panic!("{other:?}"),
            }
            self.changed.notify_all();
        }
    }

    fn get(&self, op: OpId) {
        assert!(self.index.residency(&FULL).0.is_hit(), "a durable block is always to be had");
        let (keys, target) = (vec![KEY], GetTarget::Leases);
        let deadline = u64::MAX;
        let (hold, recompute) = (None, None);
        self.step(Event::Get { op, ns: 0, keys, deadline, target, hold, recompute });
    }

    /// The engine's thread, until both calls have ended and it has nothing to do.
    fn serve(&self) {
        loop {
            let mut work = self.work.lock();
            while work.load.is_none() && (work.loading || work.ended.len() < 2) {
                self.changed.wait(&mut work);
            }
            let Some((block, mut into, cancel)) = work.load.take() else { return };
            drop(work);
            let mut slots = into.take_slots();
            let result = if cancel.is_set() {
                drop(slots);
                drop(into);
                Err(LoadFault::Cancelled)
            } else {
                slots[0].as_mut_slice()[..PAYLOAD.len()].copy_from_slice(&PAYLOAD);
                into.restore_slots(slots);
                Ok(into.fill_in_place())
            };
            self.work.lock().loading = false;
            self.step(Event::LoadDone { block, result });
        }
    }

    /// How a call ended, and that it did.
    fn ended(&self, op: OpId) -> Result<(), MissReason> {
        let mut work = self.work.lock();
        let at = work.ended.iter().position(|(ended, _)| *ended == op).expect("every call ends");
        let (_, Outcome::Get(items)) = work.ended.swap_remove(at) else { panic!("a get") };
        let resident = items.into_iter().next().expect("one key").result?;
        assert_eq!(resident.slab(0), PAYLOAD);
        Ok(())
    }

    fn check(&self) {
        let mut machine = self.machine.lock();
        assert_eq!(machine.audit().faults, Vec::<String>::new());
        let resident = self.index.pin(&FULL).map_or(0, |_| 4096);
        assert_eq!(self.arena.taken_bytes(), resident, "slots of loads that were dropped are free");
    }
}

pub(crate) fn joined() {
    let driver = Driver::new();
    let callers = [FIRST, SECOND].map(|op| {
        let driver = driver.clone();
        thread::spawn(move || driver.get(op))
    });
    driver.serve();
    callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
    assert_eq!(driver.work.lock().loads, 1, "one load for both");
    assert_eq!((driver.ended(FIRST), driver.ended(SECOND)), (Ok(()), Ok(())));
    driver.check();
}

pub(crate) fn given_up() {
    let driver = Driver::new();
    let stays = {
        let driver = driver.clone();
        thread::spawn(move || driver.get(SECOND))
    };
    let leaves = {
        let driver = driver.clone();
        thread::spawn(move || {
            driver.get(FIRST);
            driver.step(Event::Cancel { op: FIRST });
        })
    };
    driver.serve();
    stays.join().expect("no panic");
    leaves.join().expect("no panic");
    assert_eq!(driver.ended(SECOND), Ok(()), "who waits is served");
    let first = driver.ended(FIRST);
    assert!(matches!(first, Ok(()) | Err(MissReason::Cancelled)), "{first:?}");
    driver.check();
}
