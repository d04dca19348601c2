//! The files and the memory that the ring knows beforehand.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak};

use io_uring::IoUring;

use crate::arena::{Arena, MappedExtent};
use crate::disk::{DataFile, FileId};

/// Files that are registered at once; others work too, a little slower.
const FILES: u32 = 512;

/// Registered files. The kernel keeps a registered file, and so its space, after it was removed:
/// sweep before space is needed.
pub(super) struct FileTable {
    places: HashMap<FileId, (u32, Weak<DataFile>)>,
    free: Vec<u32>,
}

impl FileTable {
    /// A table without files, and why there is none where the kernel refuses.
    pub(super) fn register(ring: &IoUring) -> (Self, io::Result<()>) {
        let empty = vec![-1; FILES as usize];
        let registered = ring.submitter().register_files(&empty);
        let free = if registered.is_ok() { (0..FILES).rev().collect() } else { Vec::new() };
        (Self { places: HashMap::new(), free }, registered)
    }

    /// The place of a file, which gets one if any is free. It keeps it while `file` is held.
    pub(super) fn index(
        &mut self,
        ring: &IoUring,
        id: FileId,
        file: &Arc<DataFile>,
    ) -> Option<u32> {
        // A disk uses no id twice, so what is found is this file.
        if let Some(&(index, _)) = self.places.get(&id) {
            return Some(index);
        }
        self.sweep(ring);
        let index = self.free.pop()?;
        match ring.submitter().register_files_update(index, &[file.as_fd().as_raw_fd()]) {
            Ok(1) => {
                self.places.insert(id, (index, Arc::downgrade(file)));
                Some(index)
            }
            other => {
                tracing::debug!(?other, "a file stays unregistered");
                self.free.push(index);
                None
            }
        }
    }

    /// Unregisters the files that nobody else has open.
    pub(super) fn sweep(&mut self, ring: &IoUring) {
        let free = &mut self.free;
        self.places.retain(|_, (index, file)| {
            if file.strong_count() > 0 {
                return true;
            }
            match ring.submitter().register_files_update(*index, &[-1]) {
                Ok(1) => free.push(*index),
                other => tracing::error!(?other, "a removed file keeps its space until the end"),
            }
            false
        });
    }
}

/// The arena's memory, where it is registered.
pub(super) struct BufferTable {
    extents: Vec<MappedExtent>,
}

impl BufferTable {
    /// Registers the arena's extents, or none of them and why. The arena must live as long as the
    /// ring: another mapping at its addresses would be taken for it.
    pub(super) fn register(ring: &IoUring, arena: &Arena) -> (Self, io::Result<()>) {
        let extents = arena.mapped();
        if extents.is_empty() {
            return (Self { extents }, Ok(()));
        }
        let buffer = |extent: &MappedExtent| libc::iovec {
            iov_base: extent.writable as *mut libc::c_void,
            iov_len: extent.len,
        };
        let buffers: Vec<_> = extents.iter().map(buffer).collect();
        // SAFETY: the extents are mapped, and the ring's owner keeps the arena until the ring is
        // gone; the kernel writes into them only for operations that own their slots.
        match unsafe { ring.submitter().register_buffers(&buffers) } {
            Ok(()) => (Self { extents }, Ok(())),
            Err(err) => (Self { extents: Vec::new() }, Err(err)),
        }
    }

    /// The registered buffer that holds the bytes, and their address in it; or none, and the
    /// address as it is.
    ///
    /// Bytes seen through an extent's read-only mapping are found at their writable address: that
    /// one is registered, and the memory is the same.
    pub(super) fn find(&self, address: usize, len: usize) -> (Option<u16>, usize) {
        for (index, extent) in self.extents.iter().enumerate() {
            let Ok(index) = u16::try_from(index) else { break };
            for start in [extent.writable, extent.readable] {
                let at = address.wrapping_sub(start);
                if at < extent.len && len <= extent.len - at {
                    return (Some(index), extent.writable + at);
                }
            }
        }
        (None, address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_mappings_lead_to_the_registered_address_and_nothing_else_does() {
        let extent = |writable, readable| MappedExtent { writable, readable, len: 100 };
        let table = BufferTable { extents: vec![extent(1000, 5000), extent(2000, 6000)] };
        assert_eq!(table.find(1000, 100), (Some(0), 1000));
        assert_eq!(table.find(5040, 60), (Some(0), 1040));
        assert_eq!(table.find(6099, 1), (Some(1), 2099));
        for (address, len) in [(999, 1), (1040, 61), (1100, 1), (6000, 101), (usize::MAX, 1)] {
            assert_eq!(table.find(address, len), (None, address), "{address}+{len}");
        }
    }
}
