//! The structures on a drive. The bytes are tried as they are, and with the seal of a sound
//! structure put on them: a checksum would keep the fuzzer out of everything behind it.

use crate::seeds::STORE;
use std::collections::BTreeSet;
use tiered_kv_types::record::{Decoded, RECORD_BYTES, SEGMENT_HEADER_BYTES, SUPERBLOCK_BYTES};
use tiered_kv_types::tombstone::{JOURNAL_PAGE_BYTES, TOMBSTONES_PER_PAGE};
use tiered_kv_types::{
    Checkpoint, FORMAT_VERSION, RecordHeader, SegmentHeader, Superblock, tombstone,
};

/// Puts magic, version and checksum on a structure of `len` bytes; `None` where it is too short.
pub(crate) fn sealed(data: &[u8], magic: &[u8; 8], len: usize) -> Option<Vec<u8>> {
    let mut bytes = data.get(..len)?.to_vec();
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    Some(bytes)
}

/// Whatever reads back is written with the same bytes, and no flipped bit is taken for sound.
fn check(bytes: &[u8], len: usize, again: impl Fn(&[u8]) -> Option<Vec<u8>>) {
    let Some(encoded) = again(bytes) else { return };
    assert_eq!(encoded, bytes[..len], "what parses is written with the same bytes");
    // Bits that follow from the bytes, so that one input is one run.
    let mut at = crc32c::crc32c(bytes) as usize;
    for _ in 0..64 {
        let mut flipped = bytes.to_vec();
        at = at.wrapping_mul(0x9e37_79b1).wrapping_add(12_345) % (len * 8);
        flipped[at / 8] ^= 1 << (at % 8);
        assert!(again(&flipped).is_none(), "bit {at} was flipped and nobody noticed");
    }
}

fn fixed(data: &[u8], magic: &[u8; 8], len: usize, again: impl Fn(&[u8]) -> Option<Vec<u8>>) {
    check(data, len, &again);
    // Short ones, and the rest of a longer one, are as the writer leaves them: zero.
    let mut whole = data[..data.len().min(len)].to_vec();
    whole.resize(len, 0);
    check(&sealed(&whole, magic, len).expect("long enough"), len, &again);
}

pub(crate) fn record(data: &[u8]) {
    fixed(data, b"TKVREC01", RECORD_BYTES, |bytes| {
        let record = RecordHeader::decode(bytes).valid()?;
        assert!(record.slab < 64 && record.parts & (1 << record.slab) != 0);
        assert!((1..=4 << 30).contains(&record.payload_bytes), "a payload is bounded");
        Some(record.encode().to_vec())
    });
}

pub(crate) fn segment(data: &[u8]) {
    fixed(data, b"TKVSEG01", SEGMENT_HEADER_BYTES, |bytes| {
        Some(SegmentHeader::decode(bytes).valid()?.encode().to_vec())
    });
}

pub(crate) fn superblock(data: &[u8]) {
    fixed(data, b"TKVSUP01", SUPERBLOCK_BYTES, |bytes| {
        Some(Superblock::decode(bytes).valid()?.encode().to_vec())
    });
}

pub(crate) fn journal(data: &[u8]) {
    let read = |bytes: &[u8]| {
        let tombstones = tombstone::decode_page(&STORE, bytes).valid()?;
        assert!(tombstones.len() <= TOMBSTONES_PER_PAGE);
        Some(tombstone::encode_page(&STORE, &tombstones).to_vec())
    };
    fixed(data, b"TKVTMB01", JOURNAL_PAGE_BYTES, read);
    // The store's identity is part of what is checked: given, as in what the store has written.
    let mut ours = data.to_vec();
    ours.resize(JOURNAL_PAGE_BYTES, 0);
    ours[16..32].copy_from_slice(&STORE);
    fixed(&ours, b"TKVTMB01", JOURNAL_PAGE_BYTES, read);
}

const HEAD_BYTES: usize = 64;
const SEGMENT_PART: usize = 72;
const OWNER_PART: usize = 48;
const ROW_BYTES: usize = 140;
const PIECE_ROWS: usize = 8192;

pub(crate) fn checkpoint(data: &[u8]) {
    let again = |bytes: &[u8]| match Checkpoint::decode(&STORE, bytes) {
        Decoded::Valid(checkpoint) => {
            let records = checkpoint.records.len();
            let owners: BTreeSet<_> =
                checkpoint.records.iter().map(|r| (r.namespace, r.tenant)).collect();
            let parts = checkpoint.segments.len() * SEGMENT_PART + owners.len() * OWNER_PART;
            let rows = records.div_ceil(PIECE_ROWS) * 4 + records * ROW_BYTES;
            assert_eq!(HEAD_BYTES + parts + rows, bytes.len(), "no more than the file has");
            Some(checkpoint.encode(&STORE))
        }
        _ => None,
    };
    check(data, data.len(), again);
    if let Some(bytes) = sealed_checkpoint(data) {
        check(&bytes, bytes.len(), again);
    }
}

/// A checkpoint whose seals are all sound: the head's, each segment's, and each piece's.
fn sealed_checkpoint(data: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = data.to_vec();
    let (head, body) = bytes.split_at_mut_checked(HEAD_BYTES)?;
    head[16..32].copy_from_slice(&STORE);
    let count = |at: usize| head[at..at + 4].try_into().map(u32::from_le_bytes);
    let [segments, records, owners] = [count(32).ok()?, count(36).ok()?, count(40).ok()?];
    let segments = segments as usize * SEGMENT_PART;
    let sums_at = segments + owners as usize * OWNER_PART;
    let rows_at = sums_at + (records as usize).div_ceil(PIECE_ROWS) * 4;
    let (front, rows) = body.split_at_mut_checked(rows_at)?;
    seal_parts(&mut front[..segments], SEGMENT_PART, b"TKVSEG01", SEGMENT_HEADER_BYTES);
    let sums = front[sums_at..].chunks_exact_mut(4);
    for (sum, piece) in sums.zip(rows.chunks(PIECE_ROWS * ROW_BYTES)) {
        sum.copy_from_slice(&crc32c::crc32c(piece).to_le_bytes());
    }
    head[44..48].copy_from_slice(&crc32c::crc32c(front).to_le_bytes());
    let head = sealed(head, b"TKVCHK02", HEAD_BYTES)?;
    bytes[..HEAD_BYTES].copy_from_slice(&head);
    Some(bytes)
}

fn seal_parts(body: &mut [u8], part: usize, magic: &[u8; 8], len: usize) {
    for bytes in body.chunks_exact_mut(part) {
        let mut whole = bytes.to_vec();
        whole.resize(len, 0);
        let whole = sealed(&whole, magic, len).expect("as long as it has to be");
        bytes.copy_from_slice(&whole[..part]);
    }
}
