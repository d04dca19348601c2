//! Giving a closed store another capacity.
//!
//! The capacity is the configuration's. A larger one needs nothing but to be configured; before a
//! smaller one, blocks are moved out of the segments that will not be there, so that no more is
//! lost than does not fit.

use super::ClosedStore;
use crate::directory::segments_of;
use crate::io::{segment_name, segment_number};
use crate::look::take_away_checkpoint;
use crate::machine::{DriveId, SlabMove};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tiered_kv_io::{AlignedBuf, DirLock, Disk, FileId, PosixDisk, crc32c};
use tiered_kv_types::{Error, ErrorKind, Result, round_up_to_page};

/// Blocks whose headers are written together, behind their payloads.
const BATCH: usize = 64;

/// What became of one directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The directory.
    pub path: PathBuf,
    /// Segments of the new capacity.
    pub segments: u32,
    /// Segment files that were there, and that are left.
    pub files_before: u32,
    /// Segment files that are left.
    pub files_after: u32,
    /// Blocks that were moved out of files that go.
    pub moved_blocks: u64,
    /// Blocks that had no place any more, or could not be read.
    pub lost_blocks: u64,
    /// Their payload bytes.
    pub lost_bytes: u64,
}

/// Makes every directory of a closed store fit `capacity` bytes a drive. With `dry_run` nothing is
/// changed: the answer says what would be.
///
/// # Errors
/// As [`crate::Operator::read`]; `InvalidArgument` for a capacity smaller than one segment; the
/// operating system's, after which a part may have been moved and nothing is lost.
pub fn resize(dirs: &[PathBuf], capacity: u64, dry_run: bool) -> Result<Vec<Resized>> {
    let store = if dry_run {
        ClosedStore::open(dirs)?
    } else {
        ClosedStore::open_with(dirs, |dir: &Path| {
            let lock = DirLock::acquire(dir)?;
            let disk = Arc::new(PosixDisk::open(dir)?) as Arc<dyn Disk>;
            Ok((disk, Some(lock)))
        })?
    };
    // Refused before anything is changed.
    let segments = |drive: &super::closed::ClosedDrive| match segments_of(
        capacity,
        drive.segment_bytes,
    ) {
        0 => Err(Error::new(
            ErrorKind::InvalidArgument,
            "resize",
            format!(
                "`capacity` of {capacity} is smaller than one segment of {}, {} bytes: give more",
                drive.path.display(),
                drive.segment_bytes
            ),
        )),
        segments => Ok(segments),
    };
    let wanted: Result<Vec<u32>> = store.drives.iter().map(segments).collect();
    let each = (0..).zip(wanted?);
    each.map(|(drive, segments)| resize_drive(&store, drive, segments, dry_run)).collect()
}

fn resize_drive(
    store: &ClosedStore,
    number: DriveId,
    segments: u32,
    dry_run: bool,
) -> Result<Resized> {
    let drive = &store.drives[usize::from(number)];
    let disk = store.disks[usize::from(number)].as_ref();
    let files: Vec<u32> =
        disk.list()?.into_iter().filter_map(|(name, _)| segment_number(&name)).collect();
    let beyond: Vec<u32> = files.iter().copied().filter(|file| *file >= segments).collect();
    let before = u32::try_from(files.len()).expect("at most 65536 files");
    let mut done = Resized {
        path: drive.path.clone(),
        segments,
        files_before: before,
        files_after: before - u32::try_from(beyond.len()).expect("some of these"),
        moved_blocks: 0,
        lost_blocks: 0,
        lost_bytes: 0,
    };
    if beyond.is_empty() {
        return Ok(done);
    }
    let shrink = store.machine.lock().shrink(number, segments);
    (done.lost_blocks, done.lost_bytes) = (shrink.lost_blocks, shrink.lost_bytes);
    if dry_run {
        done.moved_blocks = shrink.moves.len() as u64;
        return Ok(done);
    }
    // It speaks of the old places: from here on the tables count.
    take_away_checkpoint(disk)?;
    for batch in shrink.moves.chunks(BATCH) {
        move_blocks(disk, drive.geometry.header_stride as usize, batch, &mut done)?;
    }
    for file in beyond {
        disk.remove(&segment_name(file))?;
    }
    Ok(done)
}

/// Moves some blocks: payloads, then headers, then both are made durable. Until their old files go
/// they are in two places, which recovery bears.
fn move_blocks(
    disk: &dyn Disk,
    stride: usize,
    blocks: &[Vec<SlabMove>],
    done: &mut Resized,
) -> Result<()> {
    let failed = |err| Error::from_io("resize", "a segment cannot be written", err);
    let mut whole = Vec::new();
    let mut touched: BTreeSet<FileId> = BTreeSet::new();
    for block in blocks {
        let mut sound = true;
        for slab in block {
            let bytes = read_slab(disk, slab)?;
            sound &= bytes.is_some();
            if let Some(bytes) = bytes {
                disk.write_at(slab.to.0, slab.to.1, bytes.as_slice()).map_err(failed)?;
                touched.insert(slab.to.0);
            }
        }
        if sound {
            whole.push(block);
        } else {
            done.lost_blocks += 1;
            done.lost_bytes += block.iter().map(|slab| slab.from.bytes).sum::<u64>();
        }
    }
    for slab in whole.iter().flat_map(|block| block.iter()) {
        let mut header = vec![0; stride];
        let encoded = slab.header.encode();
        header[..encoded.len()].copy_from_slice(&encoded);
        disk.write_at(slab.to.0, slab.header_offset, &header).map_err(failed)?;
    }
    for file in touched {
        disk.sync(file).map_err(failed)?;
    }
    done.moved_blocks += whole.len() as u64;
    Ok(())
}

/// A slab's payload with its padding; `None` where it is not what was stored.
fn read_slab(disk: &dyn Disk, slab: &SlabMove) -> Result<Option<AlignedBuf>> {
    let bytes = slab.from.bytes;
    let len = usize::try_from(round_up_to_page(bytes)).expect("a slab fits in memory");
    let mut buf = AlignedBuf::new(len)?;
    if disk.read_at(slab.from.file, slab.from.offset, buf.as_mut_slice()).is_err() {
        return Ok(None);
    }
    let payload = &buf.as_slice()[..usize::try_from(bytes).expect("less than above")];
    Ok((crc32c(payload) == slab.from.crc32c).then_some(buf))
}
