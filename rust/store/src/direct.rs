//! One block on its way from a drive into a slot of the caller's.
//!
//! Whole pages at page-aligned addresses are read where they belong. What is left, the end of a
//! slab that fills no page or a slab at another address, is read into pages of its own and copied.
//! The payload is checked where it lies, after all of that, but for a slab that came whole with the
//! checksum of its bytes.

use crate::machine::{LoadFault, SlabRead};
use smallvec::SmallVec;
use std::ops::Range;
use tiered_kv_io::{AlignedBuf, CutSlot, FileId, PAGE_BYTES, ReadInto, RegionSlot, crc32c};

const PAGE: usize = PAGE_BYTES as usize;

/// One request of a direct read.
pub(crate) struct Piece {
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    pub(crate) into: ReadInto,
}

/// What a direct read keeps while its pieces are under way.
pub(crate) struct DirectRead {
    cut: CutSlot,
    /// Where the bytes of each piece belong, in the order of the pieces.
    places: Vec<Range<usize>>,
    /// The pieces that have come back, each with its checksum where that is known.
    ended: Vec<Option<(ReadInto, Option<u32>)>>,
    /// Each slab's place and checksum.
    slabs: SmallVec<[(Range<usize>, u32); 1]>,
}

/// A part of a slab, and whether it can be read where it belongs.
struct Plan {
    place: Range<usize>,
    file: FileId,
    offset: u64,
    direct: bool,
}

fn plan(address: usize, reads: &[SlabRead]) -> Vec<Plan> {
    let mut plans = Vec::with_capacity(reads.len());
    let mut at = 0;
    for read in reads {
        let len = usize::try_from(read.bytes).expect("a slab fits in memory");
        let aligned = (address + at).is_multiple_of(PAGE);
        let body = if aligned { len / PAGE * PAGE } else { 0 };
        for (part, direct) in [(0..body, true), (body..len, false)] {
            if !part.is_empty() {
                let offset = read.offset + part.start as u64;
                let place = at + part.start..at + part.end;
                plans.push(Plan { place, file: read.file, offset, direct });
            }
        }
        at += len;
    }
    plans
}

impl DirectRead {
    /// Cuts a read into the pieces to be requested. `Err` gives the slot back, where memory for
    /// what cannot be read in place is not to be had.
    pub(crate) fn new(
        mut slot: RegionSlot,
        reads: &[SlabRead],
    ) -> Result<(Self, Vec<Piece>), RegionSlot> {
        let plans = plan(slot.as_mut_slice().as_ptr() as usize, reads);
        let mut bounces = Vec::new();
        for plan in plans.iter().filter(|plan| !plan.direct) {
            match AlignedBuf::new(plan.place.len().next_multiple_of(PAGE)) {
                Ok(buf) => bounces.push(buf),
                Err(_) => return Err(slot),
            }
        }
        let direct: Vec<Range<usize>> =
            plans.iter().filter(|p| p.direct).map(|p| p.place.clone()).collect();
        let (cut, parts) = slot.cut(&direct);
        let (mut parts, mut bounces) = (parts.into_iter(), bounces.into_iter());
        let mut places = Vec::with_capacity(plans.len());
        let piece = |plan: Plan| {
            places.push(plan.place);
            let into = if plan.direct {
                ReadInto::Region(parts.next().expect("one a direct piece"))
            } else {
                ReadInto::Bounce(bounces.next().expect("one for each of the others"))
            };
            Piece { file: plan.file, offset: plan.offset, into }
        };
        let pieces: Vec<Piece> = plans.into_iter().map(piece).collect();
        let ended = pieces.iter().map(|_| None).collect();
        let mut at = 0;
        let slab = |read: &SlabRead| {
            let begin = at;
            at += usize::try_from(read.bytes).expect("a slab fits in memory");
            (begin..at, read.crc)
        };
        let slabs = reads.iter().map(slab).collect();
        Ok((Self { cut, places, ended, slabs }, pieces))
    }

    /// Takes a piece back once nobody writes into it any more.
    pub(crate) fn ended(&mut self, piece: usize, into: ReadInto, crc: Option<u32>) {
        self.ended[piece] = Some((into, crc));
    }

    /// The slot again, and whether it holds what was stored. To be called once every piece has come
    /// back.
    pub(crate) fn finish(self, read: Result<(), LoadFault>) -> (RegionSlot, Result<(), LoadFault>) {
        let mut parts = Vec::new();
        let mut bounces = Vec::new();
        let mut known: SmallVec<[(Range<usize>, u32); 1]> = SmallVec::new();
        for (ended, place) in self.ended.into_iter().zip(self.places) {
            let (into, crc) = ended.expect("every piece has come back");
            match into {
                ReadInto::Region(part) => {
                    parts.push(part);
                    known.extend(crc.map(|crc| (place, crc)));
                }
                ReadInto::Bounce(buf) => bounces.push((buf, place)),
                ReadInto::Slot(_) => unreachable!("direct reads use no slots of the store"),
            }
        }
        let mut slot = self.cut.join(parts).expect("every part has come back");
        if read.is_err() {
            return (slot, read);
        }
        let bytes = slot.as_mut_slice();
        for (buf, place) in bounces {
            let len = place.len();
            bytes[place].copy_from_slice(&buf.as_slice()[..len]);
        }
        let computed = |place: Range<usize>| {
            let whole = known.iter().find(|(known, _)| *known == place);
            whole.map_or_else(|| crc32c(&bytes[place]), |(_, crc)| *crc)
        };
        let intact = self.slabs.into_iter().all(|(place, crc)| computed(place) == crc);
        (slot, if intact { Ok(()) } else { Err(LoadFault::Corrupt) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_every_slab_once_and_only_whole_pages_are_direct(
            address in 0..3_usize * PAGE,
            lens in prop::collection::vec(1..4 * PAGE as u64, 1..6),
        ) {
            let reads: Vec<SlabRead> = lens.iter().enumerate().map(|(slab, bytes)| SlabRead {
                file: FileId(slab as u32),
                offset: 1 << 20,
                bytes: *bytes,
                crc: 0,
            }).collect();
            let mut next = 0;
            for plan in plan(address, &reads) {
                prop_assert_eq!(plan.place.start, next);
                next = plan.place.end;
                let slab = plan.file.0 as usize;
                let begin: u64 = lens[..slab].iter().sum();
                prop_assert_eq!(plan.offset - (1 << 20), plan.place.start as u64 - begin);
                if plan.direct {
                    prop_assert!((address + plan.place.start).is_multiple_of(PAGE));
                    prop_assert!(plan.place.len().is_multiple_of(PAGE));
                } else {
                    prop_assert_eq!(plan.offset % PAGE as u64, 0, "a read begins on a page");
                }
            }
            prop_assert_eq!(next as u64, lens.iter().sum::<u64>());
        }
    }
}
