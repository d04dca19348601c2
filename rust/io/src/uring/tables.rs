//! The files and the memory that the ring knows beforehand.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak};

use io_uring::IoUring;

use crate::arena::{Arena, MappedExtent};
use crate::disk::{DataFile, FileId};
use crate::engine::Registration;
use crate::region::Region;

/// Files that are registered at once; others work too, a little slower.
const FILES: u32 = 512;
/// Places for the memory of regions, beside the arena's.
const REGION_PLACES: u32 = 256;
/// The kernel registers at most so much as one buffer, in bytes.
const BUFFER_BYTES: usize = 1 << 30;

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

/// Registered memory: the arena's, and that of regions.
pub(super) struct BufferTable {
    extents: Vec<MappedExtent>,
    /// The places of each region, one for every piece of [`BUFFER_BYTES`].
    regions: HashMap<u64, Vec<u16>>,
    free: Vec<u16>,
    /// Why regions cannot be registered, where they cannot.
    refusal: Option<String>,
}

fn iovec(address: usize, len: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len }
}

impl BufferTable {
    /// Registers the arena's extents, or none of them and why, with places for regions where the
    /// kernel can. The arena must live as long as the ring: another mapping at its addresses would
    /// be taken for it.
    pub(super) fn register(ring: &IoUring, arena: &Arena) -> (Self, io::Result<()>) {
        let extents = arena.mapped();
        let buffers: Vec<_> = extents.iter().map(|e| iovec(e.writable, e.len)).collect();
        let n = u32::try_from(buffers.len()).unwrap_or(u32::MAX);
        let mut table = Self { extents, regions: HashMap::new(), free: Vec::new(), refusal: None };
        let submitter = ring.submitter();
        let sparse = submitter.register_buffers_sparse(n.saturating_add(REGION_PLACES));
        let registered = match &sparse {
            Ok(()) if buffers.is_empty() => Ok(()),
            // SAFETY: the extents are mapped, and the ring's owner keeps the arena until the ring
            // is gone; the kernel writes into them only for operations that own their slots.
            Ok(()) => unsafe { submitter.register_buffers_update(0, &buffers, None) },
            Err(_) if buffers.is_empty() => Ok(()),
            // SAFETY: as above.
            Err(_) => unsafe { submitter.register_buffers(&buffers) },
        };
        match sparse {
            Ok(()) => {
                let places = (n..n.saturating_add(REGION_PLACES)).rev();
                table.free = places.filter_map(|place| u16::try_from(place).ok()).collect();
            }
            Err(err) => table.refusal = Some(format!("this kernel adds no buffers later ({err})")),
        }
        if registered.is_err() {
            table.extents.clear();
        }
        (table, registered)
    }

    /// Registers a region's memory, all of it or nothing.
    pub(super) fn add(&mut self, ring: &IoUring, region: &Region) -> Registration {
        if let Some(why) = &self.refusal {
            return Registration::Refused(why.clone());
        }
        let pieces = region.bytes().div_ceil(BUFFER_BYTES);
        if pieces > self.free.len() {
            return Registration::Refused("the ring's table of buffers is full".into());
        }
        let mut places = Vec::with_capacity(pieces);
        for piece in 0..pieces {
            let at = piece * BUFFER_BYTES;
            let buffer = iovec(region.address() + at, BUFFER_BYTES.min(region.bytes() - at));
            let place = self.free.pop().expect("counted above");
            places.push(place);
            // SAFETY: the memory lives as long as the region, which the caller holds. The kernel
            // writes into it only for operations that own a part of it; once the region is gone its
            // number is found no more, whatever is mapped at its addresses.
            let updated = unsafe {
                ring.submitter().register_buffers_update(u32::from(place), &[buffer], None)
            };
            if let Err(err) = updated {
                places.into_iter().for_each(|place| self.vacate(ring, place));
                let hint = match err.raw_os_error() {
                    Some(libc::ENOMEM) => ": raise the limit of locked memory, ulimit -l",
                    _ => "",
                };
                return Registration::Refused(format!(
                    "the region is not registered ({err}{hint})"
                ));
            }
        }
        self.regions.insert(region.number(), places);
        Registration::Done
    }

    /// Takes a region out that is gone.
    pub(super) fn forget(&mut self, ring: &IoUring, number: u64) {
        for place in self.regions.remove(&number).unwrap_or_default() {
            self.vacate(ring, place);
        }
    }

    fn vacate(&mut self, ring: &IoUring, place: u16) {
        // SAFETY: an empty buffer is no memory.
        let emptied = unsafe {
            ring.submitter().register_buffers_update(u32::from(place), &[iovec(0, 0)], None)
        };
        match emptied {
            Ok(()) => self.free.push(place),
            Err(err) => tracing::error!(%err, "a region that is gone keeps its pages locked"),
        }
    }

    /// The registered buffer that holds these bytes of a region, if one does.
    pub(super) fn find_in(&self, region: &Region, address: usize, len: usize) -> Option<u16> {
        let at = address - region.address();
        let piece = at / BUFFER_BYTES;
        let one = len > 0 && (at + len - 1) / BUFFER_BYTES == piece;
        let places = self.regions.get(&region.number()).filter(|_| one)?;
        places.get(piece).copied()
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
        let table = BufferTable {
            extents: vec![extent(1000, 5000), extent(2000, 6000)],
            regions: HashMap::new(),
            free: Vec::new(),
            refusal: None,
        };
        assert_eq!(table.find(1000, 100), (Some(0), 1000));
        assert_eq!(table.find(5040, 60), (Some(0), 1040));
        assert_eq!(table.find(6099, 1), (Some(1), 2099));
        for (address, len) in [(999, 1), (1040, 61), (1100, 1), (6000, 101), (usize::MAX, 1)] {
            assert_eq!(table.find(address, len), (None, address), "{address}+{len}");
        }
    }
}
