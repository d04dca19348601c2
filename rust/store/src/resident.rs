//! Blocks in memory: slots being filled, resident copies, leases.
//!
//! Ownership is the pin. A resident copy is reference counted; the read index holds one reference,
//! and every lease, copy or write in flight holds another. A copy can be evicted only while the
//! index holds the only one, and its slots return to the allocator when the last reference is
//! dropped, whoever drops it. So a lease is never invalidated, and nothing frees memory that the
//! kernel still reads.

use crate::machine::SlotId;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, SegQueue};
use smallvec::SmallVec;
use tiered_kv_io::{ReadBuf, Slot, SlotMut, copy_checked, crc32c};
use tiered_kv_types::BlockInfo;

/// What every block in memory refers to, so that a lease is no larger than a reference.
#[derive(Debug, Default)]
pub(crate) struct Freed {
    /// Slots whose last owner is gone, on their way back to the allocator.
    slots: SegQueue<SlotId>,
    /// Bytes that leases pin.
    leased: AtomicU64,
}

impl Freed {
    pub(crate) fn push(&self, slot: SlotId) {
        self.slots.push(slot);
    }

    pub(crate) fn pop(&self) -> Option<SlotId> {
        self.slots.pop()
    }

    /// So many bytes are leased no more.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.leased.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Where slots go whose last owner is gone.
pub(crate) type FreedSlots = Arc<Freed>;

/// Bytes of slots that were taken to be stored, by a put or a reservation, and are neither visible
/// nor given back.
#[derive(Clone, Debug, Default)]
pub(crate) struct EnteringBytes(Arc<AtomicU64>);

impl EnteringBytes {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts `bytes` until the booking is dropped, wherever that is.
    fn book(&self, bytes: u64) -> Booking {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Booking { total: self.clone(), bytes }
    }
}

#[derive(Debug)]
struct Booking {
    total: EnteringBytes,
    bytes: u64,
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.total.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Slots taken for one block, one a slab, writable and owned by whoever fills them.
///
/// Dropping it gives the slots back.
#[derive(Debug)]
pub struct Filling {
    slots: SmallVec<[SlotMut; 1]>,
    ids: SmallVec<[SlotId; 1]>,
    /// Payload bytes of each slab.
    lens: SmallVec<[u64; 1]>,
    freed: FreedSlots,
    /// The store's generation when the slots were taken.
    begun: u64,
    /// Of slots that are to be stored, until they are published or dropped.
    booking: Option<Booking>,
}

impl Filling {
    pub(crate) fn new(freed: FreedSlots, begun: u64) -> Self {
        let (slots, ids, lens) = (SmallVec::new(), SmallVec::new(), SmallVec::new());
        Self { slots, ids, lens, freed, begun, booking: None }
    }

    /// Counts the block among what is on its way in.
    pub(crate) fn book(&mut self, total: &EnteringBytes) {
        self.booking = Some(total.book(self.bytes()));
    }

    pub(crate) fn push(&mut self, slot: SlotMut, id: SlotId, len: u64) {
        debug_assert!(len <= slot.len() as u64);
        self.slots.push(slot);
        self.ids.push(id);
        self.lens.push(len);
    }

    /// Payload bytes of the whole block.
    pub fn bytes(&self) -> u64 {
        self.lens.iter().sum()
    }

    /// Number of slabs.
    pub fn slabs(&self) -> usize {
        self.slots.len()
    }

    /// The writable payload of slab `index`.
    pub fn slab_mut(&mut self, index: usize) -> &mut [u8] {
        let len = usize::try_from(self.lens[index]).expect("a slab fits in memory");
        &mut self.slots[index].as_mut_slice()[..len]
    }

    /// Copies a whole block in, slab by slab, with its checksums computed on the way.
    ///
    /// # Panics
    /// Where `payload` is not [`Filling::bytes`] long: callers check that first.
    pub(crate) fn fill_from(mut self, payload: &[u8]) -> Filled {
        assert_eq!(payload.len() as u64, self.bytes(), "a payload is checked against its layout");
        let mut at = 0;
        let mut crcs = SmallVec::new();
        for index in 0..self.slots.len() {
            let slab = self.slab_mut(index);
            crcs.push(copy_checked(slab, &payload[at..at + slab.len()]));
            at += slab.len();
        }
        self.seal(crcs)
    }

    /// The slots' bytes as they stand, with their checksums computed now.
    pub(crate) fn fill_in_place(self) -> Filled {
        self.fill_knowing(&[])
    }

    /// The same, but for slots whose checksums are known already and that have no other bytes than
    /// a slab's.
    pub(crate) fn fill_knowing(mut self, known: &[Option<u32>]) -> Filled {
        let mut crcs = SmallVec::new();
        for index in 0..self.slots.len() {
            let whole = self.lens[index] == self.slots[index].len() as u64;
            let known = known.get(index).copied().flatten().filter(|_| whole);
            crcs.push(known.unwrap_or_else(|| crc32c(self.slab_mut(index))));
        }
        self.seal(crcs)
    }

    /// Zeroes what lies behind each payload in its slot, since whole slots go to the device.
    fn seal(mut self, crcs: SmallVec<[u32; 1]>) -> Filled {
        for (slot, len) in self.slots.iter_mut().zip(&self.lens) {
            let len = usize::try_from(*len).expect("a slab fits in memory");
            slot.as_mut_slice()[len..].fill(0);
        }
        Filled { filling: self, crcs }
    }

    pub(crate) fn take_slots(&mut self) -> SmallVec<[SlotMut; 1]> {
        std::mem::take(&mut self.slots)
    }

    pub(crate) fn restore_slots(&mut self, slots: SmallVec<[SlotMut; 1]>) {
        self.slots = slots;
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.slots.clear();
        for id in &self.ids {
            self.freed.push(*id);
        }
    }
}

/// Filled slots with their checksums, not yet visible.
#[derive(Debug)]
pub(crate) struct Filled {
    filling: Filling,
    crcs: SmallVec<[u32; 1]>,
}

impl Filled {
    pub(crate) fn begun(&self) -> u64 {
        self.filling.begun
    }

    pub(crate) fn crcs(&self) -> &[u32] {
        &self.crcs
    }

    /// The segment of each slot.
    pub(crate) fn segments(&self) -> SmallVec<[u32; 1]> {
        self.filling.ids.iter().map(|id| id.segment).collect()
    }

    pub(crate) fn into_resident(mut self, generation: u64, info: BlockInfo) -> Resident {
        let slots = self.filling.take_slots().into_iter().map(SlotMut::freeze).collect();
        Resident {
            slots,
            ids: std::mem::take(&mut self.filling.ids),
            lens: std::mem::take(&mut self.filling.lens),
            crcs: std::mem::take(&mut self.crcs),
            generation,
            info,
            freed: self.filling.freed.clone(),
        }
    }
}

/// One block in memory, verified and read-only.
#[derive(Debug)]
pub struct Resident {
    slots: SmallVec<[Slot; 1]>,
    ids: SmallVec<[SlotId; 1]>,
    lens: SmallVec<[u64; 1]>,
    crcs: SmallVec<[u32; 1]>,
    generation: u64,
    info: BlockInfo,
    freed: FreedSlots,
}

impl Resident {
    /// Payload bytes of the whole block.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.lens.iter().sum()
    }

    /// Number of slabs.
    pub fn slabs(&self) -> usize {
        self.slots.len()
    }

    /// The payload of slab `index`, in the read-only mapping.
    pub fn slab(&self, index: usize) -> &[u8] {
        let len = usize::try_from(self.lens[index]).expect("a slab fits in memory");
        &self.slots[index].as_slice()[..len]
    }

    /// Generation of the key when the copy was made.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What was told of the block when it was stored.
    pub fn info(&self) -> BlockInfo {
        self.info
    }

    /// Copies the block out and says whether every slab still has its checksum.
    pub(crate) fn copy_out(&self, out: &mut [u8]) -> bool {
        assert_eq!(out.len() as u64, self.bytes(), "a buffer is checked against its layout");
        let mut at = 0;
        let mut intact = true;
        for index in 0..self.slots.len() {
            let slab = self.slab(index);
            intact &= copy_checked(&mut out[at..at + slab.len()], slab) == self.crcs[index];
            at += slab.len();
        }
        intact
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.slots.clear();
        for id in &self.ids {
            self.freed.push(*id);
        }
    }
}

/// A whole slot of a resident copy, as a device write owns it.
pub(crate) struct SlabWrite {
    pub(crate) resident: Arc<Resident>,
    pub(crate) index: usize,
}

impl ReadBuf for SlabWrite {
    fn as_slice(&self) -> &[u8] {
        self.resident.slots[self.index].as_slice()
    }
}

/// The cap of what leases pin.
#[derive(Debug)]
pub(crate) struct LeaseBudget {
    freed: FreedSlots,
    cap: u64,
}

impl LeaseBudget {
    pub(crate) fn new(cap: u64, freed: FreedSlots) -> Arc<Self> {
        Arc::new(Self { freed, cap })
    }

    pub(crate) fn leased_bytes(&self) -> u64 {
        self.freed.leased.load(Ordering::Relaxed)
    }

    /// A lease on `resident`, unless that would pin more than the cap.
    pub(crate) fn lease(&self, resident: Arc<Resident>) -> Option<Lease> {
        self.take(resident.bytes()).then(|| Lease::counted(resident))
    }

    /// Counts so many bytes as leased, unless that would be more than the cap.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        // Added only where it fits: one that is refused must not be in another's way meanwhile.
        let fits = |leased: u64| leased.checked_add(bytes).filter(|sum| *sum <= self.cap);
        let leased = &self.freed.leased;
        leased.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }
}

/// A read-only view of one resident block, pinned until it is dropped and never revoked.
#[derive(Debug)]
pub struct Lease {
    /// Gone only where `release_all` has taken it off the books.
    resident: Option<Arc<Resident>>,
}

impl Lease {
    /// A lease whose bytes `LeaseBudget::take` has counted.
    #[inline]
    pub(crate) fn counted(resident: Arc<Resident>) -> Self {
        Self { resident: Some(resident) }
    }

    /// Another lease of the same block, counted like the first.
    #[must_use]
    pub fn share(&self) -> Self {
        self.freed.leased.fetch_add(self.bytes(), Ordering::Relaxed);
        Self { resident: self.resident.clone() }
    }

    /// The payload of a block of one slab.
    pub fn as_slice(&self) -> &[u8] {
        self.slab(0)
    }

    /// Drops a batch of leases of one store, which is cheaper than to drop each by itself.
    pub fn release_all(leases: impl IntoIterator<Item = Self>) {
        let mut bytes = 0;
        let mut freed: Option<FreedSlots> = None;
        for mut lease in leases {
            let Some(resident) = lease.resident.take() else { continue };
            let books = freed.get_or_insert_with(|| resident.freed.clone());
            if Arc::ptr_eq(books, &resident.freed) {
                bytes += resident.bytes();
            } else {
                resident.freed.give_back(resident.bytes());
            }
        }
        if let Some(freed) = freed {
            freed.give_back(bytes);
        }
    }
}

impl std::ops::Deref for Lease {
    type Target = Resident;

    #[inline]
    fn deref(&self) -> &Resident {
        self.resident.as_deref().expect("only a lease that is being dropped has none")
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        if let Some(resident) = &self.resident {
            resident.freed.give_back(resident.bytes());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn resident(bytes: u64, freed: &FreedSlots) -> Arc<Resident> {
        Arc::new(Resident {
            slots: SmallVec::new(),
            ids: SmallVec::new(),
            lens: SmallVec::from_slice(&[bytes]),
            crcs: SmallVec::new(),
            generation: 1,
            info: BlockInfo::default(),
            freed: freed.clone(),
        })
    }

    #[test]
    fn a_lease_that_is_refused_is_in_nobodys_way_meanwhile() {
        let freed = FreedSlots::default();
        let budget = LeaseBudget::new(100, freed.clone());
        let (small, large) = (resident(10, &freed), resident(1000, &freed));
        let done = std::sync::atomic::AtomicBool::new(false);
        let refused = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert!(budget.lease(large.clone()).is_none());
                    refused.fetch_add(1, Ordering::Relaxed);
                }
            });
            // Both are tried often, and at the same time.
            let mut kept = true;
            let mut tried = 0;
            while tried < 500_000 || refused.load(Ordering::Relaxed) < 500_000 {
                kept &= budget.lease(small.clone()).is_some();
                tried += 1;
            }
            done.store(true, Ordering::Relaxed);
            assert!(kept, "it fits alone");
        });
        assert_eq!(budget.leased_bytes(), 0);
    }
}
