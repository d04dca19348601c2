//! A closed store, read without changing anything in it: recovery into a machine that nobody
//! drives.

use super::answers::{Question, Reply, append_unmet, read, unmet};
use crate::directory::SEGMENTS_MOST;
use crate::found::{Looked, look_at_segments, recovery_threads};
use crate::index::{KeyHasher, ReadIndex};
use crate::io::{JOURNAL, segment_number};
use crate::look::{checkpoint_in, journal_in, superblock_in};
use crate::machine::{DriveId, DriveParts, Event, Geometry, Limits, Machine, Now, Parts};
use crate::names::Names;
use crate::resident::FreedSlots;
use crate::seams::Seams;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tiered_kv_io::{Arena, ArenaConfig, DirLock, Disk, Nanos, ReadOnlyDisk};
use tiered_kv_policy::Lru;
use tiered_kv_types::{
    CheckpointRows, Error, ErrorKind, IoBackend, NamespaceId, PAGE_BYTES, Result, StoreConfig,
    Superblock, hex,
};

/// Memory of a store that is opened only to delete from it.
const SMALL_DRAM: u64 = 1 << 20;
/// More than is kept of a capacity for what is not a segment.
const KEPT_BYTES: u64 = 4 << 20;

/// What is known of a drive's checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointState {
    /// The store was closed, and the checkpoint says what it holds.
    Sound,
    /// There is one that is not believed: the header tables were read.
    Damaged,
    /// There is none, as after a crash: the header tables were read.
    Absent,
}

impl CheckpointState {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sound => "sound",
            Self::Damaged => "damaged",
            Self::Absent => "absent",
        }
    }
}

/// One directory of a closed store.
#[derive(Debug)]
pub struct ClosedDrive {
    /// The directory.
    pub path: PathBuf,
    /// Its identity, in hexadecimal.
    pub store_id: String,
    /// Its number in the configuration that made it.
    pub number: u32,
    /// Bytes of a segment file.
    pub segment_bytes: u64,
    /// Segment files.
    pub segments: usize,
    /// Files of segments that do not fit the store.
    pub misfits: Vec<String>,
    /// Its checkpoint.
    pub checkpoint: CheckpointState,
    /// Tombstones in its journal.
    pub tombstones: usize,
    /// Record headers that are neither empty nor sound, in the tables that were read.
    pub damaged_headers: u64,
    pub(super) geometry: Geometry,
    pub(super) superblock: Superblock,
}

/// A closed store that is only read.
pub struct ClosedStore {
    /// Its directories.
    pub drives: Vec<ClosedDrive>,
    /// Identities of directories that it has beside these, as far as it remembers.
    pub missing: Vec<String>,
    pub(super) disks: Vec<Arc<dyn Disk>>,
    /// Guards the machine, which nobody drives.
    pub(super) machine: Mutex<Machine>,
    names: Names,
    /// Guards the locks that keep owners out, until it is closed.
    locks: Mutex<Vec<DirLock>>,
}

impl std::fmt::Debug for ClosedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClosedStore").field("drives", &self.drives).finish_non_exhaustive()
    }
}

fn no_store(dir: &Path, why: &str) -> Error {
    let context = format!("{} {why}: name a directory of a store", dir.display());
    Error::new(ErrorKind::FormatMismatch, "operator", context)
}

fn check_dirs(dirs: &[PathBuf]) -> Result<()> {
    let bad = |context: String| Err(Error::new(ErrorKind::InvalidArgument, "operator", context));
    if dirs.is_empty() {
        return bad("no directory is named: name every directory of the store".to_owned());
    }
    for (at, dir) in dirs.iter().enumerate() {
        if dirs[..at].contains(dir) {
            return bad(format!("{} is named twice: name it once", dir.display()));
        }
    }
    Ok(())
}

impl ClosedStore {
    /// Reads the directories; as [`crate::Operator::read`].
    pub(super) fn open(dirs: &[PathBuf]) -> Result<Self> {
        let observe = |dir: &Path| {
            let disk = Arc::new(ReadOnlyDisk::open(dir)?) as Arc<dyn Disk>;
            let lock = DirLock::observe(dir)?;
            Ok((disk, lock))
        };
        Self::open_with(dirs, observe)
    }

    /// Reads the directories through disks and under locks of the caller's.
    pub(super) fn open_with(
        dirs: &[PathBuf],
        open: impl Fn(&Path) -> Result<(Arc<dyn Disk>, Option<DirLock>)>,
    ) -> Result<Self> {
        check_dirs(dirs)?;
        let mut locks = Vec::new();
        let (mut disks, mut drives, mut events) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tombstones, mut pages) = (Vec::new(), 0);
        for (number, dir) in (0..).zip(dirs) {
            // Before the lock: what is no store is left alone.
            let superblock = superblock_of(dir)?;
            let (disk, lock) = open(dir)?;
            locks.extend(lock);
            let (drive, found) = read_drive(dir, disk.as_ref(), number, superblock)?;
            events.extend(found.events);
            pages = pages.max(found.journal_pages);
            tombstones.extend(found.tombstones);
            disks.push(disk);
            drives.push(drive);
        }
        events.push(Event::FoundTombstones { tombstones, pages });
        events.push(Event::Recovered { complete: false, tables_read: false });
        let seams = Seams::default();
        let mut machine = idle_machine(&drives, &seams)?;
        let now = Now { mono: seams.clock.now(), unix_ns: seams.clock.unix_nanos() };
        machine.recover(now, events);
        let known = disks.iter().map(|disk| Names::drives_of(disk.as_ref()));
        let known = known.max_by_key(Vec::len).unwrap_or_default();
        let here = |id: &String| drives.iter().any(|drive| drive.store_id == *id);
        let missing = known.into_iter().filter(|id| !here(id)).collect();
        let names = Names::load(disks.clone(), Vec::new(), 0, &seams);
        let machine = Mutex::new(machine);
        Ok(Self { drives, missing, disks, machine, names, locks: Mutex::new(locks) })
    }

    /// Lets owners have the directories again.
    pub(super) fn close(&self) {
        self.locks.lock().clear();
    }

    /// Answers what only reads; `None` for the rest.
    pub(super) fn answer(&self, question: &Question) -> Option<Reply> {
        let with = |look: &mut dyn FnMut(&mut Machine)| look(&mut self.machine.lock());
        let mut reply = read(with, &self.names, question)?;
        if let (Reply::Namespaces(page), Question::Namespaces { from }) = (&mut reply, question) {
            let machine = self.machine.lock();
            let known = |id: &NamespaceId| machine.known_namespace(id).is_some();
            append_unmet(page, *from, machine.namespaces(), unmet(&self.names, known));
        }
        Some(reply)
    }
}

/// The superblock of a directory.
fn superblock_of(dir: &Path) -> Result<Superblock> {
    let disk = ReadOnlyDisk::open(dir)?;
    match superblock_in(&disk)? {
        Ok(superblock) => Ok(superblock),
        Err(why) => Err(no_store(dir, &why)),
    }
}

struct Found {
    events: Vec<Event>,
    tombstones: Vec<tiered_kv_types::Tombstone>,
    journal_pages: u64,
}

fn read_drive(
    dir: &Path,
    disk: &dyn Disk,
    number: DriveId,
    superblock: Superblock,
) -> Result<(ClosedDrive, Found)> {
    let numbers = disk.list()?.into_iter().filter_map(|(name, _)| segment_number(&name));
    let last = numbers.filter(|number| u64::from(*number) < SEGMENTS_MOST).max();
    let geometry = Geometry {
        segment_bytes: superblock.segment_bytes,
        segments: last.map_or(1, |last| last + 1),
        header_stride: superblock.header_stride,
    };
    let bytes = checkpoint_in(disk)?;
    let (store, is_there) = (&superblock.store, bytes.is_some());
    let checkpoint = bytes.and_then(|bytes| CheckpointRows::decode(store, bytes).valid());
    let Looked { found, misfits, tables_read } =
        look_at_segments(disk, number, &geometry, checkpoint, recovery_threads())?;
    let state = match (tables_read, is_there) {
        (false, _) => CheckpointState::Sound,
        (true, true) => CheckpointState::Damaged,
        (true, false) => CheckpointState::Absent,
    };
    let (tombstones, journal_pages) = journal_in(disk, JOURNAL, &superblock.store)?;
    let drive = ClosedDrive {
        path: dir.to_path_buf(),
        store_id: hex(&superblock.store),
        number: superblock.drive,
        segment_bytes: superblock.segment_bytes,
        segments: found.len(),
        misfits,
        checkpoint: state,
        tombstones: tombstones.len(),
        damaged_headers: found.iter().map(|segment| segment.damaged).sum(),
        geometry,
        superblock,
    };
    let events = found.into_iter().map(Event::Found).collect();
    Ok((drive, Found { events, tombstones, journal_pages }))
}

/// A machine that holds what recovery finds, and does nothing.
fn idle_machine(drives: &[ClosedDrive], seams: &Seams) -> Result<Machine> {
    let memory = Geometry { segment_bytes: PAGE_BYTES, segments: 8, header_stride: 0 };
    let mut arena = ArenaConfig::new(8 * PAGE_BYTES);
    arena.huge_pages = false;
    let hasher = KeyHasher::with_seed(seams.entropy.next_u64());
    let parts = |drive: &ClosedDrive| DriveParts {
        store: drive.superblock.store,
        geometry: drive.geometry,
    };
    Ok(Machine::new(Parts {
        arena: Arena::new(arena)?,
        index: Arc::new(ReadIndex::new(seams.entropy.next_u64(), false, FreedSlots::default())),
        freed: FreedSlots::default(),
        policy: Box::new(Lru::new()),
        limits: Limits {
            dirty_high_bytes: 0,
            dirty_low_bytes: 0,
            load_high_bytes: 0,
            held_high_bytes: 0,
            stall: Nanos::MAX,
            retry: Nanos::MAX,
            write_bytes_per_s: 0,
            ahead_waste: 0.0,
            scrub_bytes_per_s: 0,
        },
        memory,
        staging: false,
        drives: drives.iter().map(parts).collect(),
        journal_pages: 0,
        hasher,
        log_entries: 0,
    }))
}

/// The configuration with which a closed store is opened to delete from it. A directory that cannot
/// be read is left to the open, for which it is lost: its tombstones stay until it is back.
pub(super) fn config_of(dirs: &[PathBuf]) -> Result<StoreConfig> {
    check_dirs(dirs)?;
    let mut capacity = 0;
    let mut known = 0;
    let mut fault = None;
    for dir in dirs {
        let superblock = match superblock_of(dir) {
            Ok(superblock) => superblock,
            Err(err) if err.kind() == ErrorKind::FormatMismatch => return Err(err),
            Err(err) => {
                fault = Some(err);
                continue;
            }
        };
        let disk = ReadOnlyDisk::open(dir)?;
        let numbers = disk.list()?.into_iter().filter_map(|(name, _)| segment_number(&name));
        let segments = numbers.map(|number| u64::from(number) + 1).max().unwrap_or(1);
        let segments = segments.min(SEGMENTS_MOST);
        capacity = capacity.max(segments * superblock.segment_bytes + KEPT_BYTES);
        known = known.max(Names::drives_of(&disk).len());
    }
    if let (0, Some(fault)) = (capacity, fault) {
        return Err(fault);
    }
    if dirs.len() < known {
        let context = format!(
            "the store has {known} directories, of which {} are named: name all of them, so that a \
             delete reaches all",
            dirs.len()
        );
        return Err(Error::new(ErrorKind::InvalidArgument, "operator", context));
    }
    Ok(StoreConfig {
        dram_capacity: Some(SMALL_DRAM),
        nvme_paths: dirs.to_vec(),
        nvme_capacity: capacity,
        event_log_entries: 0,
        io_backend: IoBackend::Blocking,
        huge_pages: false,
        ..StoreConfig::default()
    })
}
