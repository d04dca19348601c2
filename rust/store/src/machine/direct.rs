//! Direct reads: from a drive into memory that the caller registered, past the store's own.
//!
//! While one runs the block cannot leave its drive, nor can its slots there be used again. It is
//! worth what a load is: what was replaced or deleted meanwhile is a miss.

use super::{BlockId, Command, LoadFault, Machine, Op, OpId, SlabRead};
use crate::log::LogKind;
use crate::machine::get::State;
use crate::machine::table::OnDrive;
use smallvec::SmallVec;
use tiered_kv_io::CancelFlag;
use tiered_kv_types::{MissReason, Tier};

impl Machine {
    /// Begins to read a block into the caller's slot for `item`.
    pub(super) fn begin_direct(
        &mut self,
        op: OpId,
        item: usize,
        id: BlockId,
        cancel: &CancelFlag,
        out: &mut Vec<Command>,
    ) {
        let reads = self.slab_reads(id);
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        block.readers += 1;
        let bytes = block.bytes();
        self.loading_bytes += bytes;
        let (drive, cancel) = (block.home, cancel.clone());
        out.push(Command::LoadInto { op, item, block: id, drive, reads, cancel });
        self.read_begun(drive, bytes);
        self.refresh(id);
    }

    /// Where the slabs of a durable block are.
    pub(super) fn slab_reads(&self, id: BlockId) -> SmallVec<[SlabRead; 1]> {
        let block = self.table.get(id).expect("mapped blocks exist");
        let OnDrive::Durable(slots) = &block.drive else {
            unreachable!("a block outside memory is durable: dirty blocks are not evicted");
        };
        let drive = &self.drives[usize::from(block.home)];
        let read = |(slot, (bytes, crc)): (&super::SlotId, &(u64, u32))| {
            let (file, offset) = drive.place(*slot);
            SlabRead { file, offset, bytes: *bytes, crc: *crc }
        };
        slots.iter().zip(&block.slabs).map(read).collect()
    }

    /// A direct read has ended: the kernel no longer touches the caller's slot.
    pub(super) fn loaded_into(
        &mut self,
        op: OpId,
        item: usize,
        id: BlockId,
        result: Result<(), LoadFault>,
        out: &mut Vec<Command>,
    ) {
        let block = self.table.get_mut(id).expect("a block is kept while it is read");
        block.readers -= 1;
        block.passed = result.is_ok();
        let (bytes, doomed, home) = (block.bytes(), block.doomed, block.home);
        self.loading_bytes -= bytes;
        self.read_ended(home, bytes, &result, out);
        let state = match result {
            _ if doomed => State::Miss(MissReason::Superseded),
            Ok(()) => {
                self.counters.direct_reads += 1;
                self.counters.direct_bytes += bytes;
                State::Done(Tier::Nvme)
            }
            Err(LoadFault::Cancelled) => {
                self.counters.loads_cancelled += 1;
                State::Miss(MissReason::Cancelled)
            }
            Err(LoadFault::NoMemory) => State::Miss(MissReason::NoSpace),
            Err(fault) => State::Miss(self.drive_fault(id, fault)),
        };
        self.bury(id);
        self.refresh(id);
        let Some(Op::Get(get)) = self.ops.get_mut(&op) else { return };
        get.read(item, state);
        self.finish_get(op, out);
    }

    /// A copy on a drive could not be read or is not what was stored: it is taken out of use.
    pub(super) fn drive_fault(&mut self, id: BlockId, fault: LoadFault) -> MissReason {
        let reason = match fault {
            LoadFault::Corrupt => MissReason::Corrupt,
            _ => MissReason::IoError,
        };
        let key = self.table.get(id).expect("the caller holds a live block").key;
        self.counters.load_faults += 1;
        self.counters.corrupt_nvme += u64::from(fault == LoadFault::Corrupt);
        self.log.push(self.now, LogKind::Fault(reason), &key, Some(Tier::Nvme));
        self.quarantine(id);
        self.remove_block(id, reason);
        reason
    }
}
