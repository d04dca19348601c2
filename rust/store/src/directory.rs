//! One drive's directory: identity, lock, and what recovery reads from it.

use crate::io::{JOURNAL, segment_number};
use crate::machine::{DriveId, DriveParts, Geometry};
use crate::names::{self, NAMES};
use crate::policy::{self, LEARNED};
use crate::seams::Seams;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tiered_kv_io::{AlignedBuf, DirLock, Disk, FileId, open_files_limit};
use tiered_kv_types::checkpoint::MAX_CHECKPOINT_BYTES;
use tiered_kv_types::record::{Decoded, RECORD_BYTES, SUPERBLOCK_BYTES};
use tiered_kv_types::tombstone::{JOURNAL_PAGE_BYTES, decode_page};
use tiered_kv_types::{
    Checkpoint, Error, ErrorKind, FORMAT_VERSION, OnFormatMismatch, PAGE_BYTES, Result,
    StoreConfig, Superblock, Tombstone, hex,
};

pub(crate) const CHECKPOINT: &str = "checkpoint.tkv";
pub(crate) const SUPERBLOCK: &str = "superblock.tkv";
/// What the self-test writes and removes again.
const SELF_TEST: &str = "selftest.tkv";
/// Kept free of the capacity for the superblock, the lock and the directory itself.
const DIRECTORY_BYTES: u64 = 64 << 10;
/// Most segments of a drive: 16 TiB at 256 MiB each.
pub(crate) const SEGMENTS_MOST: u64 = 65_536;
/// Open files that are left to everything but segments, and those of a drive beside them.
const OTHER_FILES: u64 = 56;
const FILES_A_DRIVE: u64 = 8;
/// Pages of the journal: a 64th of the capacity within these bounds.
const MIN_JOURNAL_PAGES: u64 = 8;
pub(crate) const MAX_JOURNAL_PAGES: u64 = 256;

/// An opened drive.
pub(crate) struct Drive {
    pub(crate) path: PathBuf,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) superblock: Superblock,
    pub(crate) geometry: Geometry,
    pub(crate) journal: FileId,
    pub(crate) journal_pages: u64,
    /// Guards the directory's lock, which ends with the close, however long the store object lives.
    lock: Mutex<Option<DirLock>>,
}

/// Segment files that this process may still open: every one of every drive stays open.
pub(crate) struct OpenFiles {
    left: u64,
    /// Drives that are still to be opened.
    drives: u64,
}

impl OpenFiles {
    /// What the process' limit leaves to this many drives.
    pub(crate) fn of(drives: usize) -> Self {
        let drives = drives as u64;
        let most = SEGMENTS_MOST.saturating_mul(drives);
        let others = OTHER_FILES + drives * FILES_A_DRIVE;
        let left = open_files_limit().map_or(most, |limit| limit.saturating_sub(others));
        Self { left, drives }
    }

    /// What a new drive may take, so that as much is left for each of those behind it.
    fn share(&self) -> u64 {
        self.left / self.drives.max(1)
    }

    /// Books an opened drive, or one that is lost.
    pub(crate) fn take(&mut self, segments: u32) {
        self.left = self.left.saturating_sub(segments.into());
        self.drives = self.drives.saturating_sub(1);
    }
}

fn config_error(context: String) -> Error {
    Error::new(ErrorKind::Config, "open", context)
}

pub(crate) fn open_drive(
    config: &StoreConfig,
    seams: &Seams,
    dir: &Path,
    number: DriveId,
    files: &OpenFiles,
) -> Result<Drive> {
    // The lock first: opening the files clears what a crash left half written.
    let lock = seams.lock_directory.then(|| DirLock::acquire(dir)).transpose()?;
    let disk = (seams.open_disk)(dir)?;
    let stride = u32::try_from(RECORD_BYTES).expect("512").max(disk.alignment().offset);
    let found = match disk.read_file(SUPERBLOCK, SUPERBLOCK_BYTES as u64) {
        // Longer than any superblock: not empty and not sound.
        Err(err) if err.kind() == ErrorKind::FormatMismatch => Some(vec![0xff]),
        other => other?,
    };
    let mismatch = match found.as_deref().map(Superblock::decode) {
        Some(Decoded::Valid(superblock)) => {
            let usable = superblock.segment_bytes >= 2 * PAGE_BYTES
                && superblock.segment_bytes.is_multiple_of(PAGE_BYTES)
                && superblock.header_stride >= stride;
            if usable {
                let geometry = geometry_of(config, &superblock, files.left)?;
                return with_geometry(config, dir, disk, (superblock, geometry), lock);
            }
            "has a superblock whose sizes do not fit this machine's devices".to_owned()
        }
        Some(Decoded::OtherVersion(version)) => format!(
            "was written by format version {version}; this program reads version {FORMAT_VERSION}"
        ),
        Some(Decoded::Empty | Decoded::Damaged) => "has a damaged superblock".to_owned(),
        None => {
            refuse_strangers(disk.as_ref(), dir)?;
            return create_drive(config, seams, (dir, disk), (number, stride), lock, files);
        }
    };
    if config.on_format_mismatch == OnFormatMismatch::Reset {
        tracing::warn!(dir = %dir.display(), "the directory {mismatch}: it is reset");
        return create_drive(config, seams, (dir, disk), (number, stride), lock, files);
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
    let ours = |name: &str| {
        name == "LOCK"
            || [JOURNAL, CHECKPOINT, NAMES, LEARNED, SELF_TEST].contains(&name)
            || segment_number(name).is_some()
    };
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
    (dir, disk): (&Path, Arc<dyn Disk>),
    (drive, header_stride): (DriveId, u32),
    lock: Option<DirLock>,
    files: &OpenFiles,
) -> Result<Drive> {
    let mut store = [0; 16];
    seams.entropy.fill(&mut store);
    let superblock = Superblock {
        store,
        drive: u32::from(drive),
        segment_bytes: config.segment_bytes_for(config.nvme_capacity),
        header_stride,
        created_unix_ns: seams.clock.unix_nanos(),
    };
    // Refused before anything is changed, so that a corrected configuration finds no leftovers.
    let geometry = geometry_of(config, &superblock, files.share())?;
    for (name, _) in disk.list()? {
        let kept = [JOURNAL, CHECKPOINT, NAMES, LEARNED].contains(&&*name);
        if segment_number(&name).is_some() || kept {
            disk.remove(&name)?;
        }
    }
    disk.write_file(SUPERBLOCK, &superblock.encode())?;
    with_geometry(config, dir, disk, (superblock, geometry), lock)
}

fn with_geometry(
    config: &StoreConfig,
    dir: &Path,
    disk: Arc<dyn Disk>,
    (superblock, geometry): (Superblock, Geometry),
    lock: Option<DirLock>,
) -> Result<Drive> {
    self_test(disk.as_ref(), &superblock.store)?;
    let (journal, journal_pages) =
        open_journal(disk.as_ref(), journal_pages(config.nvme_capacity))?;
    let lock = Mutex::new(lock);
    Ok(Drive { path: dir.to_path_buf(), disk, superblock, geometry, journal, journal_pages, lock })
}

/// Writes a page of the drive's own, syncs and reads it back: a drive that takes writes and gives
/// something else back, or nothing, would be a tier without a single hit. A full one passes: what
/// it holds can be read.
fn self_test(disk: &dyn Disk, store: &[u8; 16]) -> Result<()> {
    match disk.remove(SELF_TEST) {
        Err(err) if err.kind() != ErrorKind::NotFound => return Err(err),
        // Of a process that ended in the midst of its test, or none.
        _ => {}
    }
    let file = match disk.create(SELF_TEST, PAGE_BYTES) {
        Err(err) if err.kind() == ErrorKind::NoSpace => {
            tracing::warn!(%err, "the drive is full: whether it keeps what it takes is not known");
            return Ok(());
        }
        created => created?,
    };
    let mut page = AlignedBuf::new(PAGE_BYTES as usize)?;
    for (byte, at) in page.as_mut_slice().iter_mut().zip(0_usize..) {
        *byte = store[at % 16] ^ (at / 16) as u8 ^ 0x5a;
    }
    let mut back = AlignedBuf::new(PAGE_BYTES as usize)?;
    let tried = disk
        .write_at(file, 0, page.as_slice())
        .and_then(|()| disk.sync(file))
        .and_then(|()| disk.read_at(file, 0, back.as_mut_slice()));
    let removed = disk.remove(SELF_TEST);
    tried.map_err(|err| Error::from_io("self-test", SELF_TEST, err))?;
    removed?;
    if back.as_slice() == page.as_slice() {
        return Ok(());
    }
    let context = "`nvme_paths`: the drive gave back something else than was written to it: check \
                   it (dmesg, smartctl), or name another directory";
    Err(Error::new(ErrorKind::Io, "self-test", context))
}

fn journal_pages(capacity: u64) -> u64 {
    (capacity / 64 / PAGE_BYTES).clamp(MIN_JOURNAL_PAGES, MAX_JOURNAL_PAGES)
}

fn geometry_of(config: &StoreConfig, superblock: &Superblock, files: u64) -> Result<Geometry> {
    let segment_bytes = superblock.segment_bytes;
    if config.segment_bytes.is_some_and(|asked| asked != segment_bytes) {
        return Err(config_error(format!(
            "`segment_bytes` differs from the {segment_bytes} that the directory was made with: \
             leave the field out, or name a new directory"
        )));
    }
    let segments = segments_of(config.nvme_capacity, segment_bytes);
    if segments == 0 {
        return Err(config_error(format!(
            "`nvme_capacity` of {} is smaller than one segment of the directory, {segment_bytes} \
             bytes: give more",
            config.nvme_capacity
        )));
    }
    check_segments(segments, files)?;
    Ok(Geometry { segment_bytes, segments, header_stride: superblock.header_stride })
}

/// Segments of a drive of `capacity` bytes.
pub(crate) fn segments_of(capacity: u64, segment_bytes: u64) -> u32 {
    // Twice what is replaced as a whole; the least of it fits in the directory's own.
    let files = |capacity| names::file_bytes(capacity) + policy::file_bytes(capacity);
    let kept =
        DIRECTORY_BYTES + 2 * (files(capacity) - files(0)) + journal_pages(capacity) * PAGE_BYTES;
    let usable = capacity.saturating_sub(kept);
    u32::try_from(usable / segment_bytes).unwrap_or(u32::MAX)
}

/// Every segment is a file that stays open: what cannot be had then is refused now.
fn check_segments(segments: u32, files: u64) -> Result<()> {
    if u64::from(segments) <= files.min(SEGMENTS_MOST) {
        return Ok(());
    }
    Err(config_error(format!(
        "`nvme_capacity` is cut into {segments} segment files, of which this process may keep \
         {files} open beside those of the other drives, and {SEGMENTS_MOST} at most: raise its \
         limit of open files (`ulimit -n`), give less, or make a new directory with larger \
         `segment_bytes`"
    )))
}

/// The journal's file and its pages; made where there is none.
pub(crate) fn open_journal(disk: &dyn Disk, pages: u64) -> Result<(FileId, u64)> {
    let there = disk.list()?.iter().any(|(name, _)| name == JOURNAL);
    if there {
        let (file, bytes) = disk.open(JOURNAL)?;
        if bytes >= PAGE_BYTES && bytes.is_multiple_of(PAGE_BYTES) {
            return Ok((file, (bytes / PAGE_BYTES).min(MAX_JOURNAL_PAGES)));
        }
        tracing::warn!(bytes, "the journal was cut short by somebody: it is made anew");
        disk.remove(JOURNAL)?;
    }
    Ok((disk.create(JOURNAL, pages * PAGE_BYTES)?, pages))
}

/// The tombstones of a journal, and the pages up to the last one in use.
pub(crate) fn read_journal(
    disk: &dyn Disk,
    journal: FileId,
    pages: u64,
    store: &[u8; 16],
) -> Result<(Vec<Tombstone>, u64)> {
    let mut tombstones = Vec::new();
    let mut used = 0;
    let mut buf = AlignedBuf::new(JOURNAL_PAGE_BYTES)?;
    for page in 0..pages {
        let fault = |e| Error::from_io("open", JOURNAL, e);
        disk.read_at(journal, page * PAGE_BYTES, buf.as_mut_slice()).map_err(fault)?;
        match decode_page(store, buf.as_slice()) {
            Decoded::Valid(found) => {
                tombstones.extend(found);
                used = page + 1;
            }
            // A page that a crash tore was never acknowledged.
            Decoded::Empty | Decoded::Damaged | Decoded::OtherVersion(_) => {}
        }
    }
    Ok((tombstones, used))
}

impl Drive {
    /// Bytes of all segments.
    pub(crate) fn slot_bytes(&self) -> u64 {
        u64::from(self.geometry.segments) * self.geometry.segment_bytes
    }

    /// The bytes of the checkpoint of a clean close, if there is one. To be removed before
    /// anything is written: from then on it is out of date.
    pub(crate) fn read_checkpoint(&self) -> Result<Option<Vec<u8>>> {
        self.disk.read_file(CHECKPOINT, MAX_CHECKPOINT_BYTES)
    }

    /// Removes the checkpoint, durably.
    pub(crate) fn remove_checkpoint(&self) -> Result<()> {
        self.disk.remove(CHECKPOINT)
    }

    /// Writes what the drive holds, for the next open.
    pub(crate) fn write_checkpoint(&self, checkpoint: &Checkpoint) -> Result<()> {
        self.disk.write_file(CHECKPOINT, &checkpoint.encode(&self.superblock.store))
    }

    pub(crate) fn parts(&self) -> DriveParts {
        DriveParts { store: self.superblock.store, geometry: self.geometry }
    }

    /// The journal's tombstones, and the pages up to the last one in use.
    pub(crate) fn read_journal(&self) -> Result<(Vec<Tombstone>, u64)> {
        let store = &self.superblock.store;
        read_journal(self.disk.as_ref(), self.journal, self.journal_pages, store)
    }

    /// Lets another store have the directory; nothing is in flight any more.
    pub(crate) fn unlock(&self) {
        drop(self.lock.lock().take());
    }

    /// The store's random identity, in hexadecimal.
    pub(crate) fn store_id(&self) -> String {
        hex(&self.superblock.store)
    }
}
