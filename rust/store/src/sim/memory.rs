//! The callers' memory in the simulated world: who has it, and that nobody else writes to it.

use super::faults::Fault;
use super::world::{Call, World};
use crate::direct::DirectRead;
use crate::machine::{Command, LoadFault, OpId, SlabRead};
use std::sync::Arc;
use tiered_kv_io::{AlignedBuf, CancelFlag, Region, RegionSlot, crc32c};
use tiered_kv_types::KvLayout;

/// The caller's memory for one block of a get.
pub(super) enum Buffer {
    Heap(Vec<u8>),
    Slot(RegionSlot),
    /// With a copy or a read in flight.
    Out,
}

impl Buffer {
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Slot(slot) => slot.as_mut_slice(),
            Self::Out => panic!("the memory is still in use"),
        }
    }
}

/// What memory of the caller's holds while no call may write to it.
pub(super) const CANARY: u8 = 0xa5;
/// As many of them as a slot has bytes, and more.
static CANARIES: [u8; 16 << 10] = [CANARY; 16 << 10];
pub(super) const REGION_SLOTS: usize = 24;

impl World {
    /// Hands the caller's memory out with the command that writes to it.
    pub(super) fn lend(&mut self, command: &Command) -> Buffer {
        match command {
            Command::CopyOut { op, item, .. } | Command::LoadInto { op, item, .. } => {
                let Some(Call::Get { buffers, .. }) = self.calls.get_mut(op) else {
                    panic!("a get is known until it completes")
                };
                let buffer = std::mem::replace(&mut buffers[*item], Buffer::Out);
                assert!(!matches!(buffer, Buffer::Out), "each buffer is filled once");
                buffer
            }
            _ => Buffer::Out,
        }
    }

    pub(super) fn back(&mut self, op: OpId, item: usize, buffer: Buffer) {
        let Some(Call::Get { buffers, .. }) = self.calls.get_mut(&op) else {
            panic!("a get does not end before its memory is back")
        };
        buffers[item] = buffer;
    }

    pub(super) fn load_into(
        &mut self,
        slot: RegionSlot,
        drive: u16,
        reads: &[SlabRead],
        cancel: &CancelFlag,
        fails: bool,
    ) -> (RegionSlot, Result<(), LoadFault>) {
        let (mut read, pieces) = DirectRead::new(slot, reads).expect("memory for a few pages");
        let flips = fails && self.draw(2) == 0;
        for (number, mut piece) in pieces.into_iter().enumerate() {
            let mut crc = None;
            if !cancel.is_set() {
                let bytes = piece.into.as_mut_slice();
                self.read(drive, piece.file, piece.offset, bytes, fails && !flips);
                if flips {
                    bytes[0] ^= 1;
                    self.struck(Fault::Flipped, || "on its way".into());
                }
                // As the blocking backend tells it.
                crc = Some(crc32c(piece.into.as_mut_slice()));
            }
            read.ended(number, piece.into, crc);
        }
        read.finish(match (cancel.is_set(), fails && !flips) {
            (true, _) => Err(LoadFault::Cancelled),
            (_, true) => Err(LoadFault::Io),
            _ => Ok(()),
        })
    }

    /// Memory that no call uses is as the caller left it.
    pub(super) fn check_canaries(&self) {
        for slot in self.idle.iter().flatten() {
            let untouched = slot.as_slice() == &CANARIES[..slot.as_slice().len()];
            assert!(untouched, "seed {}: memory was written after its call ended", self.seed);
        }
    }
}

pub(super) fn region(layout: &KvLayout, stride: usize) -> Arc<Region> {
    let bytes = (REGION_SLOTS * stride).next_multiple_of(4096);
    let slot_bytes = usize::try_from(layout.block_bytes()).expect("small");
    // The memory may hold a slot more than is used.
    Region::new(AlignedBuf::new(bytes).expect("memory"), slot_bytes, stride).expect("valid")
}

pub(super) fn fresh_slots(region: &Arc<Region>) -> Vec<RegionSlot> {
    let mut slots = region.claim_all(&(0..REGION_SLOTS).collect::<Vec<_>>()).expect("free");
    slots.iter_mut().for_each(|slot| slot.as_mut_slice().fill(CANARY));
    slots
}
