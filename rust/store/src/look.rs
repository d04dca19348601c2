//! What a store's directory says to whoever only looks.

use crate::directory::{CHECKPOINT, MAX_JOURNAL_PAGES, SUPERBLOCK, read_journal};
use tiered_kv_io::Disk;
use tiered_kv_types::checkpoint::MAX_CHECKPOINT_BYTES;
use tiered_kv_types::record::{Decoded, SUPERBLOCK_BYTES};
use tiered_kv_types::{ErrorKind, FORMAT_VERSION, PAGE_BYTES, Result, Superblock, Tombstone};

/// The superblock of a directory, or why there is none that could be believed.
pub(crate) fn superblock_in(disk: &dyn Disk) -> Result<std::result::Result<Superblock, String>> {
    let found = match disk.read_file(SUPERBLOCK, SUPERBLOCK_BYTES as u64) {
        Err(err) if err.kind() == ErrorKind::FormatMismatch => Some(vec![0xff]),
        other => other?,
    };
    let pages = |bytes: u64| bytes > 0 && bytes.is_multiple_of(PAGE_BYTES);
    Ok(match found.as_deref().map(Superblock::decode) {
        None => Err("is no store".to_owned()),
        Some(Decoded::Valid(s)) if pages(s.segment_bytes) && s.header_stride >= 512 => Ok(s),
        Some(Decoded::OtherVersion(version)) => Err(format!(
            "was written by format version {version}; this program reads version {FORMAT_VERSION}"
        )),
        Some(_) => Err("has a damaged superblock".to_owned()),
    })
}

/// The bytes of a checkpoint; too long a one is a damaged one.
pub(crate) fn checkpoint_in(disk: &dyn Disk) -> Result<Option<Vec<u8>>> {
    match disk.read_file(CHECKPOINT, MAX_CHECKPOINT_BYTES) {
        Err(err) if err.kind() == ErrorKind::FormatMismatch => Ok(Some(Vec::new())),
        other => other,
    }
}

/// Removes the checkpoint, where there is one.
pub(crate) fn take_away_checkpoint(disk: &dyn Disk) -> Result<()> {
    match disk.remove(CHECKPOINT) {
        Err(err) if err.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The tombstones in a directory's journal, and the pages up to the last one in use; none where
/// there is no journal.
pub(crate) fn journal_in(
    disk: &dyn Disk,
    name: &str,
    store: &[u8; 16],
) -> Result<(Vec<Tombstone>, u64)> {
    let (file, bytes) = match disk.open(name) {
        Err(err) if err.kind() == ErrorKind::NotFound => return Ok((Vec::new(), 0)),
        other => other?,
    };
    read_journal(disk, file, (bytes / PAGE_BYTES).min(MAX_JOURNAL_PAGES), store)
}
