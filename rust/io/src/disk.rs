//! The files of one store directory, as the store sees them.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tiered_kv_types::{Error, ErrorKind, Result};

/// A file that a [`Disk`] has open. Ids are never used twice by one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// What positions, lengths and addresses must be multiples of, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of addresses in memory. Other addresses work, through a copy.
    pub memory: u32,
    /// Of positions and lengths in a file. Others are refused.
    pub offset: u32,
}

/// An open data file: its descriptor stays open for as long as anything holds this.
#[derive(Debug)]
pub struct DataFile {
    file: File,
    bytes: u64,
}

impl DataFile {
    /// An open file of `bytes`, which no write goes beyond.
    pub fn new(file: File, bytes: u64) -> Self {
        Self { file, bytes }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The length that the file was opened with, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Refuses a write beyond the end: growing would allocate behind the quota.
    pub(crate) fn check_write(&self, offset: u64, len: usize) -> io::Result<()> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl AsFd for DataFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Gives the descriptors behind a [`Disk`]'s data files.
pub trait Descriptors {
    /// An open data file. Operations through its descriptor must do as the disk's calls do: on the
    /// alignment, and not beyond the end. Let go of it once they have ended, since a removed file
    /// occupies its space until then.
    ///
    /// # Errors
    /// `NotFound` for a file that is not open.
    fn data_file(&self, file: FileId) -> io::Result<Arc<DataFile>>;
}

/// Blocking primitives on the files of one store directory.
///
/// Names are plain: 1 to 200 bytes, no `/`, no NUL, no leading dot. Small files are read and
/// replaced whole; data files are created at their full size and then read and written in place.
pub trait Disk: Send + Sync + 'static {
    /// A short name of the implementation.
    fn name(&self) -> &'static str;

    /// What data files ask of positions and addresses.
    fn alignment(&self) -> Alignment;

    /// Whether data files bypass the page cache.
    fn is_direct(&self) -> bool;

    /// Why they do or do not.
    fn direct_reason(&self) -> String;

    /// The regular files, sorted by name, with the bytes that each occupies.
    ///
    /// # Errors
    /// The operating system's.
    fn list(&self) -> Result<Vec<(String, u64)>>;

    /// The whole of a small file, or `None` where there is none.
    ///
    /// # Errors
    /// `FormatMismatch` for a file of more than `max_bytes`; otherwise the operating system's.
    fn read_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>>;

    /// Replaces a small file: after a crash it is the old one or the new one. Durable on return.
    ///
    /// # Errors
    /// `NoSpace`, or the operating system's; the old file is then still there.
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Deletes a file, durably. Operations on it under way end as if it were still there; later
    /// ones fail.
    ///
    /// # Errors
    /// `NotFound`, or the operating system's.
    fn remove(&self, name: &str) -> Result<()>;

    /// Creates a data file of `bytes` zeros, all of it allocated, durably.
    ///
    /// # Errors
    /// `NoSpace`; or the operating system's, also where the file exists. No part of it stays.
    fn create(&self, name: &str, bytes: u64) -> Result<FileId>;

    /// Opens a data file; returns its id, the same each time, and its length in bytes.
    ///
    /// # Errors
    /// `NotFound`, or the operating system's.
    fn open(&self, name: &str) -> Result<(FileId, u64)>;

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `InvalidInput` for a position or length off the alignment, `UnexpectedEof` beyond the end,
    /// or the device's. What `buf` then holds is not to be used.
    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes `buf` at `offset`; durable after [`Disk::sync`].
    ///
    /// # Errors
    /// As `read_at`, also beyond the end: data files do not grow. Any part of `buf` may have been
    /// written.
    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Fills `bufs`, one after the other, from `offset`. They may be used up.
    ///
    /// # Errors
    /// As `read_at`; what any of `bufs` then holds is not to be used.
    fn read_vectored_at(
        &self,
        file: FileId,
        mut offset: u64,
        bufs: &mut [IoSliceMut<'_>],
    ) -> io::Result<()> {
        for buf in bufs {
            self.read_at(file, offset, buf)?;
            offset += buf.len() as u64;
        }
        Ok(())
    }

    /// Writes `bufs`, one after the other, at `offset`. They may be used up.
    ///
    /// # Errors
    /// As `write_at`; any part of any of `bufs` may have been written.
    fn write_vectored_at(
        &self,
        file: FileId,
        mut offset: u64,
        bufs: &mut [IoSlice<'_>],
    ) -> io::Result<()> {
        for buf in bufs {
            self.write_at(file, offset, buf)?;
            offset += buf.len() as u64;
        }
        Ok(())
    }

    /// Makes the completed writes of a file durable.
    ///
    /// # Errors
    /// The device's; it is then unknown which of the writes are durable.
    fn sync(&self, file: FileId) -> io::Result<()>;

    /// The descriptors behind the data files. `None` where `read_at`, `write_at` and `sync` do more
    /// than the operating system's calls, so that nobody may pass them by.
    fn descriptors(&self) -> Option<&dyn Descriptors> {
        None
    }
}

/// Refuses names that are not plain.
pub(crate) fn check_name(op: &'static str, name: &str) -> Result<()> {
    let plain = !name.is_empty()
        && name.len() <= 200
        && !name.starts_with('.')
        && !name.contains(['/', '\0']);
    if plain {
        return Ok(());
    }
    let context = format!("file name {name:?}: give 1 to 200 bytes without '/' and leading dot");
    Err(Error::new(ErrorKind::InvalidArgument, op, context))
}

/// Refuses a range off the alignment.
pub(crate) fn check_range(alignment: Alignment, offset: u64, len: usize) -> io::Result<()> {
    let unit = u64::from(alignment.offset);
    if offset.is_multiple_of(unit) && (len as u64).is_multiple_of(unit) {
        return Ok(());
    }
    let text = format!("offset {offset} and length {len} must be multiples of {unit}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// What of a short transfer counts, so that the rest begins on the alignment again.
pub(crate) fn usable(unit: Alignment, done: usize, wanted: usize) -> usize {
    if done == wanted { done } else { done - done % unit.offset as usize }
}

/// The error of an operation on a file that is not open.
pub(crate) fn not_open(file: FileId) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("file {} is not open", file.0))
}

/// The error of a small file beyond its bound.
pub(crate) fn too_large(op: &'static str, name: &str, max_bytes: u64) -> Error {
    let context = format!("file {name} has more than {max_bytes} bytes: it is not this store's");
    Error::new(ErrorKind::FormatMismatch, op, context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_pass() {
        for name in ["LOCK", "seg-0001", "a.b", &"x".repeat(200)] {
            check_name("test", name).expect(name);
        }
        for name in ["", ".", "..", ".tmp", "a/b", "../x", "a\0b", &"x".repeat(201)] {
            let err = check_name("test", name).expect_err(name);
            assert_eq!(err.kind(), ErrorKind::InvalidArgument);
        }
    }
}
