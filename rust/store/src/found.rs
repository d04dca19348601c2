//! What recovery reads from a directory's segments: from the checkpoint of a clean close, else from
//! their tables, on as many threads as it is given.

use crate::io::{segment_name, segment_number};
use crate::machine::{DriveId, FoundSegment, Geometry};
use std::collections::HashMap;
use std::ops::Range;
use tiered_kv_io::{AlignedBuf, Disk, FileId, prefer_huge_pages};
pub(crate) use tiered_kv_io::{in_parallel, recovery_threads};
use tiered_kv_types::record::{Decoded, SEGMENT_HEADER_BYTES};
use tiered_kv_types::{CheckpointView, Error, PAGE_BYTES, RecordHeader, Result, SegmentHeader};

/// What the segments of a directory hold, and files that do not fit the geometry.
pub(crate) struct Looked {
    pub(crate) found: Vec<FoundSegment>,
    pub(crate) misfits: Vec<String>,
    /// There was no checkpoint to be believed.
    pub(crate) tables_read: bool,
}

impl Looked {
    /// Gives the space of files back that are beyond the capacity, or were cut short by somebody.
    pub(crate) fn remove_misfits(&self, disk: &dyn Disk) -> Result<()> {
        for name in &self.misfits {
            tracing::warn!(name, "a segment file does not fit the store: removed");
            disk.remove(name)?;
        }
        Ok(())
    }
}

/// Reads a directory's segments; changes nothing.
pub(crate) fn look_at_segments(
    disk: &dyn Disk,
    drive: DriveId,
    geometry: &Geometry,
    checkpoint: Option<CheckpointView<'_>>,
    threads: usize,
) -> Result<Looked> {
    let mut misfits = Vec::new();
    let mut files = Vec::new();
    for (name, _) in disk.list()? {
        let Some(segment) = segment_number(&name) else { continue };
        let (file, bytes) = disk.open(&name)?;
        if segment >= geometry.segments || bytes != geometry.segment_bytes {
            misfits.push(name);
        } else {
            files.push((segment, file));
        }
    }
    let known = checkpoint.and_then(|checkpoint| by_segment(checkpoint, threads));
    let tables_read = known.is_none();
    let mut found: Vec<FoundSegment> = match known {
        Some(mut known) => {
            let of =
                |(segment, file)| known.remove(&segment).unwrap_or_default().found(segment, file);
            files.into_iter().map(of).collect()
        }
        None => {
            let read = |at: usize| read_segment(disk, geometry, files[at].0, files[at].1);
            in_parallel(files.len(), threads, read, || {})
        }
    };
    found.iter_mut().for_each(|segment| segment.drive = drive);
    Ok(Looked { found, misfits, tables_read })
}

/// What a checkpoint says of one segment.
#[derive(Default)]
struct Known {
    header: Option<SegmentHeader>,
    records: Vec<(u32, RecordHeader)>,
}

impl Known {
    fn found(self, segment: u32, file: FileId) -> FoundSegment {
        let Self { header, records } = self;
        FoundSegment { drive: 0, segment, file, header, records, damaged: 0 }
    }
}

/// The records of each segment; `None` where one is damaged. They lie together in a checkpoint.
fn by_segment(checkpoint: CheckpointView<'_>, threads: usize) -> Option<HashMap<u32, Known>> {
    let mut runs: Vec<(u32, Range<usize>)> = Vec::new();
    for at in 0..checkpoint.records() {
        let segment = checkpoint.segment_of(at);
        match runs.last_mut() {
            Some((of, run)) if *of == segment => run.end = at + 1,
            _ => runs.push((segment, at..at + 1)),
        }
    }
    let decode = |number: usize| {
        let run = runs[number].1.clone();
        let mut records = Vec::with_capacity(run.len());
        prefer_huge_pages(records.spare_capacity_mut());
        for at in run {
            let record = checkpoint.record(at)?;
            records.push((record.slot, record));
        }
        Some(records)
    };
    let decoded = in_parallel(runs.len(), threads, decode, || {});
    let mut known: HashMap<u32, Known> = HashMap::new();
    for ((segment, _), records) in runs.iter().zip(decoded) {
        let of = known.entry(*segment).or_default();
        if of.records.is_empty() {
            of.records = records?;
        } else {
            of.records.extend(records?);
        }
    }
    for header in checkpoint.segments {
        known.entry(header.segment).or_default().header = Some(header);
    }
    Some(known)
}

/// The header and the table of one segment.
pub(crate) fn read_segment(
    disk: &dyn Disk,
    geometry: &Geometry,
    segment: u32,
    file: FileId,
) -> FoundSegment {
    let mut found =
        FoundSegment { drive: 0, segment, file, header: None, records: Vec::new(), damaged: 0 };
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
            let stride = geometry.header_stride as usize;
            found.records.reserve_exact(buf.as_slice().len() / stride);
            prefer_huge_pages(found.records.spare_capacity_mut());
            for (slot, bytes) in buf.as_slice().chunks_exact(stride).enumerate() {
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
