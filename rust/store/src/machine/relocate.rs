//! Where blocks of a machine that nobody drives lie, and where they could lie instead.

use super::table::{Block, OnDrive};
use super::{BlockId, DriveId, Machine, SlotId};
use std::collections::BTreeMap;
use tiered_kv_io::FileId;
use tiered_kv_types::{BlockKey, NamespaceId, RecordHeader, round_up_to_page};

/// One slab on a drive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlabPlace {
    pub(crate) block: BlockId,
    pub(crate) drive: DriveId,
    pub(crate) slot: SlotId,
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
    pub(crate) generation: u64,
}

/// A slab's way from one slot to another.
#[derive(Clone, Debug)]
pub(crate) struct SlabMove {
    pub(crate) from: SlabPlace,
    pub(crate) to: (FileId, u64),
    /// Its header in the new place, and where that is written.
    pub(crate) header: RecordHeader,
    pub(crate) header_offset: u64,
}

/// What becomes of a drive's blocks when it keeps fewer segments.
#[derive(Debug, Default)]
pub(crate) struct Shrink {
    /// Blocks that move, slab by slab.
    pub(crate) moves: Vec<Vec<SlabMove>>,
    /// Blocks for which there is no place, and their payload bytes.
    pub(crate) lost_blocks: u64,
    pub(crate) lost_bytes: u64,
}

impl Machine {
    /// Every slab that is durable.
    pub(crate) fn slabs_on_drives(&self) -> Vec<SlabPlace> {
        let mut found = Vec::new();
        for (id, block) in self.table.iter().filter(|(_, block)| !block.doomed) {
            self.places(id, block, &mut found);
        }
        found
    }

    fn places(&self, id: BlockId, block: &Block, found: &mut Vec<SlabPlace>) {
        let OnDrive::Durable(slots) = &block.drive else { return };
        let drive = &self.drives[usize::from(block.home)];
        for (slot, (bytes, crc32c)) in slots.iter().zip(&block.slabs) {
            let (file, offset) = drive.place(*slot);
            found.push(SlabPlace {
                block: id,
                drive: block.home,
                slot: *slot,
                file,
                offset,
                bytes: *bytes,
                crc32c: *crc32c,
                generation: block.generation,
            });
        }
    }

    /// Namespace and key of a block.
    pub(crate) fn name_of(&self, id: BlockId) -> (NamespaceId, BlockKey) {
        let block = self.table.get(id).expect("nothing leaves a machine that nobody drives");
        (self.namespace_id(block.key.ns), block.key.key)
    }

    /// What is to be done so that a drive keeps its first `segments` segments: blocks in others
    /// move to free slots, roots before leaves and the newest first, as far as there are any.
    pub(crate) fn shrink(&self, drive: DriveId, segments: u32) -> Shrink {
        let slots = &self.drives[usize::from(drive)].slots;
        let mut free: BTreeMap<u64, Vec<SlotId>> = BTreeMap::new();
        for slot in slots.free_slots().into_iter().filter(|slot| slot.segment < segments) {
            free.entry(slots.slot_bytes(slot.segment)).or_default().push(slot);
        }
        let beyond = |block: &Block| match &block.drive {
            OnDrive::Durable(slots) => slots.iter().any(|slot| slot.segment >= segments),
            _ => false,
        };
        let here = |block: &Block| !block.doomed && block.home == drive && beyond(block);
        let mut blocks: Vec<(BlockId, &Block)> =
            self.table.iter().filter(|(_, block)| here(block)).collect();
        blocks.sort_by_key(|(_, b)| (b.info.depth, std::cmp::Reverse(b.stored_unix_ns)));
        let mut shrink = Shrink::default();
        for (id, block) in blocks {
            match self.moves_of(id, block, segments, &mut free) {
                Some(moves) => shrink.moves.push(moves),
                None => {
                    shrink.lost_blocks += 1;
                    shrink.lost_bytes += block.bytes();
                }
            }
        }
        shrink
    }

    /// The moves of one block, with slots for all of it; those it does not get stay free.
    fn moves_of(
        &self,
        id: BlockId,
        block: &Block,
        segments: u32,
        free: &mut BTreeMap<u64, Vec<SlotId>>,
    ) -> Option<Vec<SlabMove>> {
        let mut from = Vec::new();
        self.places(id, block, &mut from);
        let mut to = Vec::new();
        for place in &from {
            let class = round_up_to_page(place.bytes);
            let slot = if place.slot.segment < segments {
                // It stays, and its header with it: a block is in one place only as a whole.
                Some(place.slot)
            } else {
                free.get_mut(&class).and_then(Vec::pop)
            };
            match slot {
                Some(slot) => to.push(slot),
                None => {
                    for (slot, place) in to.iter().zip(&from).filter(|(s, p)| **s != p.slot) {
                        free.entry(round_up_to_page(place.bytes)).or_default().push(*slot);
                    }
                    return None;
                }
            }
        }
        let drive = &self.drives[usize::from(block.home)];
        let headers = self.records_of(block, &to);
        let moves =
            from.into_iter().zip(&to).zip(headers).filter(|((p, slot), _)| p.slot != **slot);
        Some(
            moves
                .map(|((from, slot), header)| SlabMove {
                    from,
                    to: drive.place(*slot),
                    header,
                    header_offset: drive.slots.geometry().header_offset(slot.index),
                })
                .collect(),
        )
    }
}
