//! Page-aligned heap memory, and what a write may own.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;

use tiered_kv_types::{Error, ErrorKind, Result};

use crate::PAGE_BYTES;
use crate::arena::Slot;

/// A page-aligned, zeroed heap buffer of whole pages.
pub struct AlignedBuf {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer is owned memory without interior mutability; it may move to another thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A zeroed buffer of `len` bytes.
    ///
    /// # Errors
    /// `InvalidArgument` where `len` is zero or no multiple of a page, `NoSpace` without memory.
    pub fn new(len: usize) -> Result<Self> {
        const OP: &str = "allocate buffer";
        let page = PAGE_BYTES as usize;
        if len == 0 || !len.is_multiple_of(page) {
            let context = format!("len {len}: give a positive multiple of {page} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, OP, context));
        }
        let layout = Layout::from_size_align(len, page).map_err(|err| {
            Error::new(ErrorKind::InvalidArgument, OP, format!("len {len} is too large"))
                .with_source(err)
        })?;
        // SAFETY: the layout has a size above zero, as checked.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, OP, format!("no memory for {len} bytes"))
        })?;
        Ok(Self { start, layout })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is an allocation of this size, initialised, and borrowed with self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.layout.size()).finish()
    }
}

/// Bytes that a write owns until it ends.
///
/// The slice stays valid and unchanged for as long as the value is borrowed, which the borrow
/// checker ensures; so an engine that holds the value may hand the address to the kernel.
pub trait ReadBuf: Send + Sync + 'static {
    /// The bytes to write.
    fn as_slice(&self) -> &[u8];
}

impl ReadBuf for AlignedBuf {
    fn as_slice(&self) -> &[u8] {
        self.as_slice()
    }
}

impl ReadBuf for Slot {
    fn as_slice(&self) -> &[u8] {
        self.as_slice()
    }
}

impl ReadBuf for Vec<u8> {
    fn as_slice(&self) -> &[u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_aligned_and_zeroed() {
        let mut buf = AlignedBuf::new(3 * 4096).expect("memory for three pages");
        assert_eq!(buf.as_slice().as_ptr() as usize % 4096, 0);
        assert!(buf.as_slice().iter().all(|&byte| byte == 0));
        buf.as_mut_slice()[12_287] = 7;
        assert_eq!(buf.as_slice()[12_287], 7);
    }

    #[test]
    fn buffer_of_a_wrong_length_is_refused() {
        for len in [0, 1, 4095, 4097, usize::MAX - 4095] {
            let err = AlignedBuf::new(len).expect_err("not a usable length");
            assert_eq!(err.kind(), ErrorKind::InvalidArgument, "{len}");
        }
    }
}
