//! Holds: handles that keep blocks in some tier between a lookup and their load.

use super::table::Why;
use super::{BlockId, Command, Machine, OpId, Outcome};
use std::collections::{BTreeMap, BTreeSet};
use tiered_kv_io::Nanos;
use tiered_kv_types::BlockKey;

/// Number of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HoldId(pub u64);

#[derive(Debug)]
struct Hold {
    /// Blocks with the generation that is held: a number may be reused after its block is gone.
    blocks: Vec<(BlockId, u64)>,
    bytes: u64,
    expires: Nanos,
}

/// All holds, with their times of expiry.
#[derive(Debug, Default)]
pub(super) struct Holds {
    by_id: BTreeMap<HoldId, Hold>,
    expiries: BTreeSet<(Nanos, HoldId)>,
    pub(super) bytes: u64,
}

impl Holds {
    pub(super) fn next_expiry(&self) -> Option<Nanos> {
        self.expiries.first().map(|(at, _)| *at)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}

impl Machine {
    /// Holds those of the keys that are stored, as long as the bytes held stay below their cap.
    pub(super) fn hold(
        &mut self,
        op: OpId,
        ns: u32,
        keys: &[BlockKey],
        expires: Nanos,
        out: &mut Vec<Command>,
    ) {
        let mut hold = Hold { blocks: Vec::new(), bytes: 0, expires };
        let mut held = Vec::with_capacity(keys.len());
        for key in keys {
            let id = self.table.id(&Self::full(ns, *key));
            held.push(id.is_some_and(|id| self.hold_block(id, &mut hold)));
        }
        let id = HoldId(op.0);
        self.holds.bytes += hold.bytes;
        self.holds.expiries.insert((expires, id));
        self.holds.by_id.insert(id, hold);
        self.complete(op, 0, Outcome::Held(id, held), out);
    }

    fn hold_block(&mut self, id: BlockId, hold: &mut Hold) -> bool {
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        let bytes = block.bytes();
        if self.holds.bytes + hold.bytes + bytes > self.limits.held_high_bytes {
            return false;
        }
        block.holds += 1;
        hold.bytes += bytes;
        hold.blocks.push((id, block.generation));
        self.refresh(id);
        true
    }

    /// Ends a hold: by its owner, by a load or by time. One that has ended is none of these.
    pub(super) fn release(&mut self, id: HoldId) {
        let Some(hold) = self.holds.by_id.remove(&id) else { return };
        self.holds.expiries.remove(&(hold.expires, id));
        self.holds.bytes -= hold.bytes;
        for (id, generation) in hold.blocks {
            let Some(block) = self.table.get_mut(id) else { continue };
            if block.generation == generation && !block.doomed {
                block.holds -= 1;
                self.refresh(id);
            }
        }
    }

    pub(super) fn expire_holds(&mut self) {
        while let Some((at, id)) = self.holds.expiries.first().copied() {
            if at > self.now.mono {
                break;
            }
            self.counters.holds_expired += 1;
            self.release(id);
        }
    }

    /// Begins to load what is on a drive, without anybody waiting for it.
    pub(super) fn prefetch(&mut self, ns: u32, keys: &[BlockKey], out: &mut Vec<Command>) {
        if self.staging.on {
            // There is nowhere to keep it.
            self.counters.prefetch_ignored += keys.len() as u64;
            return;
        }
        for key in keys {
            let Some(id) = self.table.id(&Self::full(ns, *key)) else { continue };
            let block = self.table.get_mut(id).expect("mapped blocks exist");
            if let Some(load) = &mut block.load {
                // Asked for now, it makes way for nobody.
                (load.ahead, load.why) = (true, Why::Asked);
                load.cancel.set(false);
                continue;
            }
            if block.in_dram || !self.fits_layout(id, ns) || !self.is_asked(id) {
                continue;
            }
            let bytes = self.table.get(id).expect("mapped blocks exist").bytes();
            // Half of the budget: somebody waits for the other loads.
            let busy = self.loading_bytes + bytes > self.limits.load_high_bytes / 2;
            if busy || !self.begin_load(id, out) {
                break;
            }
            let block = self.table.get_mut(id).expect("mapped blocks exist");
            block.load.as_mut().expect("just begun").ahead = true;
            self.counters.prefetched += 1;
        }
    }
}
