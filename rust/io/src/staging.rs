//! A few buffers that loads pass through, used again while the processor's cache still has them.
//!
//! Where the device's part of a read is a copy, as a virtual disk and the page cache make it, one
//! into memory that was not touched for long can cost more than one into a buffer that the cache
//! has. The bytes are copied to where they belong in the pass that computes their checksum, which
//! has to touch them anyway.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::arena::{Arena, ArenaConfig, SlotMut};
use crate::mapping::HUGE_BYTES;

/// Bytes of a buffer: those of one call that reads, and of a huge page.
pub(crate) const STAGED_BYTES: usize = HUGE_BYTES;

/// Buffers to be lent.
pub(crate) struct Staging {
    /// The last one given back is the next to be taken.
    free: Mutex<Vec<SlotMut>>,
}

impl Staging {
    /// `n` buffers: memory like that of blocks, had now, kept out of dumps and from the writes of
    /// children. None where it is not to be had, which costs speed only.
    pub(crate) fn new(n: usize) -> Arc<Self> {
        let bytes = STAGED_BYTES as u64;
        let config = ArenaConfig { field: "load_threads", ..ArenaConfig::new(n as u64 * bytes) };
        let arena = Arena::new(config);
        let free = match arena {
            Ok(arena) => (0..n as u64).filter_map(|at| arena.take(at * bytes, bytes)).collect(),
            Err(err) => {
                tracing::debug!(%err, "loads go without buffers");
                Vec::new()
            }
        };
        Arc::new(Self { free: Mutex::new(free) })
    }

    /// A buffer; `None` where all are lent.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Lent> {
        let buf = self.free.lock().pop()?;
        Some(Lent { buf: Some(buf), home: Arc::clone(self) })
    }
}

/// A buffer that goes back when it is dropped.
pub(crate) struct Lent {
    /// There until the drop.
    buf: Option<SlotMut>,
    home: Arc<Staging>,
}

impl Lent {
    /// The bytes, to be written.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.buf.as_mut().map_or(&mut [], SlotMut::as_mut_slice)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.home.free.lock().extend(self.buf.take());
    }
}

/// What one request has read of a lent buffer.
pub(crate) struct Staged {
    pub(crate) lent: Arc<Lent>,
    pub(crate) range: Range<usize>,
}

impl Staged {
    /// The bytes that were read.
    pub(crate) fn as_slice(&self) -> &[u8] {
        let bytes: &[u8] = self.lent.buf.as_ref().map_or(&[], |buf| buf.as_slice());
        &bytes[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_and_there_are_no_more_than_said() {
        let staging = Staging::new(2);
        let mut first = staging.take().expect("two are left");
        let address = first.as_mut_slice().as_ptr();
        assert_eq!(first.as_mut_slice().len(), STAGED_BYTES);
        let second = staging.take().expect("one is left");
        assert!(staging.take().is_none(), "both are lent");
        drop(second);
        drop(first);
        let mut again = staging.take().expect("both are back");
        assert_eq!(again.as_mut_slice().as_ptr(), address, "the last that came back");
        assert!(staging.take().is_some());
    }

    #[test]
    fn without_memory_there_are_no_buffers() {
        assert!(Staging::new(1 << 26).take().is_none(), "128 TiB");
    }
}
