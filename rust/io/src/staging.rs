//! A few buffers that loads pass through, used again while the processor's cache still has them.
//!
//! Where the device's part of a read is a copy, as a virtual disk and the page cache make it, one
//! into memory that was not touched for long can cost more than one into a buffer that the cache
//! has. The bytes are copied to where they belong in the pass that computes their checksum, which
//! has to touch them anyway.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::buf::AlignedBuf;
use crate::mapping::HUGE_BYTES;

/// Bytes of a buffer: those of one joined call, and of a huge page.
pub(crate) const STAGED_BYTES: usize = HUGE_BYTES;

/// Buffers to be lent.
pub(crate) struct Staging {
    state: Mutex<State>,
}

struct State {
    /// The last one given back is the next to be taken.
    free: Vec<AlignedBuf>,
    /// Buffers still to be made.
    left: usize,
}

impl Staging {
    /// At most `most` buffers, each made when it is first needed.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { free: Vec::new(), left: most }) })
    }

    /// A buffer; `None` where all are lent, or there is no memory for one.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Lent> {
        let mut state = self.state.lock();
        let free = state.free.pop();
        if free.is_none() {
            state.left = state.left.checked_sub(1)?;
        }
        drop(state);
        let buf = free.or_else(|| {
            let made = AlignedBuf::on_huge_pages(STAGED_BYTES).ok();
            if made.is_none() {
                self.state.lock().left += 1;
            }
            made
        });
        buf.map(|buf| Lent { buf: Some(buf), home: Arc::clone(self) })
    }
}

/// A buffer that goes back when it is dropped.
pub(crate) struct Lent {
    /// There until the drop.
    buf: Option<AlignedBuf>,
    home: Arc<Staging>,
}

impl Lent {
    /// The bytes, to be written.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.buf.as_mut().map_or(&mut [], AlignedBuf::as_mut_slice)
    }

    fn as_slice(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], AlignedBuf::as_slice)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.home.state.lock().free.extend(self.buf.take());
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
        &self.lent.as_slice()[self.range.clone()]
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
        assert!(staging.take().is_some() && staging.take().is_some());
    }
}
