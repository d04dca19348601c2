//! Everything written to a drive reads back, and nothing that was damaged does.

use proptest::prelude::*;
use tiered_kv_types::record::{Decoded, RECORD_BYTES, SEGMENT_HEADER_BYTES, SUPERBLOCK_BYTES};
use tiered_kv_types::{
    BlockInfo, BlockKey, BlockType, ComputedBy, NamespaceId, RecordHeader, SegmentHeader,
    Superblock,
};

fn record() -> impl Strategy<Value = RecordHeader> {
    let keys = (any::<[u8; 32]>(), any::<[u8; 32]>(), proptest::option::of(any::<[u8; 32]>()));
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>());
    let rest = (any::<u64>(), 1u64..=4 << 30, any::<u32>(), any::<(u16, u16)>(), 0u16..64);
    let info = (any::<u32>(), any::<u32>(), 0u8..5, any::<bool>(), any::<bool>());
    (keys, numbers, rest, info, any::<u64>(), any::<[u8; 16]>()).prop_map(
        |(keys, numbers, rest, info, parts, id)| RecordHeader {
            store: id,
            namespace: NamespaceId(keys.0),
            key: BlockKey(keys.1),
            parent: keys.2.map(BlockKey),
            segment: numbers.0,
            slot: numbers.1,
            class_epoch: numbers.2,
            info: BlockInfo {
                depth: info.0,
                tokens: info.1,
                chunk_end: info.3,
                computed: if info.4 { ComputedBy::Decode } else { ComputedBy::Prefill },
                block_type: BlockType::from_u8(info.2),
            },
            coordinate: rest.3,
            slab: rest.4,
            parts: parts | 1 << rest.4,
            put_id: numbers.3,
            generation: numbers.4,
            stored_unix_ns: rest.0,
            payload_bytes: rest.1,
            checksum: rest.2,
            tenant: id,
        },
    )
}

proptest! {
    #[test]
    fn a_record_reads_back(record in record()) {
        prop_assert_eq!(RecordHeader::decode(&record.encode()), Decoded::Valid(record));
    }

    #[test]
    fn any_changed_byte_of_a_record_is_noticed(
        record in record(), at in 0..RECORD_BYTES, change in 1u8..,
    ) {
        let mut bytes = record.encode();
        bytes[at] ^= change;
        let decoded = RecordHeader::decode(&bytes);
        let noticed = matches!(decoded, Decoded::Damaged | Decoded::OtherVersion(_));
        prop_assert!(noticed, "{:?}", decoded);
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_are_never_a_record(
        bytes in proptest::collection::vec(any::<u8>(), 0..5000),
    ) {
        prop_assert!(RecordHeader::decode(&bytes).valid().is_none());
        prop_assert!(SegmentHeader::decode(&bytes).valid().is_none());
        prop_assert!(Superblock::decode(&bytes).valid().is_none());
    }
}

#[test]
fn zeroes_are_empty_and_short_bytes_are_damaged() {
    assert_eq!(RecordHeader::decode(&[0; RECORD_BYTES]), Decoded::Empty);
    assert_eq!(RecordHeader::decode(&[0; RECORD_BYTES - 1]), Decoded::Damaged);
    assert_eq!(SegmentHeader::decode(&[0; SEGMENT_HEADER_BYTES]), Decoded::Empty);
    assert_eq!(Superblock::decode(&[0; SUPERBLOCK_BYTES]), Decoded::Empty);
}

#[test]
fn segment_headers_and_superblocks_read_back() {
    let segment = SegmentHeader {
        store: [3; 16],
        segment: 5,
        class_epoch: 2,
        slot_bytes: 1 << 20,
        slots: 60,
        header_stride: 512,
        segment_bytes: 64 << 20,
        data_offset: 36_864,
    };
    assert_eq!(SegmentHeader::decode(&segment.encode()), Decoded::Valid(segment));
    let superblock = Superblock {
        store: [4; 16],
        drive: 1,
        segment_bytes: 64 << 20,
        header_stride: 4096,
        created_unix_ns: 1_764_000_000_000_000_000,
    };
    let mut bytes = superblock.encode();
    assert_eq!(Superblock::decode(&bytes), Decoded::Valid(superblock));
    bytes[8] = 9;
    assert_eq!(Superblock::decode(&bytes), Decoded::OtherVersion(9));
}

/// Case 6: a header that became another key's, slab's or generation's, with a checksum of its own
/// that is sound, does not fit the payload any more.
#[test]
fn case_6_a_payload_checksum_is_bound_to_key_slab_and_generation() {
    let record = version_1();
    let bytes = record.encode();
    let last_bytes = [("namespace", 63), ("key", 95), ("slab", 152), ("generation", 168)];
    for (what, at) in last_bytes {
        let mut forged = bytes;
        forged[at] ^= if what == "slab" { 1 } else { 0x40 };
        let crc = crc32c::crc32c_append(crc32c::crc32c(&forged[..12]), &forged[16..]);
        forged[12..16].copy_from_slice(&crc.to_le_bytes());
        let decoded = RecordHeader::decode(&forged).valid().expect("its own checksum is sound");
        assert_ne!(decoded.checksum, record.checksum, "{what}");
    }
}

/// The bytes of format version 1: a change here is a change of the format and bumps its version.
#[test]
fn the_bytes_of_version_1_do_not_change() {
    let digest = blake3::hash(&version_1().encode());
    assert_eq!(digest.to_hex().as_str(), RECORD_V1);
}

fn version_1() -> RecordHeader {
    RecordHeader {
        store: [1; 16],
        namespace: NamespaceId([2; 32]),
        key: BlockKey([3; 32]),
        parent: Some(BlockKey([4; 32])),
        segment: 5,
        slot: 6,
        class_epoch: 7,
        info: BlockInfo {
            depth: 8,
            tokens: 9,
            chunk_end: true,
            computed: ComputedBy::Decode,
            block_type: BlockType::Tool,
        },
        coordinate: (0, 1),
        slab: 1,
        parts: 3,
        put_id: 10,
        generation: 11,
        stored_unix_ns: 12,
        payload_bytes: 13,
        checksum: 14,
        tenant: [15; 16],
    }
}

const RECORD_V1: &str = "f6c1605c6ba0794002207d3c2b47120481c77bed81a7929a0da5375c5f250d8b";
