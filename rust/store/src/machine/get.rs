//! Getting blocks: pin what is in memory, load the rest once for all waiters, miss with a reason.

use super::table::Load;
use super::{BlockId, Command, GetItem, GetTarget, HoldId, LoadFault, Machine, Op, OpId, Outcome};
use crate::index::FullKey;
use crate::log::LogKind;
use crate::resident::{Filled, Resident};
use crate::sync::Arc;
use smallvec::SmallVec;
use tiered_kv_io::{CancelFlag, Nanos};
use tiered_kv_types::{BlockKey, MissReason, Tier};

#[derive(Debug)]
pub(super) enum State {
    Hit(Arc<Resident>, Tier),
    Loading,
    /// On its way from a drive into the caller's slot.
    Reading,
    Copying(Tier),
    Done(Tier),
    Miss(MissReason),
}

/// A get in progress.
#[derive(Debug)]
pub(super) struct GetOp {
    ns: u32,
    keys: Vec<BlockKey>,
    states: Vec<State>,
    loading: usize,
    copying: usize,
    reading: usize,
    deadline: Nanos,
    /// When it began to wait for a drive, where it did.
    waits_since: Option<Nanos>,
    target: GetTarget,
    /// Ends when the get has ended: the blocks are pinned then, or were missed.
    hold: Option<HoldId>,
    /// Why it was ended early, where it was.
    ended: Option<MissReason>,
    /// Nanoseconds in which the caller would compute one of the blocks, if it has said so.
    recompute: Option<Nanos>,
    /// So many of the blocks are worth loading.
    worth: usize,
    /// Set once its direct reads are no longer wanted.
    cancel: CancelFlag,
}

/// A block that a get waits for.
pub(super) struct Waiting {
    pub(super) op: OpId,
    pub(super) item: usize,
    pub(super) id: BlockId,
    pub(super) key: FullKey,
}

impl GetOp {
    pub(super) fn new(
        ns: u32,
        keys: Vec<BlockKey>,
        deadline: Nanos,
        target: GetTarget,
        hold: Option<HoldId>,
        recompute: Option<Nanos>,
    ) -> Self {
        let states = Vec::with_capacity(keys.len());
        Self {
            ns,
            keys,
            states,
            loading: 0,
            copying: 0,
            reading: 0,
            deadline,
            waits_since: None,
            target,
            hold,
            ended: None,
            recompute,
            worth: usize::MAX,
            cancel: CancelFlag::default(),
        }
    }

    pub(super) fn ns(&self) -> u32 {
        self.ns
    }

    pub(super) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    pub(super) fn states(&self) -> &[State] {
        &self.states
    }

    /// A direct read has ended.
    pub(super) fn read(&mut self, item: usize, state: State) {
        debug_assert!(matches!(self.states[item], State::Reading));
        self.reading -= 1;
        self.states[item] = match (state, self.ended) {
            (State::Miss(MissReason::Cancelled), Some(reason)) => State::Miss(reason),
            (state, _) => state,
        };
    }

    /// Settles one block; returns what is to be copied out for it.
    fn settle(&mut self, item: usize, state: State) -> Option<Arc<Resident>> {
        let (state, copy) = match state {
            State::Hit(resident, tier) if self.target != GetTarget::Leases => {
                self.copying += 1;
                (State::Copying(tier), Some(resident))
            }
            other => (other, None),
        };
        match self.states.get_mut(item) {
            Some(slot) => *slot = state,
            None => self.states.push(state),
        }
        copy
    }
}

impl Machine {
    pub(super) fn get(&mut self, op: OpId, mut get: GetOp, out: &mut Vec<Command>) {
        let deadline = get.deadline;
        if let Some(recompute) = get.recompute {
            get.worth = self.worth_loading(&get, recompute);
        }
        let mut no_space = false;
        for item in 0..get.keys.len() {
            let state = self.find(op, item, &get, &mut no_space, out);
            get.loading += usize::from(matches!(state, State::Loading));
            get.reading += usize::from(matches!(state, State::Reading));
            if let Some(from) = get.settle(item, state) {
                out.push(Command::CopyOut { op, item, from });
            }
        }
        if get.loading + get.reading > 0 {
            get.waits_since = Some(self.now.mono);
            self.get_waits(&get);
        }
        self.ops.insert(op, Op::Get(get));
        self.timers.insert((deadline, op));
        self.finish_get(op, out);
    }

    /// One block of a get: a hit in memory, a load joined or begun, or a miss. Once one load found
    /// no room, later ones are not begun: the get is cut to the prefix that it could take.
    fn find(
        &mut self,
        op: OpId,
        item: usize,
        get: &GetOp,
        no_space: &mut bool,
        out: &mut Vec<Command>,
    ) -> State {
        let key = Self::full(get.ns, get.keys[item]);
        let Some(id) = self.table.id(&key) else { return State::Miss(MissReason::Absent) };
        if let Some(resident) = self.index.pin(&key) {
            self.was_read(id);
            return State::Hit(resident, if self.staging.on { Tier::Nvme } else { Tier::Dram });
        }
        let asked = self.is_asked(id);
        if asked && item >= get.worth {
            return self.not_worth(get, item);
        }
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        if let Some(load) = &mut block.load
            && asked
        {
            load.waiters.push((op, item));
            load.cancel.set(false);
            return State::Loading;
        }
        let bytes = block.bytes();
        if !self.fits_layout(id, get.ns) {
            return State::Miss(MissReason::Length);
        }
        if !self.is_asked(id) {
            return State::Miss(MissReason::CircuitOpen);
        }
        if *no_space {
            return State::Miss(MissReason::NoSpace);
        }
        if self.loading_bytes > 0 && self.loading_bytes + bytes > self.limits.load_high_bytes {
            *no_space = true;
            return State::Miss(MissReason::LoadCap);
        }
        if get.target == GetTarget::Slots {
            self.begin_direct(op, item, id, &get.cancel, out);
            return State::Reading;
        }
        if !self.begin_load(id, out) {
            *no_space = true;
            return State::Miss(MissReason::NoSpace);
        }
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        block.load.get_or_insert_default().waiters.push((op, item));
        State::Loading
    }

    /// Whether the stored slabs have the lengths that the namespace's layout gives them.
    pub(super) fn fits_layout(&self, id: BlockId, ns: u32) -> bool {
        let block = self.table.get(id).expect("mapped blocks exist");
        block.slabs.iter().map(|(len, _)| *len).eq(self.layout(ns).slab_bytes().iter().copied())
    }

    /// Begins to load a block from its drive into memory, if slots for it can be had.
    pub(super) fn begin_load(&mut self, id: BlockId, out: &mut Vec<Command>) -> bool {
        // Marked first, so that making room does not evict what is about to be read.
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        let cancel = CancelFlag::default();
        block.load = Some(Box::new(Load { cancel: cancel.clone(), ..Load::default() }));
        let key = block.key;
        let lens: SmallVec<[u64; 1]> = block.slabs.iter().map(|(len, _)| *len).collect();
        self.refresh(id);
        let Some(into) = self.memory_for_slabs(key.ns, &lens) else {
            self.table.get_mut(id).expect("mapped blocks exist").load = None;
            self.refresh(id);
            return false;
        };
        let reads = self.slab_reads(id);
        let drive = self.table.get(id).expect("mapped blocks exist").home;
        out.push(Command::Load { block: id, drive, reads, into, cancel });
        self.read_begun(drive, lens.iter().sum());
        self.index.update(&key, |entry| entry.loading = true);
        self.loading_bytes += lens.iter().sum::<u64>();
        true
    }

    pub(super) fn load_done(
        &mut self,
        id: BlockId,
        result: Result<Filled, LoadFault>,
        out: &mut Vec<Command>,
    ) {
        let Some(block) = self.table.get_mut(id) else { return };
        let (bytes, doomed, key, home) = (block.bytes(), block.doomed, block.key, block.home);
        let Load { waiters, ahead, why, .. } = *block.load.take().expect("a load ends once");
        self.loading_bytes -= bytes;
        self.flew(id, bytes);
        self.read_ended(home, bytes, &result, out);
        if doomed {
            self.bury(id);
            return;
        }
        match result {
            Ok(filled) => {
                self.counters.onboarded += 1;
                self.counters.onboarded_bytes += bytes;
                self.enter_memory(id, filled);
                self.admit_to_policy(id, Tier::Dram);
                self.moved_up(id, why, !waiters.is_empty());
                self.refresh_with_parent(id);
                for (op, item) in waiters {
                    let resident = self.index.pin(&key).expect("it has just entered memory");
                    self.load_settled(op, item, State::Hit(resident, Tier::Nvme), out);
                }
                self.is_leaving(id);
            }
            Err(LoadFault::Cancelled) => self.load_cancelled(id, waiters, ahead, out),
            Err(fault) => {
                let reason = self.drive_fault(id, fault);
                for (op, item) in waiters {
                    self.load_settled(op, item, State::Miss(reason), out);
                }
            }
        }
    }

    /// A load was dropped before the device had it, since nobody waited: it begins again for
    /// whoever came meanwhile.
    fn load_cancelled(
        &mut self,
        id: BlockId,
        waiters: Vec<(OpId, usize)>,
        ahead: bool,
        out: &mut Vec<Command>,
    ) {
        self.counters.loads_cancelled += 1;
        let key = self.table.get(id).expect("the caller holds a live block").key;
        self.index.update(&key, |entry| entry.loading = false);
        self.refresh(id);
        self.reclaim();
        if waiters.is_empty() && !ahead {
            return;
        }
        if self.begin_load(id, out) {
            let block = self.table.get_mut(id).expect("mapped blocks exist");
            let load = block.load.as_mut().expect("just begun");
            (load.waiters, load.ahead) = (waiters, ahead);
            return;
        }
        for (op, item) in waiters {
            self.load_settled(op, item, State::Miss(MissReason::NoSpace), out);
        }
    }

    pub(super) fn load_settled(
        &mut self,
        op: OpId,
        item: usize,
        state: State,
        out: &mut Vec<Command>,
    ) {
        let Some(Op::Get(get)) = self.ops.get_mut(&op) else { return };
        if !matches!(get.states[item], State::Loading) {
            return;
        }
        get.loading -= 1;
        if let Some(from) = get.settle(item, state) {
            out.push(Command::CopyOut { op, item, from });
        }
        self.finish_get(op, out);
    }

    /// Every block that a get waits for, in the order of the calls.
    pub(super) fn waiting_gets(&self) -> Vec<Waiting> {
        let mut waiting = Vec::new();
        for (op, get) in &self.ops {
            let Op::Get(get) = get else { continue };
            for (item, (key, state)) in get.keys.iter().zip(&get.states).enumerate() {
                let key = Self::full(get.ns, *key);
                if let (State::Loading, Some(id)) = (state, self.table.id(&key)) {
                    waiting.push(Waiting { op: *op, item, id, key });
                }
            }
        }
        waiting.sort_by_key(|waiting| (waiting.op, waiting.item));
        waiting
    }

    /// Tells waiters of blocks that were removed meanwhile.
    pub(super) fn settle_missed(&mut self, out: &mut Vec<Command>) {
        while let Some((op, item, reason)) = self.load_missed.pop() {
            self.load_settled(op, item, State::Miss(reason), out);
        }
    }

    pub(super) fn copied_out(
        &mut self,
        op: OpId,
        item: usize,
        intact: Option<bool>,
        generation: u64,
        out: &mut Vec<Command>,
    ) {
        let Some(Op::Get(get)) = self.ops.get_mut(&op) else { return };
        get.copying -= 1;
        let key = Self::full(get.ns, get.keys[item]);
        let tier = match get.states[item] {
            State::Copying(tier) => tier,
            _ => unreachable!("only a block that is being copied ends its copy"),
        };
        get.states[item] = match intact {
            Some(true) => State::Done(tier),
            Some(false) => State::Miss(MissReason::Corrupt),
            None => State::Miss(MissReason::Length),
        };
        if intact == Some(false) {
            self.memory_corrupt(key, generation);
        }
        self.finish_get(op, out);
    }

    /// A copy in memory no longer has its checksum: it is dropped; a durable copy stays.
    fn memory_corrupt(&mut self, key: FullKey, generation: u64) {
        self.counters.corrupt_dram += 1;
        self.log.push(self.now, LogKind::Fault(MissReason::Corrupt), &key, Some(Tier::Dram));
        let Some(id) = self.table.id(&key) else { return };
        let block = self.table.get(id).expect("mapped blocks exist");
        if block.generation != generation {
            // The copy was replaced meanwhile: the one that is served is another.
            return;
        }
        if !block.is_durable() {
            self.remove_block(id, MissReason::Corrupt);
        } else if block.in_dram {
            self.index.update(&key, |entry| entry.resident = None);
            self.leave_memory(id);
            self.refresh_with_parent(id);
            self.reclaim();
        }
    }

    /// Ends a get early: what is still loading misses; copies and reads into the caller's memory
    /// end first.
    pub(super) fn end_get(&mut self, op: OpId, reason: MissReason, out: &mut Vec<Command>) {
        let Some(Op::Get(get)) = self.ops.get_mut(&op) else { return };
        get.ended = Some(reason);
        get.loading = 0;
        get.cancel.set(true);
        let (mut given_up, mut slow) = (Vec::new(), Vec::new());
        for (key, state) in get.keys.iter().zip(&mut get.states) {
            if matches!(state, State::Loading | State::Reading) {
                slow.push(Self::full(get.ns, *key));
            }
            if matches!(state, State::Loading) {
                *state = State::Miss(reason);
                given_up.push(Self::full(get.ns, *key));
            }
        }
        if reason == MissReason::Deadline {
            for key in &slow {
                self.log.push(self.now, LogKind::Slow, key, Some(Tier::Nvme));
            }
        }
        given_up.into_iter().for_each(|key| self.stop_waiting(&key, op));
        self.finish_get(op, out);
    }

    /// The load of `key` stops, if it can, when its last waiter is gone.
    pub(super) fn stop_waiting(&mut self, key: &FullKey, op: OpId) {
        let Some(id) = self.table.id(key) else { return };
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        let Some(load) = &mut block.load else { return };
        load.waiters.retain(|(waiter, _)| *waiter != op);
        if load.waiters.is_empty() && !load.ahead {
            load.cancel.set(true);
        }
    }

    pub(super) fn finish_get(&mut self, op: OpId, out: &mut Vec<Command>) {
        let Some(Op::Get(get)) = self.ops.get(&op) else { return };
        if get.loading > 0 || get.copying > 0 || get.reading > 0 {
            return;
        }
        let Some(Op::Get(get)) = self.ops.remove(&op) else { return };
        let deadline = get.deadline;
        if let Some(since) = get.waits_since {
            self.latencies.load.took(self.now.mono.saturating_sub(since));
        }
        if let Some(hold) = get.hold {
            self.release(hold);
        }
        let outcome = self.report(get);
        self.complete(op, deadline, outcome, out);
    }

    fn report(&mut self, get: GetOp) -> Outcome {
        let block_bytes = self.layout(get.ns).block_bytes();
        let into_memory = get.target != GetTarget::Leases;
        let mut into = Vec::new();
        let mut items = Vec::new();
        for state in get.states {
            let (result, source) = match state {
                State::Hit(resident, tier) => (Ok(Some(resident)), tier),
                State::Done(tier) => (Ok(None), tier),
                State::Miss(reason) => (Err(reason), Tier::Dram),
                State::Loading | State::Reading | State::Copying(_) => {
                    unreachable!("every block is settled")
                }
            };
            match &result {
                // A lease counts as a hit when it is made: it may still be beyond the cap.
                Ok(Some(_)) => {}
                Ok(None) => self.counters.hit(source, block_bytes),
                Err(reason) => self.counters.missed(*reason),
            }
            match result {
                Ok(Some(resident)) => items.push(GetItem { result: Ok(resident), source }),
                Ok(None) => into.push(Ok(source)),
                Err(reason) if into_memory => into.push(Err(reason)),
                Err(reason) => items.push(GetItem { result: Err(reason), source }),
            }
        }
        if into_memory { Outcome::Into(into) } else { Outcome::Get(items) }
    }
}
