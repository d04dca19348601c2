//! Opening: the directory's identity, its lock, recovery, memory, and the threads.

use crate::directory::{Drive, OpenFiles, open_drive};
use crate::driver::{Core, CoreParts};
use crate::event_file::EventFile;
use crate::found::{look_at_segments, recovery_threads};
use crate::index::{KeyHasher, ReadIndex};
use crate::io::IoBridge;
use crate::machine::{DriveId, Event, Geometry, Limits, Machine, Now, Parts};
use crate::policy;
use crate::record::Recorder;
use crate::resident::{FreedSlots, LeaseBudget};
use crate::seams::Seams;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tiered_kv_io::{
    Arena, ArenaConfig, EngineConfig, IoDone, Nanos, Running, UringConfig, WorkerPool, beside,
    choose_engine, memory_limit_bytes,
};
use tiered_kv_types::{CheckpointRows, Error, ErrorKind, PAGE_BYTES, Result, StoreConfig};

/// Default of T1 where the configuration names none.
const DEFAULT_DRAM_BYTES: u64 = 4 << 30;
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

/// Directories that could not be opened, with the reason: what they hold is misses.
pub(crate) type Lost = Vec<(PathBuf, Error)>;

/// Everything that `open` made.
pub(crate) struct Opened {
    pub(crate) core: Arc<Core>,
    pub(crate) drives: Vec<Drive>,
    pub(crate) lost: Lost,
    pub(crate) arena: Arc<Arena>,
    pub(crate) times: OpenTimes,
}

pub(crate) fn open(config: &StoreConfig, seams: &Seams) -> Result<Opened> {
    let begin = Instant::now();
    let (drives, lost) = open_drives(config, seams)?;
    let dram = config.dram_capacity.unwrap_or_else(|| default_dram(memory_limit_bytes()));
    let staging = config.has_no_dram();
    let memory = memory_geometry(if staging { config.staging_capacity } else { dram });
    let populate = Instant::now();
    let arena = open_arena(&memory, config)?;
    let populate_s = populate.elapsed().as_secs_f64();
    let hasher = KeyHasher::with_seed(seams.entropy.next_u64());
    let freed = FreedSlots::default();
    let index = Arc::new(ReadIndex::new(seams.entropy.next_u64(), staging, freed.clone()));
    let capacity = arena.capacity_bytes();
    let part = |fraction: f64| (capacity as f64 * fraction) as u64;
    let drive_bytes: u64 = drives.iter().map(Drive::slot_bytes).sum();
    let limits = Limits {
        dirty_high_bytes: part(config.dirty_high_fraction),
        load_high_bytes: config.max_load_bytes,
        held_high_bytes: (capacity + drive_bytes) / 2,
        dirty_low_bytes: part(config.dirty_low_fraction.min(config.dirty_high_fraction)),
        stall: nanos(config.drive_stall_s),
        retry: nanos(config.drive_retry_s),
        write_bytes_per_s: config.nvme_write_bytes_per_s,
        ahead_waste: config.ahead_waste,
        scrub_bytes_per_s: config.scrub_bytes_per_s,
    };
    let mut machine = Machine::new(Parts {
        arena: arena.clone(),
        index: index.clone(),
        freed: freed.clone(),
        policy: policy::of_config(config, capacity + drive_bytes, seams.entropy.next_u64()),
        limits,
        memory,
        staging,
        drives: drives.iter().map(Drive::parts).collect(),
        journal_pages: drives.iter().map(|d| d.journal_pages).min().unwrap_or(0),
        hasher: hasher.clone(),
        log_entries: config.event_log_entries,
    });
    let recovery = Instant::now();
    recover(&drives, lost.is_empty(), &mut machine, seams)?;
    policy::load(&drives, &mut machine);
    let recover_s = recovery.elapsed().as_secs_f64();
    let budget = LeaseBudget::new(part(config.max_leased_fraction), freed);
    let core = make_core(config, seams, machine, index, budget, &drives, hasher)?;
    for (number, drive) in drives.iter().enumerate() {
        start_engine(config, seams, &core, number, drive, &arena)?;
    }
    let weak = Arc::downgrade(&core);
    seams.threads.spawn("tkv-timer".into(), Box::new(move || Core::run_timer(&weak)))?;
    let total_s = begin.elapsed().as_secs_f64();
    Ok(Opened { core, drives, lost, arena, times: OpenTimes { total_s, populate_s, recover_s } })
}

pub(crate) fn check_origin() -> Result<()> {
    if !Running::in_parent() {
        return Ok(());
    }
    let context = "this process was forked while a store was open, whose locks it cannot use: fork \
                   before a store is opened or after it is closed, or start the process anew \
                   (multiprocessing's spawn)";
    Err(Error::new(ErrorKind::Unsupported, "open", context))
}

/// Seconds that the configuration has checked.
fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9) as Nanos
}

pub(crate) fn default_dram(limit: Option<u64>) -> u64 {
    limit.map_or(DEFAULT_DRAM_BYTES, |limit| (limit / 4).min(DEFAULT_DRAM_BYTES))
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
    arena.field = if config.has_no_dram() { "staging_capacity" } else { "dram_capacity" };
    Arena::new(arena)
}

fn make_core(
    config: &StoreConfig,
    seams: &Seams,
    machine: Machine,
    index: Arc<ReadIndex>,
    budget: Arc<LeaseBudget>,
    drives: &[Drive],
    hasher: KeyHasher,
) -> Result<Arc<Core>> {
    let copies = WorkerPool::new("tkv-copy", config.copy_threads, seams.threads.as_ref())?;
    let bridge =
        |(number, d): (DriveId, &Drive)| IoBridge::new(number, d.geometry.segment_bytes, d.journal);
    let io = (0..).zip(drives).map(bridge).collect();
    let events = config.event_file.as_deref().map(EventFile::open).transpose()?;
    let now = (seams.clock.now(), seams.clock.unix_nanos());
    let mut key = [0; 32];
    seams.entropy.fill(&mut key);
    let record = |path| Recorder::open(path, config.record_bytes, now, key, seams.threads.as_ref());
    let recorder = config.record.as_deref().map(record).transpose()?;
    Ok(Arc::new(Core::new(CoreParts {
        machine,
        index,
        budget,
        clock: seams.clock.clone(),
        io,
        copies,
        copy_threads: config.copy_threads,
        hasher,
        events,
        recorder,
    })))
}

fn start_engine(
    config: &StoreConfig,
    seams: &Seams,
    core: &Arc<Core>,
    number: usize,
    drive: &Drive,
    arena: &Arc<Arena>,
) -> Result<()> {
    let weak = Arc::downgrade(core);
    let on_done = Arc::new(move |done: IoDone| {
        if let Some(core) = weak.upgrade() {
            core.io[number].done(&weak, done);
        }
    });
    let wanted = EngineConfig {
        backend: config.io_backend,
        load_threads: config.load_threads,
        store_threads: config.store_threads,
        uring: UringConfig::default(),
    };
    let disk = drive.disk.clone();
    let (engine, reason) = choose_engine(&wanted, disk, arena, seams.threads.as_ref(), on_done)?;
    tracing::info!(reason, dir = %drive.path.display(), "I/O backend");
    core.io[number].set_engine(engine);
    Ok(())
}

/// Opens every drive that is there. With several drives, one that is missing or broken is lost, and
/// what it holds is misses; one that is in use or of another format is an error, as all of them are
/// where no drive is left.
fn open_drives(config: &StoreConfig, seams: &Seams) -> Result<(Vec<Drive>, Lost)> {
    let mut drives = Vec::new();
    let mut lost = Vec::new();
    let mut files = OpenFiles::of(config.nvme_paths.len());
    for (number, dir) in (0..).zip(&config.nvme_paths) {
        let opened = open_drive(config, seams, dir, number, &files);
        files.take(opened.as_ref().map_or(0, |drive| drive.geometry.segments));
        match opened {
            Ok(drive) => drives.push(drive),
            Err(err) => match err.kind() {
                ErrorKind::NotFound | ErrorKind::Permission | ErrorKind::Io => {
                    tracing::error!(dir = %dir.display(), %err, "a drive is lost");
                    lost.push((dir.clone(), err));
                }
                _ => return Err(err),
            },
        }
    }
    match lost.pop() {
        Some((_, err)) if drives.is_empty() => Err(err),
        Some(last) => {
            lost.push(last);
            Ok((drives, lost))
        }
        None => Ok((drives, lost)),
    }
}

/// Reads every drive's tables and journal and lets the machine decide what is believed.
pub(crate) fn recover(
    drives: &[Drive],
    complete: bool,
    machine: &mut Machine,
    seams: &Seams,
) -> Result<()> {
    let mut events = Vec::new();
    let mut tombstones = Vec::new();
    let mut pages = 0;
    let mut tables_read = true;
    let mut outdated = Vec::new();
    for (number, drive) in (0..).zip(drives) {
        let store = &drive.superblock.store;
        let bytes = drive.read_checkpoint()?;
        outdated.extend(bytes.is_some().then_some(drive));
        let checkpoint = bytes.and_then(|bytes| CheckpointRows::decode(store, bytes).valid());
        let (disk, threads) = (drive.disk.as_ref(), recovery_threads());
        let looked = look_at_segments(disk, number, &drive.geometry, checkpoint, threads)?;
        looked.remove_misfits(disk)?;
        tables_read &= looked.tables_read;
        events.extend(looked.found.into_iter().map(Event::Found));
        let found = drive.read_journal()?;
        tombstones.extend(found.0);
        pages = found.1.max(pages);
    }
    events.push(Event::FoundTombstones { tombstones, pages });
    events.push(Event::Recovered { complete, tables_read });
    let now = Now { mono: seams.clock.now(), unix_ns: seams.clock.unix_nanos() };
    // Nothing runs yet that could carry commands out; they follow with the first tick.
    let remove = || outdated.iter().try_for_each(|drive| drive.remove_checkpoint());
    beside(remove, || machine.recover(now, events))
}
