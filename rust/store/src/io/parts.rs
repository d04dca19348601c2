//! What requests are made of, and how what was read is checked.

use crate::resident::{Filled, Filling};
use smallvec::SmallVec;
use tiered_kv_io::{AlignedBuf, IoOp, IoRequest, Priority, ReadBuf, SlotMut, crc32c};

/// A copy of whole pages at an aligned address.
pub(super) fn aligned(bytes: &[u8]) -> tiered_kv_types::Result<AlignedBuf> {
    let mut buf = AlignedBuf::new(bytes.len())?;
    buf.as_mut_slice().copy_from_slice(bytes);
    Ok(buf)
}

pub(super) fn store(token: u64, op: IoOp) -> IoRequest {
    IoRequest { token, priority: Priority::Store, op, cancel: None }
}

/// What more than itself waits for: a header, a sync, a tombstone, a segment's table.
pub(super) fn commit(token: u64, op: IoOp) -> IoRequest {
    IoRequest { token, priority: Priority::Commit, op, cancel: None }
}

/// Puts the slots back and checks every slab against the checksum that it was stored with. Of slabs
/// that fill their slots what is `known` counts: the checksum of the bytes that were copied there.
pub(crate) fn verify(
    mut filling: Filling,
    slots: Vec<Option<SlotMut>>,
    known: &[Option<u32>],
    crcs: &[u32],
) -> Option<Filled> {
    filling.restore_slots(slots.into_iter().collect::<Option<_>>()?);
    let filled = filling.fill_knowing(known);
    (filled.crcs() == crcs).then_some(filled)
}

/// Whether every slab is there and has its checksum.
pub(super) fn check(slabs: SmallVec<[(Option<AlignedBuf>, u64, u32); 1]>) -> Option<()> {
    let sound = |(buf, bytes, crc): (Option<AlignedBuf>, u64, u32)| {
        let len = usize::try_from(bytes).ok()?;
        (crc32c(&buf?.as_slice()[..len]) == crc).then_some(())
    };
    slabs.into_iter().map(sound).collect()
}

/// Header bytes at an aligned address, without the padding of the buffer's last page.
pub(super) struct HeaderBuf {
    buf: AlignedBuf,
    len: usize,
}

impl HeaderBuf {
    pub(super) fn new(bytes: &[u8]) -> tiered_kv_types::Result<Self> {
        let pages = bytes.len().next_multiple_of(tiered_kv_io::PAGE_BYTES as usize);
        let mut buf = AlignedBuf::new(pages)?;
        buf.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        Ok(Self { buf, len: bytes.len() })
    }
}

impl ReadBuf for HeaderBuf {
    fn as_slice(&self) -> &[u8] {
        &self.buf.as_slice()[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::SlotId;
    use crate::resident::FreedSlots;
    use tiered_kv_io::{Arena, ArenaConfig, PAGE_BYTES};

    /// Whether a page of sevens with a slab of `len` bytes is taken for sound.
    fn is_sound(len: u64, known: Option<u32>, stored: u32) -> bool {
        let arena = Arena::new(ArenaConfig::new(PAGE_BYTES)).expect("a page");
        let mut slot = arena.take(0, PAGE_BYTES).expect("free");
        slot.as_mut_slice().fill(7);
        let mut filling = Filling::new(FreedSlots::default(), 1);
        filling.push(slot, SlotId { segment: 0, index: 0 }, len);
        let slots = filling.take_slots().into_iter().map(Some).collect();
        verify(filling, slots, &[known], &[stored]).is_some()
    }

    #[test]
    fn a_known_checksum_counts_for_a_slab_that_fills_its_slot() {
        let of = |len: u64| crc32c(&vec![7; len as usize]);
        let whole = of(PAGE_BYTES);
        assert!(is_sound(PAGE_BYTES, Some(whole), whole));
        assert!(is_sound(PAGE_BYTES, None, whole));
        assert!(!is_sound(PAGE_BYTES, Some(whole ^ 1), whole), "the bytes that came were others");
        assert!(is_sound(100, Some(whole), of(100)), "the slot has more than the slab");
        assert!(!is_sound(100, Some(whole), whole));
    }
}
