//! Reading and writing the common head of every structure, and integers.

use crate::record::{Decoded, FORMAT_VERSION};
use std::ops::Range;

/// As many as the longest structure has bytes.
static ZEROS: [u8; 4096] = [0; 4096];

pub(crate) struct Writer<'a>(pub(crate) &'a mut [u8]);

impl Writer<'_> {
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn seal(self, magic: &[u8; 8]) {
        self.0[..8].copy_from_slice(magic);
        self.0[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        let crc = seal_crc(self.0);
        self.0[12..16].copy_from_slice(&crc.to_le_bytes());
    }
}

fn seal_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..])
}

pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Whether all of these bytes are zero, as what a structure does not use has to be: one that reads
/// back is written with the very same bytes.
pub(crate) fn unused(bytes: &[u8], ranges: impl IntoIterator<Item = Range<usize>>) -> bool {
    ranges.into_iter().all(|range| bytes[range.clone()] == ZEROS[..range.len()])
}

/// Sorts a structure into empty, other version, damaged, or sound (`Valid(())`).
pub(crate) fn triage(bytes: &[u8], magic: &[u8; 8], len: usize) -> Decoded<()> {
    if bytes.len() < len {
        return Decoded::Damaged;
    }
    let bytes = &bytes[..len];
    if bytes.iter().all(|b| *b == 0) {
        return Decoded::Empty;
    }
    if &bytes[..8] != magic {
        return Decoded::Damaged;
    }
    let version = u32_at(bytes, 8);
    if version != FORMAT_VERSION {
        return Decoded::OtherVersion(version);
    }
    if u32_at(bytes, 12) != seal_crc(bytes) {
        return Decoded::Damaged;
    }
    Decoded::Valid(())
}
