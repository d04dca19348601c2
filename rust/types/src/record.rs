//! The bytes on a durable tier, drawn in `docs/format.md`: superblock, segment header, record
//! header.
//!
//! All integers are little-endian. Each structure begins with a magic, the format version and a
//! crc32c over everything else in it, so that a damaged one is told from an empty and from a
//! foreign one.

use crate::key::BlockKey;
use crate::namespace::NamespaceId;
use crate::tier::{BlockInfo, BlockType};
use std::iter::once;

/// Version of everything written to a durable tier. A change of the bytes bumps it.
pub const FORMAT_VERSION: u32 = 1;
/// Bytes of one encoded [`RecordHeader`]: one sector, so that writing one never tears another.
pub const RECORD_BYTES: usize = 512;
/// Bytes of one encoded [`SegmentHeader`].
pub const SEGMENT_HEADER_BYTES: usize = 4096;
/// Bytes of one encoded [`Superblock`].
pub const SUPERBLOCK_BYTES: usize = 4096;
/// The payload checksum algorithm in use: crc32c.
pub const CHECKSUM_CRC32C: u8 = 1;

const RECORD_MAGIC: &[u8; 8] = b"TKVREC01";
const SEGMENT_MAGIC: &[u8; 8] = b"TKVSEG01";
const SUPERBLOCK_MAGIC: &[u8; 8] = b"TKVSUP01";

/// What the bytes of a structure turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded<T> {
    /// All zero: never written, or cleared.
    Empty,
    /// Sound.
    Valid(T),
    /// Written by another format version.
    OtherVersion(u32),
    /// Neither empty nor sound.
    Damaged,
}

impl<T> Decoded<T> {
    /// Goes on with a sound structure; every other answer stays as it is.
    pub(crate) fn then<U>(self, next: impl FnOnce(T) -> Decoded<U>) -> Decoded<U> {
        match self {
            Self::Valid(value) => next(value),
            Self::Empty => Decoded::Empty,
            Self::OtherVersion(version) => Decoded::OtherVersion(version),
            Self::Damaged => Decoded::Damaged,
        }
    }

    /// The structure, where it is sound.
    pub fn valid(self) -> Option<T> {
        match self {
            Self::Valid(value) => Some(value),
            _ => None,
        }
    }
}

/// Describes one slab in one slot of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// The store that wrote it.
    pub store: [u8; 16],
    /// Namespace of the block.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: BlockKey,
    /// Key of the block before it, if it has one.
    pub parent: Option<BlockKey>,
    /// Number of the segment it lies in.
    pub segment: u32,
    /// Number of the slot it lies in.
    pub slot: u32,
    /// How often the segment had changed its size class.
    pub class_epoch: u32,
    /// Depth, tokens, flags and type.
    pub info: BlockInfo,
    /// Layer group and head group of the slab.
    pub coordinate: (u16, u16),
    /// Number of the slab in its block.
    pub slab: u16,
    /// Mask of the slabs that make the whole block.
    pub parts: u64,
    /// The put that stored it; all slabs of one put share it.
    pub put_id: u64,
    /// Generation of the key; the newest wins.
    pub generation: u64,
    /// When it was stored, in nanoseconds since 1970.
    pub stored_unix_ns: u64,
    /// Payload bytes.
    pub payload_bytes: u64,
    /// Payload checksum, by `CHECKSUM_CRC32C`; stored bound to namespace, key, slab, generation.
    pub checksum: u32,
    /// Digest of the tenant that pays for it, zero for none.
    pub tenant: [u8; 16],
}

use crate::codec::{Writer, array, triage, u16_at, u32_at, u64_at, unused};
use crate::layout::MAX_BLOCK_BYTES;

pub(crate) const FLAG_PARENT: u8 = 0x80;
impl RecordHeader {
    /// The header's 512 bytes.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut out = [0; RECORD_BYTES];
        let mut w = Writer(&mut out);
        w.put(16, &self.store);
        w.put(32, &self.namespace.0);
        w.put(64, &self.key.0);
        let mut flags = self.info.flags();
        if let Some(parent) = &self.parent {
            w.put(96, &parent.0);
            flags |= FLAG_PARENT;
        }
        w.put(128, &self.segment.to_le_bytes());
        w.put(132, &self.slot.to_le_bytes());
        w.put(136, &self.class_epoch.to_le_bytes());
        w.put(140, &self.info.depth.to_le_bytes());
        w.put(144, &self.info.tokens.to_le_bytes());
        w.put(148, &self.coordinate.0.to_le_bytes());
        w.put(150, &self.coordinate.1.to_le_bytes());
        w.put(152, &self.slab.to_le_bytes());
        w.put(156, &[self.info.block_type as u8, flags, CHECKSUM_CRC32C]);
        w.put(160, &self.put_id.to_le_bytes());
        w.put(168, &self.generation.to_le_bytes());
        w.put(176, &self.stored_unix_ns.to_le_bytes());
        w.put(184, &self.payload_bytes.to_le_bytes());
        w.put(192, &u64::from(self.checksum ^ self.binding()).to_le_bytes());
        w.put(200, &self.parts.to_le_bytes());
        w.put(208, &self.tenant);
        w.seal(RECORD_MAGIC);
        out
    }

    /// Reads a header; anything that is not one is told apart, nothing panics.
    pub fn decode(bytes: &[u8]) -> Decoded<Self> {
        triage(bytes, RECORD_MAGIC, RECORD_BYTES).then(|()| {
            let flags = bytes[157];
            let checksum = u64_at(bytes, 192);
            let slab = u16_at(bytes, 152);
            let parts = u64_at(bytes, 200);
            let known_slab = slab < 64 && parts & (1 << slab) != 0;
            let Ok(checksum) = u32::try_from(checksum) else { return Decoded::Damaged };
            let payload_bytes = u64_at(bytes, 184);
            let block_type = BlockType::from_u8(bytes[156]);
            let known = bytes[158] == CHECKSUM_CRC32C
                && known_slab
                && Self::may_be_payload(payload_bytes)
                && block_type as u8 == bytes[156]
                && flags & !(FLAG_PARENT | BlockInfo::FLAGS) == 0;
            let parent = if flags & FLAG_PARENT == 0 { 96..128 } else { 0..0 };
            if !known || !unused(bytes, [parent, 154..156, 159..160, 224..RECORD_BYTES]) {
                return Decoded::Damaged;
            }
            let info = BlockInfo {
                depth: u32_at(bytes, 140),
                tokens: u32_at(bytes, 144),
                block_type,
                ..BlockInfo::default()
            };
            let mut record = Self {
                store: array(bytes, 16),
                namespace: NamespaceId(array(bytes, 32)),
                key: BlockKey(array(bytes, 64)),
                parent: (flags & FLAG_PARENT != 0).then(|| BlockKey(array(bytes, 96))),
                segment: u32_at(bytes, 128),
                slot: u32_at(bytes, 132),
                class_epoch: u32_at(bytes, 136),
                info: info.with_flags(flags),
                coordinate: (u16_at(bytes, 148), u16_at(bytes, 150)),
                slab,
                parts,
                put_id: u64_at(bytes, 160),
                generation: u64_at(bytes, 168),
                stored_unix_ns: u64_at(bytes, 176),
                payload_bytes,
                checksum,
                tenant: array(bytes, 208),
            };
            record.checksum ^= record.binding();
            Decoded::Valid(record)
        })
    }

    /// Whether a payload may have so many bytes.
    pub(crate) fn may_be_payload(bytes: u64) -> bool {
        (1..=MAX_BLOCK_BYTES).contains(&bytes)
    }

    /// What the payload's checksum is stored with: a mix of whose payload it is. A header whose
    /// namespace, key, slab or generation became another's, even with a sound checksum of its own,
    /// no longer fits the payload. Multiplied, since a crc of them would be blind to the same
    /// changes as the header's crc.
    pub(crate) fn binding(&self) -> u32 {
        let mut mix = BINDING_SEED;
        let mut take = |word: u64| {
            mix = (mix ^ word).wrapping_mul(BINDING_FACTOR);
            mix ^= mix >> 32;
        };
        for bytes in [&self.namespace.0, &self.key.0] {
            (0..4).for_each(|word| take(u64_at(bytes, word * 8)));
        }
        take(u64::from(self.slab));
        take(self.generation);
        (mix ^ (mix >> 32)) as u32
    }
}

/// Of the mix that binds a payload's checksum: odd, so that multiplying loses nothing.
const BINDING_SEED: u64 = 0x5bd1_e995_7f4a_7c15;
const BINDING_FACTOR: u64 = 0x9e6c_63d0_876a_68e5;

/// First page of a segment file: one size class of slots, with their header table behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store that wrote it.
    pub store: [u8; 16],
    /// Number of the segment.
    pub segment: u32,
    /// How often it has changed its size class.
    pub class_epoch: u32,
    /// Bytes of one slot, a multiple of 4 KiB.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slots: u32,
    /// Bytes from one record header to the next in the table.
    pub header_stride: u32,
    /// Bytes of the whole file.
    pub segment_bytes: u64,
    /// Where the first slot begins.
    pub data_offset: u64,
}

impl SegmentHeader {
    /// The header's page.
    pub fn encode(&self) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut out = [0; SEGMENT_HEADER_BYTES];
        let mut w = Writer(&mut out);
        w.put(16, &self.store);
        w.put(32, &self.segment.to_le_bytes());
        w.put(36, &self.class_epoch.to_le_bytes());
        w.put(40, &self.slot_bytes.to_le_bytes());
        w.put(48, &self.slots.to_le_bytes());
        w.put(52, &self.header_stride.to_le_bytes());
        w.put(56, &self.segment_bytes.to_le_bytes());
        w.put(64, &self.data_offset.to_le_bytes());
        w.seal(SEGMENT_MAGIC);
        out
    }

    /// Reads a segment header; the geometry is the reader's to check.
    pub fn decode(bytes: &[u8]) -> Decoded<Self> {
        triage(bytes, SEGMENT_MAGIC, SEGMENT_HEADER_BYTES).then(|()| {
            if !unused(bytes, once(72..SEGMENT_HEADER_BYTES)) {
                return Decoded::Damaged;
            }
            Decoded::Valid(Self {
                store: array(bytes, 16),
                segment: u32_at(bytes, 32),
                class_epoch: u32_at(bytes, 36),
                slot_bytes: u64_at(bytes, 40),
                slots: u32_at(bytes, 48),
                header_stride: u32_at(bytes, 52),
                segment_bytes: u64_at(bytes, 56),
                data_offset: u64_at(bytes, 64),
            })
        })
    }
}

/// Identity and geometry of a store directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Random identity of the store.
    pub store: [u8; 16],
    /// Which of the store's drives the directory is.
    pub drive: u32,
    /// Bytes of every segment file.
    pub segment_bytes: u64,
    /// Bytes from one record header to the next.
    pub header_stride: u32,
    /// When it was created, in nanoseconds since 1970.
    pub created_unix_ns: u64,
}

impl Superblock {
    /// The superblock's page.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut out = [0; SUPERBLOCK_BYTES];
        let mut w = Writer(&mut out);
        w.put(16, &self.store);
        w.put(32, &self.drive.to_le_bytes());
        w.put(36, &self.header_stride.to_le_bytes());
        w.put(40, &self.segment_bytes.to_le_bytes());
        w.put(48, &self.created_unix_ns.to_le_bytes());
        w.seal(SUPERBLOCK_MAGIC);
        out
    }

    /// Reads a superblock.
    pub fn decode(bytes: &[u8]) -> Decoded<Self> {
        triage(bytes, SUPERBLOCK_MAGIC, SUPERBLOCK_BYTES).then(|()| {
            if !unused(bytes, once(56..SUPERBLOCK_BYTES)) {
                return Decoded::Damaged;
            }
            Decoded::Valid(Self {
                store: array(bytes, 16),
                drive: u32_at(bytes, 32),
                header_stride: u32_at(bytes, 36),
                segment_bytes: u64_at(bytes, 40),
                created_unix_ns: u64_at(bytes, 48),
            })
        })
    }
}
