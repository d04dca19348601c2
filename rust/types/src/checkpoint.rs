//! The checkpoint that a clean close writes, so that the next open need not read every table.
//!
//! It is written whole beside the segments and renamed into place, and removed when the store is
//! opened again, before anything else is written: one that is there describes exactly what the
//! segments hold.
//!
//! A record is a row of it, without what all records have in common. Rows lie in pieces with a
//! checksum each, so that several threads may check and read them.

use crate::codec::{Writer, array, triage, u16_at, u32_at, u64_at, unused};
use crate::key::{BlockKey, KEY_BYTES};
use crate::namespace::NamespaceId;
use crate::record::{Decoded, FLAG_PARENT, RecordHeader, SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::tier::{BlockInfo, BlockType};
use std::collections::{BTreeSet, HashMap};
use std::iter::once;
use std::ops::Range;

const CHECKPOINT_MAGIC: &[u8; 8] = b"TKVCHK02";
const HEAD_BYTES: usize = 64;
/// What is kept of a segment header: the rest is zero.
const SEGMENT_PART: usize = 72;
/// A namespace and a tenant, which many records share.
const OWNER_PART: usize = 48;
const ROW_BYTES: usize = 140;
/// Rows of a piece; the last one has fewer.
const PIECE_ROWS: usize = 8192;
const SUM_BYTES: usize = 4;

/// What a drive's segments hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Every segment that is cut into slots.
    pub segments: Vec<SegmentHeader>,
    /// Every slab in use.
    pub records: Vec<RecordHeader>,
}

/// Most bytes of a checkpoint that is read: more than thirty million records.
pub const MAX_CHECKPOINT_BYTES: u64 = 5 << 30;

type Owner = (NamespaceId, [u8; 16]);

impl Checkpoint {
    /// The bytes of the file. What all records have in common, the store, is taken from `store`.
    pub fn encode(&self, store: &[u8; 16]) -> Vec<u8> {
        let owners: BTreeSet<Owner> =
            self.records.iter().map(|record| (record.namespace, record.tenant)).collect();
        let numbers: HashMap<Owner, u32> = owners.iter().copied().zip(0..).collect();
        let parts = self.segments.len() * SEGMENT_PART + owners.len() * OWNER_PART;
        let sums_at = HEAD_BYTES + parts;
        let rows_at = sums_at + self.records.len().div_ceil(PIECE_ROWS) * SUM_BYTES;
        let mut out = Vec::with_capacity(rows_at + self.records.len() * ROW_BYTES);
        out.resize(HEAD_BYTES, 0);
        for segment in &self.segments {
            out.extend_from_slice(&segment.encode()[..SEGMENT_PART]);
        }
        for (namespace, tenant) in &owners {
            out.extend_from_slice(&namespace.0);
            out.extend_from_slice(tenant);
        }
        out.resize(rows_at, 0);
        for record in &self.records {
            let owner = numbers[&(record.namespace, record.tenant)];
            out.extend_from_slice(&row_of(record, owner));
        }
        let (front, rows) = out.split_at_mut(rows_at);
        let sums = front[sums_at..].chunks_exact_mut(SUM_BYTES);
        for (sum, piece) in sums.zip(rows.chunks(PIECE_ROWS * ROW_BYTES)) {
            sum.copy_from_slice(&crc32c::crc32c(piece).to_le_bytes());
        }
        let crc = crc32c::crc32c(&front[HEAD_BYTES..]);
        let count = |n: usize| u32::try_from(n).expect("fewer than 2^32 slots").to_le_bytes();
        let mut w = Writer(&mut front[..HEAD_BYTES]);
        w.put(16, store);
        w.put(32, &count(self.segments.len()));
        w.put(36, &count(self.records.len()));
        w.put(40, &count(owners.len()));
        w.put(44, &crc.to_le_bytes());
        w.seal(CHECKPOINT_MAGIC);
        out
    }

    /// Reads a checkpoint of this store; anything else is damaged.
    pub fn decode(store: &[u8; 16], bytes: &[u8]) -> Decoded<Self> {
        CheckpointRows::decode(store, bytes.to_vec()).then(|rows| {
            let sound = (0..rows.pieces()).all(|piece| rows.sound_piece(piece).is_some());
            let records = sound.then(|| (0..rows.len()).map(|at| rows.record(at)).collect());
            let Some(Some(records)) = records else { return Decoded::Damaged };
            let whole = Self { segments: rows.segments, records };
            let used: BTreeSet<Owner> =
                whole.records.iter().map(|record| (record.namespace, record.tenant)).collect();
            // What is kept and not used would not be written again.
            if used.len() == rows.owners.len() { Decoded::Valid(whole) } else { Decoded::Damaged }
        })
    }
}

fn row_of(record: &RecordHeader, owner: u32) -> [u8; ROW_BYTES] {
    let mut out = [0; ROW_BYTES];
    let mut w = Writer(&mut out);
    w.put(0, &record.key.0);
    let mut flags = record.info.flags();
    if let Some(parent) = &record.parent {
        w.put(32, &parent.0);
        flags |= FLAG_PARENT;
    }
    w.put(64, &record.put_id.to_le_bytes());
    w.put(72, &record.generation.to_le_bytes());
    w.put(80, &record.stored_unix_ns.to_le_bytes());
    w.put(88, &record.payload_bytes.to_le_bytes());
    w.put(96, &record.parts.to_le_bytes());
    w.put(104, &record.segment.to_le_bytes());
    w.put(108, &record.slot.to_le_bytes());
    w.put(112, &record.class_epoch.to_le_bytes());
    w.put(116, &record.info.depth.to_le_bytes());
    w.put(120, &record.info.tokens.to_le_bytes());
    w.put(124, &record.coordinate.0.to_le_bytes());
    w.put(126, &record.coordinate.1.to_le_bytes());
    w.put(128, &record.slab.to_le_bytes());
    w.put(130, &[record.info.block_type as u8, flags]);
    w.put(132, &(record.checksum ^ record.binding()).to_le_bytes());
    w.put(136, &owner.to_le_bytes());
    out
}

/// A checkpoint whose rows are read one by one, as whoever reads a million of them in several
/// threads wants it. Rows count only once [`CheckpointRows::sound_piece`] has said so of theirs.
#[derive(Clone, Debug)]
pub struct CheckpointRows {
    /// Every segment that is cut into slots.
    pub segments: Vec<SegmentHeader>,
    store: [u8; 16],
    owners: Vec<Owner>,
    bytes: Vec<u8>,
    sums_at: usize,
    rows_at: usize,
}

impl CheckpointRows {
    /// Checks everything but the rows of a checkpoint of this store; anything else is damaged.
    pub fn decode(store: &[u8; 16], bytes: Vec<u8>) -> Decoded<Self> {
        triage(&bytes, CHECKPOINT_MAGIC, HEAD_BYTES).then(|()| {
            let head = &bytes[..HEAD_BYTES];
            let count = |at: usize| u64::from(u32_at(head, at));
            let (segments, records, owners) = (count(32), count(36), count(40));
            let sums_at =
                HEAD_BYTES as u64 + segments * SEGMENT_PART as u64 + owners * OWNER_PART as u64;
            let rows_at = sums_at + records.div_ceil(PIECE_ROWS as u64) * SUM_BYTES as u64;
            let fits = rows_at + records * ROW_BYTES as u64 == bytes.len() as u64;
            let ours = array::<16>(head, 16) == *store && unused(head, once(48..HEAD_BYTES));
            if !fits || !ours {
                return Decoded::Damaged;
            }
            // No more than the length of what is in memory.
            let (sums_at, rows_at) = (sums_at as usize, rows_at as usize);
            if u32_at(head, 44) != crc32c::crc32c(&bytes[HEAD_BYTES..rows_at]) {
                return Decoded::Damaged;
            }
            let (segments, owners) =
                bytes[HEAD_BYTES..sums_at].split_at(segments as usize * SEGMENT_PART);
            let segments = segments.chunks_exact(SEGMENT_PART).map(|part| {
                let mut whole = [0; SEGMENT_HEADER_BYTES];
                whole[..SEGMENT_PART].copy_from_slice(part);
                SegmentHeader::decode(&whole).valid()
            });
            let owner = |part: &[u8]| (NamespaceId(array(part, 0)), array(part, 32));
            let owners: Vec<Owner> = owners.chunks_exact(OWNER_PART).map(owner).collect();
            let Some(segments) = segments.collect() else { return Decoded::Damaged };
            if !owners.is_sorted_by(|a, b| a < b) {
                return Decoded::Damaged;
            }
            Decoded::Valid(Self { segments, store: *store, owners, bytes, sums_at, rows_at })
        })
    }

    /// How many records there are.
    pub fn len(&self) -> usize {
        (self.bytes.len() - self.rows_at) / ROW_BYTES
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many pieces the rows lie in.
    pub fn pieces(&self) -> usize {
        self.len().div_ceil(PIECE_ROWS)
    }

    /// The records of a piece; `None` where one of them is damaged.
    ///
    /// # Panics
    /// Without such a piece.
    pub fn sound_piece(&self, piece: usize) -> Option<Range<usize>> {
        let records = piece * PIECE_ROWS..self.len().min((piece + 1) * PIECE_ROWS);
        let rows = &self.bytes[self.rows_at..][records.start * ROW_BYTES..records.end * ROW_BYTES];
        let sum = u32_at(&self.bytes, self.sums_at + piece * SUM_BYTES);
        let sound = crc32c::crc32c(rows) == sum
            && rows.chunks_exact(ROW_BYTES).all(|row| self.is_sound(row));
        sound.then_some(records)
    }

    fn is_sound(&self, row: &[u8]) -> bool {
        let (slab, parts, flags) = (u16_at(row, 128), u64_at(row, 96), row[131]);
        let parent = if flags & FLAG_PARENT == 0 { KEY_BYTES..2 * KEY_BYTES } else { 0..0 };
        slab < 64
            && parts & (1 << slab) != 0
            && RecordHeader::may_be_payload(u64_at(row, 88))
            && BlockType::from_u8(row[130]) as u8 == row[130]
            && flags & !(FLAG_PARENT | BlockInfo::FLAGS) == 0
            && (u32_at(row, 136) as usize) < self.owners.len()
            && unused(row, once(parent))
    }

    fn row(&self, at: usize) -> &[u8; ROW_BYTES] {
        let row = &self.bytes[self.rows_at + at * ROW_BYTES..][..ROW_BYTES];
        row.try_into().expect("as long as a row")
    }

    /// The segment and the slot of a record.
    ///
    /// # Panics
    /// Without such a record.
    pub fn place_of(&self, at: usize) -> (u32, u32) {
        let row = self.row(at);
        (u32_at(row, 104), u32_at(row, 108))
    }

    /// What an index wants to know of a record.
    ///
    /// # Panics
    /// Without such a record.
    pub fn brief(&self, at: usize) -> (BlockKey, BlockInfo) {
        let row = self.row(at);
        (BlockKey(array(row, 0)), info_of(row))
    }

    /// One record; `None` where it names what is not there, as none of a sound piece does.
    ///
    /// # Panics
    /// Without such a record.
    pub fn record(&self, at: usize) -> Option<RecordHeader> {
        let row = self.row(at);
        let (namespace, tenant) = *self.owners.get(u32_at(row, 136) as usize)?;
        let parent = row[131] & FLAG_PARENT != 0;
        let mut record = RecordHeader {
            store: self.store,
            namespace,
            key: BlockKey(array(row, 0)),
            parent: parent.then(|| BlockKey(array(row, 32))),
            segment: u32_at(row, 104),
            slot: u32_at(row, 108),
            class_epoch: u32_at(row, 112),
            info: info_of(row),
            coordinate: (u16_at(row, 124), u16_at(row, 126)),
            slab: u16_at(row, 128),
            parts: u64_at(row, 96),
            put_id: u64_at(row, 64),
            generation: u64_at(row, 72),
            stored_unix_ns: u64_at(row, 80),
            payload_bytes: u64_at(row, 88),
            checksum: u32_at(row, 132),
            tenant,
        };
        record.checksum ^= record.binding();
        Some(record)
    }
}

fn info_of(row: &[u8; ROW_BYTES]) -> BlockInfo {
    let info = BlockInfo {
        depth: u32_at(row, 116),
        tokens: u32_at(row, 120),
        block_type: BlockType::from_u8(row[130]),
        ..BlockInfo::default()
    };
    info.with_flags(row[131])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> RecordHeader {
        RecordHeader {
            store: [3; 16],
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
        }
    }

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
        let record = sample();
        let child = RecordHeader {
            namespace: NamespaceId([2; 32]),
            key: BlockKey([6; 32]),
            parent: Some(record.key),
            info: BlockInfo { depth: 1, chunk_end: true, ..BlockInfo::default() },
            ..record
        };
        let records = vec![record, record, record, child];
        let whole = Checkpoint { segments: vec![segment], records };
        let bytes = whole.encode(&store);
        assert_eq!(Checkpoint::decode(&store, &bytes), Decoded::Valid(whole));
        assert_eq!(Checkpoint::decode(&[0; 16], &bytes), Decoded::Damaged, "another store's");
        let rows = CheckpointRows::decode(&store, bytes.clone()).valid().expect("sound");
        assert_eq!((rows.len(), rows.place_of(2)), (4, (1, 3)));
        assert_eq!(rows.brief(3), (child.key, child.info));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 4;
            assert!(Checkpoint::decode(&store, &changed).valid().is_none(), "byte {at}");
            assert!(Checkpoint::decode(&store, &bytes[..at]).valid().is_none(), "cut at {at}");
        }
    }

    /// Pieces are checked one by one: what is wrong in one is told, and of no other.
    #[test]
    fn each_piece_has_a_checksum_of_its_own() {
        let store = [3; 16];
        let record = |slot: u32| RecordHeader { slot, key: BlockKey([slot as u8; 32]), ..sample() };
        let records = (0..2 * PIECE_ROWS as u32 + 1).map(record).collect();
        let whole = Checkpoint { segments: Vec::new(), records };
        let mut bytes = whole.encode(&store);
        let last = bytes.len() - 1;
        bytes[last - 2 * ROW_BYTES] ^= 1;
        let rows = CheckpointRows::decode(&store, bytes).valid().expect("the front is sound");
        let pieces: Vec<_> = (0..rows.pieces()).map(|piece| rows.sound_piece(piece)).collect();
        let whole = 2 * PIECE_ROWS;
        assert_eq!(pieces, [Some(0..PIECE_ROWS), None, Some(whole..whole + 1)]);
    }
}
