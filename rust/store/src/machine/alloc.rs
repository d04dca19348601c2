//! Slots: segments of equal length, each cut into slots of one size class and recycled in place.
//!
//! Pure bookkeeping, the same for memory and for a drive. A segment without used slots may change
//! its class; on a drive it must then be *prepared* (its header table rewritten) before a slot of
//! it is handed out, which the caller does and reports.

use std::collections::{BTreeMap, BTreeSet};

/// Where a slab lives: a slot of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SlotId {
    /// Number of the segment.
    pub(crate) segment: u32,
    /// Number of the slot in it.
    pub(crate) index: u32,
}

/// Answer to a request for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alloc {
    /// This slot, now used.
    Slot(SlotId),
    /// None yet: prepare this segment (it is marked as being prepared), then ask again.
    Prepare(u32),
    /// None yet: a segment of the class is being prepared.
    Wait,
    /// None: every segment is in use.
    Full,
}

/// Geometry of a tier's segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) segment_bytes: u64,
    pub(crate) segments: u32,
    /// Bytes of one header in the table at the front of a segment; 0 where there is no table.
    pub(crate) header_stride: u32,
}

const SEGMENT_PAGE: u64 = tiered_kv_types::PAGE_BYTES;

impl Geometry {
    /// Number of slots of `slot_bytes` in a segment, and where the first begins.
    pub(crate) fn cut(&self, slot_bytes: u64) -> (u32, u64) {
        if slot_bytes == 0 || slot_bytes > self.segment_bytes {
            return (0, SEGMENT_PAGE);
        }
        if self.header_stride == 0 {
            let slots = self.segment_bytes / slot_bytes;
            return (u32::try_from(slots).unwrap_or(u32::MAX), 0);
        }
        let stride = u64::from(self.header_stride);
        let mut slots = self.segment_bytes.saturating_sub(SEGMENT_PAGE) / (slot_bytes + stride);
        while slots > 0 {
            let data = tiered_kv_types::round_up_to_page(SEGMENT_PAGE + slots * stride);
            if data + slots * slot_bytes <= self.segment_bytes {
                return (u32::try_from(slots).unwrap_or(u32::MAX), data);
            }
            slots -= 1;
        }
        (0, SEGMENT_PAGE)
    }

    /// Offset in the segment of the table entry of slot `index`.
    pub(crate) fn header_offset(&self, index: u32) -> u64 {
        SEGMENT_PAGE + u64::from(index) * u64::from(self.header_stride)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unassigned,
    Preparing,
    Ready,
    /// Could not be prepared; never used again in this run.
    Broken,
}

#[derive(Debug)]
struct Segment {
    state: State,
    slot_bytes: u64,
    data_offset: u64,
    class_epoch: u32,
    faults: u32,
    free: Vec<u32>,
    slots: u32,
}

impl Segment {
    fn used(&self) -> u32 {
        self.slots - u32::try_from(self.free.len()).expect("at most `slots` are free")
    }
}

/// The slots of one tier.
#[derive(Debug)]
pub(crate) struct SlotAllocator {
    geometry: Geometry,
    prepare: bool,
    segments: Vec<Segment>,
    /// Ready segments with a free slot, by class.
    partial: BTreeMap<u64, BTreeSet<u32>>,
    /// By how often preparing them failed, so that one that always fails is tried last.
    unassigned: BTreeSet<(u32, u32)>,
    used_bytes: u64,
    claimed: Vec<SlotId>,
    /// Segments whose table is being written: their class does not change meanwhile.
    busy: BTreeSet<u32>,
}

impl SlotAllocator {
    /// `prepare` says that a segment must be prepared before its slots are used.
    pub(crate) fn new(geometry: Geometry, prepare: bool) -> Self {
        let segments = (0..geometry.segments)
            .map(|_| Segment {
                state: State::Unassigned,
                slot_bytes: 0,
                data_offset: 0,
                class_epoch: 0,
                faults: 0,
                free: Vec::new(),
                slots: 0,
            })
            .collect();
        let unassigned = (0..geometry.segments).map(|number| (0, number)).collect();
        Self {
            geometry,
            prepare,
            segments,
            partial: BTreeMap::new(),
            unassigned,
            used_bytes: 0,
            claimed: Vec::new(),
            busy: BTreeSet::new(),
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of all used slots.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes that all segments together hold.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        u64::from(self.geometry.segments) * self.geometry.segment_bytes
    }

    /// Whether a slot of `slot_bytes` fits in a segment at all.
    pub(crate) fn fits(&self, slot_bytes: u64) -> bool {
        self.geometry.segments > 0 && self.geometry.cut(slot_bytes).0 > 0
    }

    /// Whether a slot can be had without taking one from another block.
    pub(crate) fn has_room(&self, slot_bytes: u64) -> bool {
        let partial = self.partial.get(&slot_bytes).is_some_and(|set| !set.is_empty());
        partial || !self.unassigned.is_empty()
    }

    /// A free slot of `slot_bytes`, a multiple of a page.
    pub(crate) fn alloc(&mut self, slot_bytes: u64) -> Alloc {
        if let Some(segment) = self.partial.get(&slot_bytes).and_then(|set| set.first().copied()) {
            return Alloc::Slot(self.take_from(segment));
        }
        let preparing = |s: &Segment| s.state == State::Preparing && s.slot_bytes == slot_bytes;
        if self.segments.iter().any(preparing) {
            return Alloc::Wait;
        }
        let Some(segment) = self.claim(slot_bytes) else { return Alloc::Full };
        if self.prepare {
            return Alloc::Prepare(segment);
        }
        self.ready(segment);
        Alloc::Slot(self.take_from(segment))
    }

    fn take_from(&mut self, number: u32) -> SlotId {
        let segment = &mut self.segments[number as usize];
        let index = segment.free.pop().expect("a partial segment has a free slot");
        self.used_bytes += segment.slot_bytes;
        if segment.free.is_empty()
            && let Some(set) = self.partial.get_mut(&segment.slot_bytes)
        {
            set.remove(&number);
        }
        SlotId { segment: number, index }
    }

    /// Takes an unassigned segment, else an empty one of another class, for `slot_bytes`.
    fn claim(&mut self, slot_bytes: u64) -> Option<u32> {
        let (slots, data_offset) = self.geometry.cut(slot_bytes);
        if slots == 0 {
            return None;
        }
        let number = match self.unassigned.pop_first() {
            Some((_, number)) => number,
            None => {
                let empty = |(number, s): (u32, &Segment)| {
                    let other = s.state == State::Ready && s.slot_bytes != slot_bytes;
                    other && s.used() == 0 && !self.busy.contains(&number)
                };
                let at = (0..).zip(&self.segments).position(empty)?;
                u32::try_from(at).expect("segment numbers are u32")
            }
        };
        let segment = &mut self.segments[number as usize];
        if let Some(set) = self.partial.get_mut(&segment.slot_bytes) {
            set.remove(&number);
        }
        segment.state = State::Preparing;
        segment.slot_bytes = slot_bytes;
        segment.data_offset = data_offset;
        segment.class_epoch += 1;
        segment.slots = slots;
        segment.free = (0..slots).rev().collect();
        Some(number)
    }

    /// `segment` is prepared: its slots may be used.
    pub(crate) fn ready(&mut self, number: u32) {
        let segment = &mut self.segments[number as usize];
        segment.state = State::Ready;
        self.partial.entry(segment.slot_bytes).or_default().insert(number);
    }

    /// `segment` could not be prepared and is given up.
    pub(crate) fn broken(&mut self, number: u32) {
        let segment = &mut self.segments[number as usize];
        segment.state = State::Broken;
        segment.faults += 1;
        segment.free.clear();
        segment.slots = 0;
    }

    /// Whether a segment is left that was not tried yet.
    pub(crate) fn has_untried(&self) -> bool {
        !self.unassigned.is_empty()
    }

    /// Gives a broken segment another chance, as after space was made on a full disk.
    pub(crate) fn mend(&mut self) {
        for (number, segment) in self.segments.iter_mut().enumerate() {
            if segment.state == State::Broken {
                segment.state = State::Unassigned;
                let number = u32::try_from(number).expect("segment numbers are u32");
                self.unassigned.insert((segment.faults, number));
            }
        }
    }

    /// Gives a slot back.
    pub(crate) fn free(&mut self, slot: SlotId) {
        let segment = &mut self.segments[slot.segment as usize];
        debug_assert!(!segment.free.contains(&slot.index), "slot freed twice: {slot:?}");
        segment.free.push(slot.index);
        self.used_bytes -= segment.slot_bytes;
        self.partial.entry(segment.slot_bytes).or_default().insert(slot.segment);
    }

    /// Segments that are cut into slots.
    pub(crate) fn ready_segments(&self) -> impl Iterator<Item = u32> + '_ {
        let ready = |(number, s): (u32, &Segment)| (s.state == State::Ready).then_some(number);
        (0..).zip(&self.segments).filter_map(ready)
    }

    /// Keeps the class of segments whose table is being written.
    pub(crate) fn set_busy(&mut self, segments: BTreeSet<u32>) {
        self.busy = segments;
    }

    /// Every free slot of the segments in use.
    pub(crate) fn free_slots(&self) -> Vec<SlotId> {
        let mut free = Vec::new();
        for (number, segment) in (0..).zip(&self.segments) {
            if segment.state == State::Ready {
                free.extend(
                    segment.free.iter().map(|index| SlotId { segment: number, index: *index }),
                );
            }
        }
        free
    }

    /// Whether another class may have `segment` once `idle` of its slots are free.
    pub(crate) fn is_takeable(&self, segment: u32, idle: u32) -> bool {
        let found = &self.segments[segment as usize];
        found.state == State::Ready && found.used() == idle && !self.busy.contains(&segment)
    }

    /// Whether no slot of `segment` is used.
    pub(crate) fn is_empty(&self, segment: u32) -> bool {
        self.segments[segment as usize].used() == 0
    }

    /// Where a slot begins in its segment.
    pub(crate) fn offset(&self, slot: SlotId) -> u64 {
        let segment = &self.segments[slot.segment as usize];
        segment.data_offset + u64::from(slot.index) * segment.slot_bytes
    }

    /// Bytes of a slot of `segment`.
    pub(crate) fn slot_bytes(&self, segment: u32) -> u64 {
        self.segments[segment as usize].slot_bytes
    }

    /// How often `segment` has changed its class.
    pub(crate) fn class_epoch(&self, segment: u32) -> u32 {
        self.segments[segment as usize].class_epoch
    }

    /// Number of slots and offset of the first in `segment`.
    pub(crate) fn shape(&self, segment: u32) -> (u32, u64) {
        let segment = &self.segments[segment as usize];
        (segment.slots, segment.data_offset)
    }

    /// Restores a segment found on disk, all its slots free. Returns whether its geometry is ours.
    pub(crate) fn restore(&mut self, number: u32, slot_bytes: u64, class_epoch: u32) -> bool {
        let (slots, data_offset) = self.geometry.cut(slot_bytes);
        if slots == 0 || !self.unassigned.remove(&(0, number)) {
            return false;
        }
        let segment = &mut self.segments[number as usize];
        segment.state = State::Ready;
        segment.slot_bytes = slot_bytes;
        segment.data_offset = data_offset;
        segment.class_epoch = class_epoch;
        segment.slots = slots;
        segment.free = (0..slots).rev().collect();
        self.partial.entry(slot_bytes).or_default().insert(number);
        true
    }

    /// Marks a slot of a restored segment as used; [`SlotAllocator::rebuild_free`] ends a run of
    /// these.
    pub(crate) fn claim_slot(&mut self, slot: SlotId) {
        self.claimed.push(slot);
    }

    /// Takes every claimed slot off the free lists.
    pub(crate) fn rebuild_free(&mut self) {
        let used = |s: &Segment| vec![false; s.slots as usize];
        let mut used: Vec<Vec<bool>> = self.segments.iter().map(used).collect();
        for slot in std::mem::take(&mut self.claimed) {
            used[slot.segment as usize][slot.index as usize] = true;
        }
        for ((number, segment), used) in (0..).zip(&mut self.segments).zip(used) {
            let before = segment.free.len();
            segment.free.retain(|index| !used[*index as usize]);
            let taken = (before - segment.free.len()) as u64;
            self.used_bytes += taken * segment.slot_bytes;
            if segment.free.is_empty()
                && let Some(set) = self.partial.get_mut(&segment.slot_bytes)
            {
                set.remove(&number);
            }
        }
    }

    /// Remembers the epoch of a segment file whose slots are not restored.
    pub(crate) fn set_class_epoch(&mut self, number: u32, class_epoch: u32) {
        self.segments[number as usize].class_epoch = class_epoch;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(segments: u32) -> SlotAllocator {
        SlotAllocator::new(Geometry { segment_bytes: 64 << 10, segments, header_stride: 0 }, false)
    }

    #[test]
    fn slots_of_two_classes_share_the_segments() {
        let mut slots = memory(2);
        let Alloc::Slot(a) = slots.alloc(32 << 10) else { panic!("a slot") };
        let Alloc::Slot(b) = slots.alloc(64 << 10) else { panic!("a slot") };
        assert_ne!(a.segment, b.segment);
        assert_eq!(slots.alloc(64 << 10), Alloc::Full);
        assert_eq!(slots.used_bytes(), 96 << 10);
        slots.free(a);
        assert!(matches!(slots.alloc(64 << 10), Alloc::Slot(_)), "an empty segment changes class");
        assert_eq!(slots.class_epoch(a.segment), 2);
        assert_eq!(slots.alloc(32 << 10), Alloc::Full);
        assert!(!slots.fits(128 << 10));
    }

    #[test]
    fn the_table_and_the_slots_fit_in_the_segment() {
        for slot in [4096u64, 8192, 1 << 20, 1_474_560] {
            for segment in [64u64 << 10, 2 << 20, 256 << 20] {
                let geometry = Geometry { segment_bytes: segment, segments: 1, header_stride: 512 };
                let (slots, data) = geometry.cut(slot);
                assert!(data + u64::from(slots) * slot <= segment);
                if slots > 0 {
                    assert!(geometry.header_offset(slots) <= data);
                }
            }
        }
    }

    #[test]
    fn a_drive_prepares_a_segment_before_its_slots_are_used() {
        let geometry = Geometry { segment_bytes: 64 << 10, segments: 1, header_stride: 512 };
        let mut slots = SlotAllocator::new(geometry, true);
        assert_eq!(slots.alloc(4096), Alloc::Prepare(0));
        assert_eq!(slots.alloc(4096), Alloc::Wait);
        assert_eq!(slots.alloc(8192), Alloc::Full);
        slots.ready(0);
        assert!(matches!(slots.alloc(4096), Alloc::Slot(SlotId { segment: 0, index: 0 })));
        slots.broken(0);
        slots.mend();
    }
}
