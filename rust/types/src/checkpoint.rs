//! The checkpoint that a clean close writes, so that the next open need not read every table.
//!
//! It is written whole beside the segments and renamed into place, and removed when the store is
//! opened again, before anything else is written: one that is there describes exactly what the
//! segments hold.

use crate::codec::{Writer, array, triage, u32_at, unused};
use crate::record::{
    Decoded, RECORD_BYTES, RecordHeader, SEGMENT_HEADER_BYTES, SegmentHeader, record_segment,
};
use std::iter::once;

const CHECKPOINT_MAGIC: &[u8; 8] = b"TKVCHK01";
const HEAD_BYTES: usize = 64;
/// What is kept of a segment header and of a record header: the rest of each is zero.
const SEGMENT_PART: usize = 72;
const RECORD_PART: usize = 224;

/// What a drive's segments hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Every segment that is cut into slots.
    pub segments: Vec<SegmentHeader>,
    /// Every slab in use.
    pub records: Vec<RecordHeader>,
}

/// Most bytes of a checkpoint that is read: about twenty million records.
pub const MAX_CHECKPOINT_BYTES: u64 = 5 << 30;

impl Checkpoint {
    /// The bytes of the file.
    pub fn encode(&self, store: &[u8; 16]) -> Vec<u8> {
        let body = self.segments.len() * SEGMENT_PART + self.records.len() * RECORD_PART;
        let mut out = Vec::with_capacity(HEAD_BYTES + body);
        out.resize(HEAD_BYTES, 0);
        for segment in &self.segments {
            out.extend_from_slice(&segment.encode()[..SEGMENT_PART]);
        }
        for record in &self.records {
            out.extend_from_slice(&record.encode()[..RECORD_PART]);
        }
        let crc = crc32c::crc32c(&out[HEAD_BYTES..]);
        let count = |n: usize| u32::try_from(n).expect("fewer than 2^32 slots").to_le_bytes();
        let mut w = Writer(&mut out[..HEAD_BYTES]);
        w.put(16, store);
        w.put(32, &count(self.segments.len()));
        w.put(36, &count(self.records.len()));
        w.put(40, &crc.to_le_bytes());
        w.seal(CHECKPOINT_MAGIC);
        out
    }

    /// Reads a checkpoint of this store; anything else is damaged.
    pub fn decode(store: &[u8; 16], bytes: &[u8]) -> Decoded<Self> {
        CheckpointView::decode(store, bytes).then(|view| {
            let records = (0..view.records()).map(|at| view.record(at)).collect();
            match records {
                Some(records) => Decoded::Valid(Self { segments: view.segments, records }),
                None => Decoded::Damaged,
            }
        })
    }
}

/// A sound checkpoint whose records are decoded one by one, as whoever reads a million of them in
/// several threads wants it.
#[derive(Clone, Debug)]
pub struct CheckpointView<'a> {
    /// Every segment that is cut into slots.
    pub segments: Vec<SegmentHeader>,
    records: &'a [u8],
}

impl<'a> CheckpointView<'a> {
    /// Checks a checkpoint of this store as a whole; anything else is damaged.
    pub fn decode(store: &[u8; 16], bytes: &'a [u8]) -> Decoded<Self> {
        triage(bytes, CHECKPOINT_MAGIC, HEAD_BYTES).then(|()| {
            let (head, body) = bytes.split_at(HEAD_BYTES);
            let (segments, records) = (u32_at(head, 32) as usize, u32_at(head, 36) as usize);
            let fits = segments
                .checked_mul(SEGMENT_PART)
                .zip(records.checked_mul(RECORD_PART))
                .and_then(|(a, b)| a.checked_add(b).map(|sum| (a, sum)));
            let Some((split, len)) = fits else { return Decoded::Damaged };
            let ours = array::<16>(head, 16) == *store;
            let clean = unused(head, once(44..HEAD_BYTES));
            if !ours || !clean || len != body.len() || u32_at(head, 40) != crc32c::crc32c(body) {
                return Decoded::Damaged;
            }
            let (segments, records) = body.split_at(split);
            let mut out = Self { segments: Vec::new(), records };
            for part in segments.chunks_exact(SEGMENT_PART) {
                let mut whole = [0; SEGMENT_HEADER_BYTES];
                whole[..SEGMENT_PART].copy_from_slice(part);
                let Decoded::Valid(segment) = SegmentHeader::decode(&whole) else {
                    return Decoded::Damaged;
                };
                out.segments.push(segment);
            }
            Decoded::Valid(out)
        })
    }

    /// How many records there are.
    pub fn records(&self) -> usize {
        self.records.len() / RECORD_PART
    }

    fn part(&self, at: usize) -> &[u8] {
        &self.records[at * RECORD_PART..][..RECORD_PART]
    }

    /// The segment of a record, which may prove to be damaged.
    ///
    /// # Panics
    /// Without such a record.
    pub fn segment_of(&self, at: usize) -> u32 {
        record_segment(self.part(at))
    }

    /// One record; `None` where it is damaged.
    ///
    /// # Panics
    /// Without such a record.
    pub fn record(&self, at: usize) -> Option<RecordHeader> {
        let mut whole = [0; RECORD_BYTES];
        whole[..RECORD_PART].copy_from_slice(self.part(at));
        RecordHeader::decode(&whole).valid()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::BlockKey;
    use crate::namespace::NamespaceId;
    use crate::tier::BlockInfo;

    #[test]
    fn a_checkpoint_reads_back_and_any_change_is_noticed() {
        let store = [3; 16];
        let segment = SegmentHeader {
            store,
            segment: 1,
            class_epoch: 2,
            slot_bytes: 4096,
            slots: 9,
            header_stride: 512,
            segment_bytes: 1 << 20,
            data_offset: 12_288,
        };
        let record = RecordHeader {
            store,
            namespace: NamespaceId([4; 32]),
            key: BlockKey([5; 32]),
            parent: None,
            segment: 1,
            slot: 3,
            class_epoch: 2,
            info: BlockInfo::default(),
            coordinate: (0, 0),
            slab: 0,
            parts: 1,
            put_id: 6,
            generation: 7,
            stored_unix_ns: 8,
            payload_bytes: 9,
            checksum: 10,
            tenant: [11; 16],
        };
        let whole = Checkpoint { segments: vec![segment], records: vec![record; 3] };
        let bytes = whole.encode(&store);
        assert_eq!(Checkpoint::decode(&store, &bytes), Decoded::Valid(whole));
        assert_eq!(Checkpoint::decode(&[0; 16], &bytes), Decoded::Damaged, "another store's");
        let view = CheckpointView::decode(&store, &bytes).valid().expect("sound");
        assert_eq!((view.records(), view.segment_of(2)), (3, 1));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 4;
            assert!(Checkpoint::decode(&store, &changed).valid().is_none(), "byte {at}");
            assert!(Checkpoint::decode(&store, &bytes[..at]).valid().is_none(), "cut at {at}");
        }
    }
}
