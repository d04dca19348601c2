//! Opening: the directory's identity, its lock, recovery, memory, and the threads.

use crate::driver::{Core, CoreParts};
use crate::index::{KeyHasher, ReadIndex};
use crate::io::{IoBridge, segment_name, segment_number};
use crate::machine::{DriveParts, Event, FoundSegment, Geometry, Limits, Machine, Now, Parts};
use crate::resident::{FreedSlots, LeaseBudget};
use crate::seams::Seams;
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tiered_kv_io::{
    AlignedBuf, Arena, ArenaConfig, BlockingEngine, DirLock, Disk, FileId, IoDone, Running,
    WorkerPool, memory_limit_bytes, open_files_limit,
};
use tiered_kv_policy::Lru;
use tiered_kv_types::record::{Decoded, RECORD_BYTES, SEGMENT_HEADER_BYTES, SUPERBLOCK_BYTES};
use tiered_kv_types::{
    Error, ErrorKind, FORMAT_VERSION, OnFormatMismatch, PAGE_BYTES, RecordHeader, Result,
    SegmentHeader, StoreConfig, Superblock, hex,
};

const SUPERBLOCK: &str = "superblock.tkv";
/// Kept free of the capacity for the superblock, the lock and the directory itself.
const DIRECTORY_BYTES: u64 = 64 << 10;
/// Default of T1 where the configuration names none.
const DEFAULT_DRAM_BYTES: u64 = 4 << 30;
/// Most segments of a drive: 16 TiB at 256 MiB each.
const MAX_SEGMENTS: u64 = 65_536;
/// Open files that are left to everything but segments.
const OTHER_FILES: u64 = 64;
const MIN_DRAM_SEGMENT: u64 = PAGE_BYTES;
const MAX_DRAM_SEGMENT: u64 = 256 << 20;

/// How long the parts of an open took, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpenTimes {
    /// All of it.
    pub total_s: f64,
    /// Populating and collapsing T1.
    pub populate_s: f64,
    /// Reading the header tables and rebuilding the index.
    pub recover_s: f64,
}

/// An opened drive.
pub(crate) struct Drive {
    pub(crate) disk: Arc<dyn Disk>,
    superblock: Superblock,
    geometry: Geometry,
    /// Guards the directory's lock, which ends with the close, however long the store object lives.
    lock: Mutex<Option<DirLock>>,
}

/// Everything that `open` made.
pub(crate) struct Opened {
    pub(crate) core: Arc<Core>,
    pub(crate) drive: Option<Drive>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) times: OpenTimes,
}

fn config_error(context: String) -> Error {
    Error::new(ErrorKind::Config, "open", context)
}

pub(crate) fn open(config: &StoreConfig, seams: &Seams) -> Result<Opened> {
    let begin = Instant::now();
    config.check()?;
    check_origin()?;
    let drive = config.nvme_paths.first().map(|dir| open_drive(config, seams, dir)).transpose()?;
    let dram = config.dram_capacity.unwrap_or_else(default_dram);
    let memory = memory_geometry(dram);
    let populate = Instant::now();
    let arena = open_arena(&memory, config)?;
    let populate_s = populate.elapsed().as_secs_f64();
    let hasher = KeyHasher::with_seed(seams.entropy.next_u64());
    let index = Arc::new(ReadIndex::new(seams.entropy.next_u64()));
    let capacity = arena.capacity_bytes();
    let part = |fraction: f64| (capacity as f64 * fraction) as u64;
    let limits = Limits {
        dirty_high_bytes: part(config.dirty_high_fraction),
        load_high_bytes: config.max_load_bytes,
    };
    let drive_parts =
        drive.as_ref().map(|d| DriveParts { store: d.superblock.store, geometry: d.geometry });
    let mut machine = Machine::new(Parts {
        arena: arena.clone(),
        index: index.clone(),
        freed: FreedSlots::default(),
        policy: Box::new(Lru::new()),
        limits,
        memory,
        drive: drive_parts,
        hasher: hasher.clone(),
        log_entries: config.event_log_entries,
    });
    let recover = Instant::now();
    if let Some(drive) = &drive {
        recover_drive(drive, &mut machine, seams)?;
    }
    let recover_s = recover.elapsed().as_secs_f64();
    let budget = LeaseBudget::new(part(config.max_leased_fraction));
    let core = start(config, seams, machine, index, budget, drive.as_ref(), hasher)?;
    let total_s = begin.elapsed().as_secs_f64();
    Ok(Opened { core, drive, arena, times: OpenTimes { total_s, populate_s, recover_s } })
}

fn check_origin() -> Result<()> {
    if !Running::in_parent() {
        return Ok(());
    }
    let context = "this process was forked while a store was open, whose locks it cannot use: fork \
                   before a store is opened or after it is closed, or start the process anew \
                   (multiprocessing's spawn)";
    Err(Error::new(ErrorKind::Unsupported, "open", context))
}

fn default_dram() -> u64 {
    memory_limit_bytes().map_or(DEFAULT_DRAM_BYTES, |limit| (limit / 4).min(DEFAULT_DRAM_BYTES))
}

fn memory_geometry(capacity: u64) -> Geometry {
    let pages = |bytes: u64| bytes / PAGE_BYTES * PAGE_BYTES;
    let segment_bytes = pages(capacity / 8).clamp(MIN_DRAM_SEGMENT, MAX_DRAM_SEGMENT);
    let segments = u32::try_from(capacity / segment_bytes).unwrap_or(u32::MAX);
    Geometry { segment_bytes, segments, header_stride: 0 }
}

fn open_arena(memory: &Geometry, config: &StoreConfig) -> Result<Arc<Arena>> {
    // An extent holds whole segments, so that no slot lies across two extents.
    let extent = (ArenaConfig::EXTENT_BYTES / memory.segment_bytes) * memory.segment_bytes;
    let capacity = memory.segment_bytes * u64::from(memory.segments);
    let mut arena = ArenaConfig::new(capacity);
    arena.extent_bytes = extent;
    arena.huge_pages = config.huge_pages;
    Arena::new(arena)
}

fn start(
    config: &StoreConfig,
    seams: &Seams,
    machine: Machine,
    index: Arc<ReadIndex>,
    budget: Arc<LeaseBudget>,
    drive: Option<&Drive>,
    hasher: KeyHasher,
) -> Result<Arc<Core>> {
    let threads = seams.threads.as_ref();
    let copies = WorkerPool::new("tkv-copy", config.copy_threads, threads)?;
    let io = drive.map(|d| IoBridge::new(d.geometry.segment_bytes));
    let core = Arc::new(Core::new(CoreParts {
        machine,
        index,
        budget,
        clock: seams.clock.clone(),
        io,
        copies,
        copy_threads: config.copy_threads,
        hasher,
    }));
    if let (Some(drive), Some(io)) = (drive, &core.io) {
        let weak = Arc::downgrade(&core);
        let on_done = Arc::new(move |done: IoDone| {
            if let Some(core) = weak.upgrade()
                && let Some(io) = &core.io
            {
                io.done(&weak, done);
            }
        });
        let disk = drive.disk.clone();
        let (loads, stores) = (config.load_threads, config.store_threads);
        io.set_engine(Box::new(BlockingEngine::new(disk, threads, loads, stores, on_done)?));
    }
    let weak = Arc::downgrade(&core);
    seams.threads.spawn("tkv-timer".into(), Box::new(move || Core::run_timer(&weak)))?;
    Ok(core)
}

fn open_drive(config: &StoreConfig, seams: &Seams, dir: &Path) -> Result<Drive> {
    // The lock first: opening the files clears what a crash left half written.
    let lock = seams.lock_directory.then(|| DirLock::acquire(dir)).transpose()?;
    let disk = (seams.open_disk)(dir)?;
    let stride = u32::try_from(RECORD_BYTES).expect("512").max(disk.alignment().offset);
    let found = disk.read_file(SUPERBLOCK, SUPERBLOCK_BYTES as u64)?;
    let mismatch = match found.as_deref().map(Superblock::decode) {
        Some(Decoded::Valid(superblock)) => {
            let usable = superblock.segment_bytes >= 2 * PAGE_BYTES
                && superblock.segment_bytes.is_multiple_of(PAGE_BYTES)
                && superblock.header_stride >= stride;
            if usable {
                let geometry = geometry_of(config, &superblock)?;
                return Ok(Drive { disk, superblock, geometry, lock: Mutex::new(lock) });
            }
            "has a superblock whose sizes do not fit this machine's devices".to_owned()
        }
        Some(Decoded::OtherVersion(version)) => format!(
            "was written by format version {version}; this program reads version {FORMAT_VERSION}"
        ),
        Some(Decoded::Empty | Decoded::Damaged) => "has a damaged superblock".to_owned(),
        None => {
            refuse_strangers(disk.as_ref(), dir)?;
            return create_drive(config, seams, disk, stride, lock);
        }
    };
    if config.on_format_mismatch == OnFormatMismatch::Reset {
        tracing::warn!(dir = %dir.display(), "the directory {mismatch}: it is reset");
        return create_drive(config, seams, disk, stride, lock);
    }
    Err(Error::new(
        ErrorKind::FormatMismatch,
        "open",
        format!(
            "`nvme_paths`: {} {mismatch}; set on_format_mismatch = \"reset\" to drop what \
             is in it, or name another directory",
            dir.display()
        ),
    ))
}

/// A directory without a superblock is taken only if it holds nothing of somebody else's.
fn refuse_strangers(disk: &dyn Disk, dir: &Path) -> Result<()> {
    let ours = |name: &str| name == "LOCK" || segment_number(name).is_some();
    match disk.list()?.into_iter().find(|(name, _)| !ours(name)) {
        None => Ok(()),
        Some((name, _)) => Err(Error::new(
            ErrorKind::FormatMismatch,
            "open",
            format!(
                "`nvme_paths`: {} is not a store and holds other files ({name}); name an empty \
                 or a new directory",
                dir.display()
            ),
        )),
    }
}

fn create_drive(
    config: &StoreConfig,
    seams: &Seams,
    disk: Arc<dyn Disk>,
    header_stride: u32,
    lock: Option<DirLock>,
) -> Result<Drive> {
    let mut store = [0; 16];
    seams.entropy.fill(&mut store);
    let superblock = Superblock {
        store,
        drive: 0,
        segment_bytes: config.segment_bytes_for(config.nvme_capacity),
        header_stride,
        created_unix_ns: seams.clock.unix_nanos(),
    };
    // Refused before anything is changed, so that a corrected configuration finds no leftovers.
    let geometry = geometry_of(config, &superblock)?;
    for (name, _) in disk.list()? {
        if segment_number(&name).is_some() {
            disk.remove(&name)?;
        }
    }
    disk.write_file(SUPERBLOCK, &superblock.encode())?;
    Ok(Drive { disk, superblock, geometry, lock: Mutex::new(lock) })
}

fn geometry_of(config: &StoreConfig, superblock: &Superblock) -> Result<Geometry> {
    let segment_bytes = superblock.segment_bytes;
    if config.segment_bytes.is_some_and(|asked| asked != segment_bytes) {
        return Err(config_error(format!(
            "`segment_bytes` differs from the {segment_bytes} that the directory was made with: \
             leave the field out, or name a new directory"
        )));
    }
    let usable = config.nvme_capacity.saturating_sub(DIRECTORY_BYTES);
    let segments = u32::try_from(usable / segment_bytes).unwrap_or(u32::MAX);
    if segments == 0 {
        return Err(config_error(format!(
            "`nvme_capacity` of {} is smaller than one segment of the directory, {segment_bytes} \
             bytes: give more",
            config.nvme_capacity
        )));
    }
    check_segments(segments)?;
    Ok(Geometry { segment_bytes, segments, header_stride: superblock.header_stride })
}

/// Every segment is a file that stays open: what cannot be had then is refused now.
fn check_segments(segments: u32) -> Result<()> {
    let files = open_files_limit().map_or(MAX_SEGMENTS, |limit| limit.saturating_sub(OTHER_FILES));
    if u64::from(segments) <= files.min(MAX_SEGMENTS) {
        return Ok(());
    }
    Err(config_error(format!(
        "`nvme_capacity` is cut into {segments} segment files, of which this process may keep \
         {files} open, and {MAX_SEGMENTS} at most: raise its limit of open files (`ulimit -n`), \
         give less, or make a new directory with larger `segment_bytes`"
    )))
}

/// Reads every segment's header table and lets the machine decide what is believed.
fn recover_drive(drive: &Drive, machine: &mut Machine, seams: &Seams) -> Result<()> {
    let events = found_segments(drive.disk.as_ref(), &drive.geometry)?;
    let now = Now { mono: seams.clock.now(), unix_ns: seams.clock.unix_nanos() };
    let mut commands = Vec::new();
    machine.step(now, events, &mut commands);
    debug_assert!(commands.is_empty(), "recovery asks for nothing");
    Ok(())
}

/// What recovery tells the machine of a directory.
pub(crate) fn found_segments(disk: &dyn Disk, geometry: &Geometry) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    for (name, _) in disk.list()? {
        let Some(segment) = segment_number(&name) else { continue };
        let (file, bytes) = disk.open(&name)?;
        if segment >= geometry.segments || bytes != geometry.segment_bytes {
            // Beyond the capacity, or cut short by somebody: its space is given back.
            tracing::warn!(name, bytes, "a segment file does not fit the store: removed");
            disk.remove(&name)?;
            continue;
        }
        events.push(Event::Found(read_segment(disk, geometry, segment, file)));
    }
    events.push(Event::Recovered);
    Ok(events)
}

fn read_segment(disk: &dyn Disk, geometry: &Geometry, segment: u32, file: FileId) -> FoundSegment {
    let mut found = FoundSegment { segment, file, header: None, records: Vec::new(), damaged: 0 };
    let read = |offset: u64, len: usize| -> Result<AlignedBuf> {
        let mut buf = AlignedBuf::new(len)?;
        let fault = |e| Error::from_io("open", segment_name(segment), e);
        disk.read_at(file, offset, buf.as_mut_slice()).map_err(fault)?;
        Ok(buf)
    };
    let page = read(0, SEGMENT_HEADER_BYTES);
    let header = match page.as_ref().map(|page| SegmentHeader::decode(page.as_slice())) {
        Ok(Decoded::Valid(header)) => header,
        Ok(Decoded::Empty) => return found,
        Ok(_) | Err(_) => {
            found.damaged = 1;
            return found;
        }
    };
    let table = header.data_offset.saturating_sub(PAGE_BYTES);
    let table = table.min(geometry.segment_bytes - PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES;
    match read(PAGE_BYTES, usize::try_from(table).expect("a table fits in memory")) {
        Ok(buf) => {
            for (slot, bytes) in
                buf.as_slice().chunks_exact(geometry.header_stride as usize).enumerate()
            {
                let slot = u32::try_from(slot).expect("a table has fewer than 2^32 entries");
                match RecordHeader::decode(bytes) {
                    Decoded::Valid(record) => found.records.push((slot, record)),
                    Decoded::Empty => {}
                    _ => found.damaged += 1,
                }
            }
        }
        Err(_) => found.damaged += 1,
    }
    found.header = Some(header);
    found
}

impl Drive {
    /// Lets another store have the directory; nothing is in flight any more.
    pub(crate) fn unlock(&self) {
        drop(self.lock.lock().take());
    }

    /// The store's random identity, in hexadecimal.
    pub(crate) fn store_id(&self) -> String {
        hex(&self.superblock.store)
    }
}
