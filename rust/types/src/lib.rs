//! What the other crates agree on: identity, layout, records, configuration and errors.
//!
//! Nothing here does I/O, reads a clock or draws a random number.
#![forbid(unsafe_code)]

pub mod checkpoint;
mod codec;
pub mod config;
mod cpus;
pub mod error;
pub mod key;
pub mod layout;
pub mod learned;
pub mod namespace;
pub mod record;
mod size;
mod tenant;
pub mod tier;
pub mod tombstone;

pub use checkpoint::{Checkpoint, CheckpointRows};
pub use config::{EvictionPolicy, IoBackend, OnFormatMismatch, StoreConfig};
pub use cpus::CpuList;
pub use error::{Error, ErrorKind, Result, Retry};
pub use key::{BlockKey, KEY_BYTES};
pub use layout::{KvLayout, MAX_SLABS};
pub use namespace::{NamespaceId, NamespaceSpec};
pub use record::{FORMAT_VERSION, RecordHeader, SegmentHeader, Superblock};
pub use tenant::TenantId;
pub use tier::{BlockInfo, BlockType, ComputedBy, MissReason, Tier};
pub use tombstone::{Buried, Tombstone};

/// The unit of every size on memory and disk: 4 KiB, nothing else.
pub const PAGE_BYTES: u64 = 4096;

/// `bytes` rounded up to a whole number of pages.
///
/// Saturates at the largest multiple of a page instead of wrapping.
pub const fn round_up_to_page(bytes: u64) -> u64 {
    match bytes.checked_add(PAGE_BYTES - 1) {
        Some(sum) => sum & !(PAGE_BYTES - 1),
        None => !(PAGE_BYTES - 1),
    }
}

/// Bytes as lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(bytes.len() * 2);
    for b in bytes {
        out.push(char::from(DIGITS[usize::from(b >> 4)]));
        out.push(char::from(DIGITS[usize::from(b & 15)]));
    }
    out
}
