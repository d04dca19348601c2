//! Memory that a caller lends: registered once, cut into equal slots, each used by one at a time.
//!
//! A [`RegionSlot`] is the right to touch one slot. Whoever fills or reads it owns that right, a
//! kernel that still writes included, so that nobody finds a slot half written and nobody frees the
//! memory under it.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tiered_kv_types::{Error, ErrorKind, Result};

use crate::arena::SlotMut;
use crate::bitmap::PageBitmap;
use crate::buf::AlignedBuf;

const OP: &str = "register";

/// Memory that a region may be made of.
///
/// # Safety
/// The range must stay where it is, readable, writable and initialised, until the value is dropped,
/// wherever the value itself is moved. Until then nobody else may touch it, except where the region
/// says that a slot is free: a race there is the caller's.
pub unsafe trait RegionMemory: Send + 'static {
    /// Address and length in bytes. Asked for once.
    fn range(&mut self) -> (NonNull<u8>, usize);
}

// SAFETY: a vector's bytes stay in place while it is not changed, and whoever owns it does not.
unsafe impl RegionMemory for Vec<u8> {
    fn range(&mut self) -> (NonNull<u8>, usize) {
        (NonNull::new(self.as_mut_ptr()).expect("a vector's address is not null"), self.len())
    }
}

// SAFETY: the buffer is an allocation of its own, initialised, and freed when it is dropped.
unsafe impl RegionMemory for AlignedBuf {
    fn range(&mut self) -> (NonNull<u8>, usize) {
        let bytes = self.as_mut_slice();
        (NonNull::new(bytes.as_mut_ptr()).expect("an allocation"), bytes.len())
    }
}

/// Told once when a region is gone.
type OnGone = Box<dyn FnOnce() + Send>;

static NEXT_REGION: AtomicU64 = AtomicU64::new(0);

/// Memory cut into equal slots.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    slot_bytes: usize,
    stride: usize,
    slots: usize,
    /// The slots that somebody owns.
    used: PageBitmap,
    number: u64,
    closed: AtomicBool,
    on_gone: Mutex<Vec<OnGone>>,
    /// Only dropped, and after everything else.
    _memory: Box<dyn RegionMemory>,
}

// SAFETY: the memory is `Send` and only its owner's slot touches a part of it, which the bitmap
// gives to one at a time.
unsafe impl Send for Region {}
// SAFETY: as above; what is shared is the bitmap and the address.
unsafe impl Sync for Region {}

impl Region {
    /// A region of slots of `slot_bytes`, each `stride` bytes behind the one before.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field: no whole slot in the memory, slots that overlap.
    pub fn new(memory: impl RegionMemory, slot_bytes: usize, stride: usize) -> Result<Arc<Self>> {
        let mut memory: Box<dyn RegionMemory> = Box::new(memory);
        let (start, len) = memory.range();
        let bad = |text: String| Err(Error::new(ErrorKind::InvalidArgument, OP, text));
        if slot_bytes == 0 || slot_bytes > len {
            return bad(format!(
                "`slot_bytes` is {slot_bytes} and the memory has {len} bytes: give a block's bytes"
            ));
        }
        if stride < slot_bytes {
            return bad(format!("`stride` is {stride}: give `slot_bytes`, {slot_bytes}, or more"));
        }
        let slots = (len - slot_bytes) / stride + 1;
        Ok(Arc::new(Self {
            start,
            len,
            slot_bytes,
            stride,
            slots,
            used: PageBitmap::new(slots as u64),
            number: NEXT_REGION.fetch_add(1, Ordering::Relaxed),
            closed: AtomicBool::new(false),
            on_gone: Mutex::default(),
            _memory: memory,
        }))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// All bytes of the memory.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// Slots that somebody owns now.
    pub fn slots_used(&self) -> usize {
        self.used.taken_pages() as usize
    }

    /// Whether [`Region::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Gives no more slots away. The memory stays until the last slot in use has come back and the
    /// last handle is dropped.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Takes one slot.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that is none, or a slot that somebody uses; `Closed`.
    pub fn claim(self: &Arc<Self>, slot: usize) -> Result<RegionSlot> {
        let refused = |kind, text: String| Err(Error::new(kind, "region", text));
        if self.is_closed() {
            return refused(ErrorKind::Closed, "the region is closed: register it again".into());
        }
        if slot >= self.slots {
            let last = self.slots - 1;
            let text = format!("`slots`: there is no slot {slot}: give 0 to {last}");
            return refused(ErrorKind::InvalidArgument, text);
        }
        if !self.used.try_take(slot as u64, 1) {
            let text =
                format!("`slots`: slot {slot} is in use by another call: wait until it has ended");
            return refused(ErrorKind::InvalidArgument, text);
        }
        Ok(RegionSlot { region: Arc::clone(self), slot })
    }

    /// Takes several slots, in this order, or none of them.
    ///
    /// # Errors
    /// As [`Region::claim`]; a slot that is named twice is in use the second time.
    pub fn claim_all(self: &Arc<Self>, slots: &[usize]) -> Result<Vec<RegionSlot>> {
        slots.iter().map(|slot| self.claim(*slot)).collect()
    }

    /// Lets `look` see the bytes of a slot that nobody uses.
    ///
    /// # Errors
    /// As [`Region::claim`].
    pub fn read<R>(self: &Arc<Self>, slot: usize, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        Ok(look(self.claim(slot)?.as_slice()))
    }

    /// Lets `change` write the bytes of a slot that nobody uses.
    ///
    /// # Errors
    /// As [`Region::claim`].
    pub fn write<R>(
        self: &Arc<Self>,
        slot: usize,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R> {
        Ok(change(self.claim(slot)?.as_mut_slice()))
    }

    /// A number that no other region of this process ever has.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// `tell` is called when the region is gone, just before its memory is.
    pub(crate) fn on_gone(&self, tell: OnGone) {
        self.on_gone.lock().push(tell);
    }

    fn at(&self, slot: usize, offset: usize) -> *mut u8 {
        // SAFETY: the slot is one of the region's, and the offset is at most its length, so that
        // the address lies in the memory or one behind it.
        unsafe { self.start.as_ptr().add(slot * self.stride + offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        for tell in self.on_gone.get_mut().drain(..) {
            tell();
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("slots", &self.slots)
            .field("slot_bytes", &self.slot_bytes)
            .field("used", &self.slots_used())
            .finish_non_exhaustive()
    }
}

/// One slot of a region, owned; dropping it gives the slot back.
#[derive(Debug)]
pub struct RegionSlot {
    region: Arc<Region>,
    slot: usize,
}

impl RegionSlot {
    /// Its number.
    pub fn number(&self) -> usize {
        self.slot
    }

    /// The bytes as they are.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the slot lies in memory that lives as long as the region, and belongs to this
        // value alone, which is borrowed.
        unsafe { std::slice::from_raw_parts(self.region.at(self.slot, 0), self.region.slot_bytes) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.region.slot_bytes;
        // SAFETY: as in `as_slice`, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.region.at(self.slot, 0), len) }
    }

    /// Lends disjoint ranges of the slot, each to be filled by another operation. The slot comes
    /// back from [`CutSlot::join`].
    ///
    /// # Panics
    /// Where the ranges overlap, are out of order or reach beyond the slot.
    pub fn cut(self, ranges: &[Range<usize>]) -> (CutSlot, Vec<RegionPart>) {
        let mut end = 0;
        for range in ranges {
            assert!(end <= range.start && range.start <= range.end, "ranges in order");
            end = range.end;
        }
        assert!(end <= self.region.slot_bytes, "ranges within the slot");
        let slot = Arc::new(self);
        let part =
            |range: &Range<usize>| RegionPart { slot: Arc::clone(&slot), range: range.clone() };
        let parts = ranges.iter().map(part).collect();
        (CutSlot { slot }, parts)
    }
}

impl AsRef<[u8]> for RegionSlot {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl AsMut<[u8]> for RegionSlot {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Drop for RegionSlot {
    fn drop(&mut self) {
        self.region.used.release(self.slot as u64, 1);
    }
}

/// A slot of which parts are lent.
#[derive(Debug)]
pub struct CutSlot {
    slot: Arc<RegionSlot>,
}

impl CutSlot {
    /// The slot again, once all of its parts are given; `None` where one is still out.
    pub fn join(self, parts: Vec<RegionPart>) -> Option<RegionSlot> {
        drop(parts);
        Arc::into_inner(self.slot)
    }
}

/// A range of a slot that one operation fills.
#[derive(Debug)]
pub struct RegionPart {
    slot: Arc<RegionSlot>,
    range: Range<usize>,
}

impl RegionPart {
    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let RegionSlot { region, slot } = &*self.slot;
        // SAFETY: the range lies in the slot and overlaps no other part (`cut` has checked both),
        // and the slot itself is out of reach while a part exists; the borrow is unique.
        unsafe {
            std::slice::from_raw_parts_mut(region.at(*slot, self.range.start), self.range.len())
        }
    }

    pub(crate) fn region(&self) -> &Region {
        &self.slot.region
    }
}

/// What a read fills, and owns until it has ended.
#[derive(Debug)]
pub enum ReadInto {
    /// Pages of the store's own.
    Slot(SlotMut),
    /// Part of a caller's memory.
    Region(RegionPart),
    /// Pages that are copied on afterwards.
    Bounce(AlignedBuf),
}

impl ReadInto {
    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Slot(slot) => slot.as_mut_slice(),
            Self::Region(part) => part.as_mut_slice(),
            Self::Bounce(buf) => buf.as_mut_slice(),
        }
    }
}

impl From<SlotMut> for ReadInto {
    fn from(slot: SlotMut) -> Self {
        Self::Slot(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(slots: usize) -> Arc<Region> {
        Region::new(vec![0u8; slots * 100], 100, 100).expect("valid")
    }

    #[test]
    fn a_slot_has_one_owner_and_the_error_names_it() {
        let region = region(4);
        let first = region.claim(2).expect("free");
        let err = region.claim(2).expect_err("in use");
        assert!(err.context().contains("slot 2 is in use"), "{err}");
        assert_eq!(region.claim_all(&[0, 1, 2]).expect_err("in use").kind(), err.kind());
        assert_eq!(region.slots_used(), 1, "the others were given back");
        assert!(region.claim_all(&[1, 1]).expect_err("twice").context().contains("slot 1"));
        assert!(region.claim(4).expect_err("none").context().contains("0 to 3"));
        drop(first);
        region.write(2, |bytes| bytes.fill(7)).expect("free");
        assert_eq!(region.read(2, |bytes| bytes.to_vec()).expect("free"), [7; 100]);
        assert_eq!(region.slots_used(), 0);
    }

    #[test]
    fn a_stride_leaves_gaps_and_the_last_slot_needs_none() {
        let region = Region::new(vec![0u8; 250], 50, 100).expect("valid");
        assert_eq!(region.slots(), 3);
        region.write(2, |bytes| bytes.fill(1)).expect("free");
        assert!(
            Region::new(vec![0u8; 10], 11, 11).is_err() && Region::new(vec![0u8; 9], 0, 1).is_err()
        );
        assert!(
            Region::new(vec![0u8; 10], 5, 4).expect_err("overlap").context().contains("stride")
        );
    }

    #[test]
    fn parts_are_disjoint_and_the_slot_comes_back_with_all_of_them() {
        let region = region(1);
        let (cut, mut parts) = region.claim(0).expect("free").cut(&[0..40, 40..60]);
        parts[0].as_mut_slice().fill(1);
        parts[1].as_mut_slice().fill(2);
        let last = parts.pop().expect("two");
        drop(parts);
        assert_eq!(region.slots_used(), 1);
        let slot = cut.join(vec![last]).expect("all parts are there");
        assert_eq!((slot.as_slice()[39], slot.as_slice()[40], slot.as_slice()[60]), (1, 2, 0));
        let (cut, parts) = slot.cut(std::slice::from_ref(&(0..1)));
        assert!(cut.join(Vec::new()).is_none(), "a part is still out");
        drop(parts);
        assert_eq!(region.slots_used(), 0);
    }

    #[test]
    #[should_panic(expected = "ranges in order")]
    fn overlapping_parts_are_refused() {
        drop(region(1).claim(0).expect("free").cut(&[0..10, 9..12]));
    }

    #[test]
    fn the_memory_outlives_a_closed_region_while_a_slot_is_out() {
        struct Told(Vec<u8>, std::sync::mpsc::Sender<()>);
        // SAFETY: the vector's bytes, as for a vector.
        unsafe impl RegionMemory for Told {
            fn range(&mut self) -> (NonNull<u8>, usize) {
                self.0.range()
            }
        }
        impl Drop for Told {
            fn drop(&mut self) {
                self.1.send(()).expect("the test listens");
            }
        }
        let (sender, freed) = std::sync::mpsc::channel();
        let region = Region::new(Told(vec![0; 10], sender), 10, 10).expect("valid");
        let slot = region.claim(0).expect("free");
        region.close();
        assert_eq!(region.claim(0).expect_err("closed").kind(), ErrorKind::Closed);
        drop(region);
        assert!(freed.try_recv().is_err(), "a slot is still out");
        drop(slot);
        freed.try_recv().expect("freed with the last slot");
    }
}
