//! What recovery reads from a directory's segments: from the checkpoint of a clean close, else from
//! their tables, on as many threads as it is given.

use crate::io::{segment_name, segment_number};
use crate::machine::{DriveId, FoundSegment, Geometry, Records};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use tiered_kv_io::{AlignedBuf, Disk, FileId, prefer_huge_pages};
pub(crate) use tiered_kv_io::{in_parallel, recovery_threads};
use tiered_kv_types::record::{Decoded, SEGMENT_HEADER_BYTES};
use tiered_kv_types::{CheckpointRows, Error, PAGE_BYTES, RecordHeader, Result, SegmentHeader};

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
    checkpoint: Option<CheckpointRows>,
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
    records: Records,
}

impl Known {
    fn found(self, segment: u32, file: FileId) -> FoundSegment {
        let Self { header, records } = self;
        FoundSegment { drive: 0, segment, file, header, records, damaged: 0, unread: false }
    }
}

/// The records of each segment, which lie together in a checkpoint, in the order of their slots;
/// `None` where one of them is damaged, or they do not.
fn by_segment(checkpoint: CheckpointRows, threads: usize) -> Option<HashMap<u32, Known>> {
    let rows = Arc::new(checkpoint);
    let runs_of = |piece: usize| {
        let mut runs: Vec<(u32, Range<usize>)> = Vec::new();
        for at in rows.sound_piece(piece)? {
            let (segment, slot) = rows.place_of(at);
            if at > 0 && rows.place_of(at - 1) >= (segment, slot) {
                return None;
            }
            add_run(&mut runs, segment, at..at + 1);
        }
        Some(runs)
    };
    let mut runs = Vec::new();
    for piece in in_parallel(rows.pieces(), threads, runs_of, || {}) {
        piece?.into_iter().for_each(|(segment, run)| add_run(&mut runs, segment, run));
    }
    let mut known: HashMap<u32, Known> = HashMap::new();
    for (segment, run) in runs {
        let records = Records::Rows(rows.clone(), run);
        known.insert(segment, Known { header: None, records });
    }
    for header in &rows.segments {
        known.entry(header.segment).or_default().header = Some(*header);
    }
    Some(known)
}

/// Adds records to the last run, where they are of the same segment.
fn add_run(runs: &mut Vec<(u32, Range<usize>)>, segment: u32, records: Range<usize>) {
    match runs.last_mut() {
        Some((of, run)) if *of == segment => run.end = records.end,
        _ => runs.push((segment, records)),
    }
}

/// The header and the table of one segment.
pub(crate) fn read_segment(
    disk: &dyn Disk,
    geometry: &Geometry,
    segment: u32,
    file: FileId,
) -> FoundSegment {
    let mut records: Vec<(u32, RecordHeader)> = Vec::new();
    let mut found = Known::default().found(segment, file);
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
        damaged => {
            found.damaged = 1;
            found.unread = damaged.is_err();
            return found;
        }
    };
    let table = header.data_offset.saturating_sub(PAGE_BYTES);
    let table = table.min(geometry.segment_bytes - PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES;
    match read(PAGE_BYTES, usize::try_from(table).expect("a table fits in memory")) {
        Ok(buf) => {
            let stride = geometry.header_stride as usize;
            records.reserve_exact(buf.as_slice().len() / stride);
            prefer_huge_pages(records.spare_capacity_mut());
            for (slot, bytes) in buf.as_slice().chunks_exact(stride).enumerate() {
                let slot = u32::try_from(slot).expect("a table has fewer than 2^32 entries");
                match RecordHeader::decode(bytes) {
                    Decoded::Valid(record) => records.push((slot, record)),
                    Decoded::Empty => {}
                    _ => found.damaged += 1,
                }
            }
        }
        Err(_) => {
            found.damaged += 1;
            found.unread = true;
        }
    }
    found.header = Some(header);
    found.records = Records::Table(records);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use tiered_kv_types::{BlockInfo, BlockKey, Checkpoint, NamespaceId};

    const STORE: [u8; 16] = [1; 16];

    fn known(places: &[(u32, u32)]) -> Option<HashMap<u32, Known>> {
        let record = |(segment, slot): &(u32, u32)| RecordHeader {
            store: STORE,
            namespace: NamespaceId([2; 32]),
            key: BlockKey([3; 32]),
            parent: None,
            segment: *segment,
            slot: *slot,
            class_epoch: 1,
            info: BlockInfo::default(),
            coordinate: (0, 0),
            slab: 0,
            parts: 1,
            put_id: 4,
            generation: 5,
            stored_unix_ns: 6,
            payload_bytes: 7,
            checksum: 8,
            tenant: [0; 16],
        };
        let records = places.iter().map(record).collect();
        let bytes = Checkpoint { segments: Vec::new(), records }.encode(&STORE);
        by_segment(CheckpointRows::decode(&STORE, bytes).valid().expect("sound"), 2)
    }

    #[test]
    fn the_records_of_a_checkpoint_go_to_their_segments() {
        // More than one piece of them.
        let many = (0..9000).map(|slot| (4, slot));
        let places: Vec<_> = [(1, 2), (1, 7)].into_iter().chain(many).collect();
        let known = known(&places).expect("in order");
        assert_eq!(known.len(), 2);
        for (segment, slots) in [(1, vec![2, 7]), (4, (0..9000).collect())] {
            let records = &known[&segment].records;
            let found: Vec<u32> = (0..records.len()).map(|at| records.get(at).0).collect();
            assert_eq!(found, slots);
        }
    }

    /// A slot that two records claim would be given back twice.
    #[test]
    fn a_checkpoint_with_two_records_of_a_slot_is_not_believed() {
        assert!(known(&[(1, 2), (1, 3)]).is_some());
        assert!(known(&[(1, 3), (1, 3)]).is_none());
        assert!(known(&[(1, 3), (1, 2)]).is_none());
        assert!(known(&[(2, 0), (1, 0)]).is_none());
    }
}
