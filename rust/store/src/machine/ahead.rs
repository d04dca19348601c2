//! What is moved up before anybody asks: what is stored behind the block that a get read from a
//! drive, a window forward along the chain; and what was read past memory and belongs there.
//!
//! Nothing of it is done on the path of a call: a get leaves a mark, and blocks are read when no
//! drive of theirs has a read that somebody waits for, few at a time. A get that needs the drive
//! drops those that the drive has not begun.

use super::get::{GetOp, State};
use super::table::Why;
use super::{BlockId, Command, DriveId, Machine};
use smallvec::SmallVec;
use std::collections::VecDeque;
use tiered_kv_io::Nanos;
use tiered_kv_policy::{Costs, Window, belongs};
use tiered_kv_types::{Tier, round_up_to_page};

/// Blocks and bytes that are moved up at once: a load that comes meanwhile may wait for them.
const FLIGHT_BLOCKS: usize = 8;
const FLIGHT_BYTES: u64 = 4 << 20;
/// Blocks that one step compares with what is in memory: others wait for the lock meanwhile.
const JUDGED: usize = 16;
/// Marks and blocks that wait, at most.
const MARKS: usize = 64;
const WAITING: usize = 1024;
/// How long a block that was moved up stays for whoever is to read it, and in which part of memory.
const KEPT: Nanos = 2_000_000_000;
const KEPT_PART: u64 = 8;

/// A block and its generation: a number may be reused after its block is gone.
type Named = (BlockId, u64);

#[derive(Debug)]
pub(super) struct Ahead {
    /// `None` where nothing is moved up unasked.
    window: Option<Window>,
    /// Blocks that a request has just read last, behind which others are wanted.
    marks: VecDeque<Named>,
    /// Behind those, and blocks that were read past memory.
    guesses: VecDeque<Named>,
    promotions: VecDeque<Named>,
    /// Loads under way.
    flying: SmallVec<[BlockId; FLIGHT_BLOCKS]>,
    flying_bytes: u64,
    /// What stays for a while, until when, and its bytes.
    kept: VecDeque<(Nanos, Named, u64)>,
    kept_bytes: u64,
}

impl Ahead {
    /// A window that may waste this part of what is moved up; 0: nothing is.
    pub(super) fn new(waste: f64) -> Self {
        Self {
            window: (waste > 0.0).then(|| Window::within(waste)),
            marks: VecDeque::new(),
            guesses: VecDeque::new(),
            promotions: VecDeque::new(),
            flying: SmallVec::new(),
            flying_bytes: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
        }
    }

    /// Blocks of a drive were moved up, or left memory unread.
    fn told(&mut self, moved: usize, wasted: usize) {
        if let Some(window) = &mut self.window {
            window.told(moved, wasted);
        }
    }

    fn push(queue: &mut VecDeque<Named>, most: usize, named: Named) {
        if queue.len() >= most {
            queue.pop_front();
        }
        queue.push_back(named);
    }

    fn forget(&mut self) {
        self.marks.clear();
        self.guesses.clear();
        self.promotions.clear();
    }
}

impl Machine {
    fn named(&self, id: BlockId) -> Named {
        (id, self.table.get(id).expect("mapped blocks exist").generation)
    }

    /// A block that is still the one that was named.
    fn still(&self, (id, generation): Named) -> Option<&super::table::Block> {
        self.table.get(id).filter(|block| block.generation == generation && !block.doomed)
    }

    /// A get waits for a drive: what is only expected makes way, and what is behind it is wanted.
    pub(super) fn get_waits(&mut self, get: &GetOp) {
        if self.ahead.window.is_none() || self.staging.on {
            return;
        }
        for id in self.ahead.flying.clone() {
            let load = self.table.get_mut(id).and_then(|block| block.load.as_mut());
            let load = load.filter(|load| load.why != Why::Asked && load.waiters.is_empty());
            if let Some(load) = load {
                load.ahead = false;
                load.cancel.set(true);
            }
        }
        let found = get.found().filter_map(|key| self.table.id(&Self::full(get.ns(), key)));
        if let Some(last) = found.last() {
            let mark = self.named(last);
            Ahead::push(&mut self.ahead.marks, MARKS, mark);
        }
    }

    /// Where a request went on from each of its blocks: what is wanted behind one follows that.
    pub(super) fn went_on(&mut self, blocks: &[Option<BlockId>]) {
        for pair in blocks.windows(2) {
            if let [Some(before), Some(next)] = pair
                && let Some(block) = self.table.get_mut(*before)
            {
                block.next = Some(*next);
            }
        }
        for id in blocks.iter().flatten() {
            self.was_read(*id);
            let Some(block) = self.table.get_mut(*id) else { continue };
            if std::mem::take(&mut block.passed) && !block.in_dram {
                let named = self.named(*id);
                Ahead::push(&mut self.ahead.promotions, WAITING, named);
            }
        }
    }

    /// A block in memory was read.
    pub(super) fn was_read(&mut self, id: BlockId) {
        if self.table.get_mut(id).is_some_and(|block| std::mem::take(&mut block.unread)) {
            self.counters.ahead_used += 1;
            self.may_go(id);
        }
    }

    /// A block leaves memory.
    pub(super) fn goes(&mut self, id: BlockId) {
        if self.table.get_mut(id).is_some_and(|block| std::mem::take(&mut block.unread)) {
            self.counters.ahead_wasted += 1;
            self.ahead.told(0, 1);
        }
        self.may_go(id);
    }

    /// A block that was kept for a while is like every other from now on.
    fn may_go(&mut self, id: BlockId) {
        let Some(block) = self.table.get_mut(id) else { return };
        if std::mem::take(&mut block.expected) {
            self.ahead.kept_bytes -= block.slot_bytes();
            self.refresh(id);
        }
    }

    /// A load has ended that nobody had asked for when it began.
    pub(super) fn flew(&mut self, id: BlockId, bytes: u64) {
        if let Some(at) = self.ahead.flying.iter().position(|flying| *flying == id) {
            self.ahead.flying.swap_remove(at);
            self.ahead.flying_bytes -= bytes;
            let home = self.table.get(id).expect("a block is kept while it is read").home;
            self.drives[usize::from(home)].ahead_bytes -= bytes;
        }
    }

    /// A block has come into memory from its drive; `waited` where somebody waits for it.
    pub(super) fn moved_up(&mut self, id: BlockId, why: Why, waited: bool) {
        self.ahead.told(1, 0);
        self.counters.promoted += u64::from(why == Why::Promoted);
        if why != Why::Behind {
            return;
        }
        self.counters.ahead_loaded += 1;
        if waited {
            self.counters.ahead_used += 1;
            return;
        }
        let named = self.named(id);
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        (block.unread, block.expected) = (true, true);
        let bytes = block.slot_bytes();
        self.ahead.kept_bytes += bytes;
        self.ahead.kept.push_back((self.now.mono + KEPT, named, bytes));
        self.keep_few();
    }

    /// Lets the block that was moved up first go, of a namespace or of any: somebody needs its
    /// place, or that of what it keeps in memory before it. False where none is kept.
    pub(super) fn keep_one_less(&mut self, ns: Option<u32>) -> bool {
        let stays = |machine: &Self, (_, named, _): &(Nanos, Named, u64)| {
            let block = machine.still(*named).filter(|block| block.expected);
            block.is_some_and(|block| ns.is_none_or(|ns| block.key.ns == ns))
        };
        let Some(at) = self.ahead.kept.iter().position(|kept| stays(self, kept)) else {
            return false;
        };
        let (_, named, _) = self.ahead.kept.remove(at).expect("just found");
        self.may_go(named.0);
        true
    }

    /// Lets those that were moved up first go where they take up too much, or for too long.
    pub(super) fn keep_few(&mut self) {
        let most = self.memory.capacity_bytes() / KEPT_PART;
        while let Some((until, named, _)) = self.ahead.kept.front().copied() {
            if until > self.now.mono && self.ahead.kept_bytes <= most {
                return;
            }
            self.ahead.kept.pop_front();
            if self.still(named).is_some() {
                self.may_go(named.0);
            }
        }
    }

    /// Begins to read what is expected to be asked for, where nobody waits for the drive.
    pub(super) fn pump_ahead(&mut self, out: &mut Vec<Command>) {
        if self.ahead.window.is_none() || self.staging.on {
            return;
        }
        if self.closing.is_some() || self.closed {
            return self.ahead.forget();
        }
        let mut judged = 0;
        while self.ahead.flying.len() < FLIGHT_BLOCKS && self.ahead.flying_bytes < FLIGHT_BYTES {
            let next = self.next_guess().map(|named| (named, Why::Behind));
            let promoted = || self.ahead.promotions.front().map(|named| (*named, Why::Promoted));
            let Some((named, why)) = next.or_else(promoted) else { return };
            if self.is_movable(named) {
                if self.is_waited_for(named.0) {
                    return;
                }
                if why == Why::Promoted {
                    judged += 1;
                    if judged > JUDGED {
                        return;
                    }
                }
                if why == Why::Behind || self.belongs_in_memory(named.0) {
                    self.move_up(named.0, why, out);
                }
            }
            match why {
                Why::Behind => self.ahead.guesses.pop_front(),
                _ => self.ahead.promotions.pop_front(),
            };
        }
    }

    /// The next block behind what was read.
    fn next_guess(&mut self) -> Option<Named> {
        while self.ahead.guesses.is_empty() {
            let mark = self.ahead.marks.pop_front()?;
            let Some(block) = self.still(mark) else { continue };
            // What stays keeps what is before it: a window takes up no more than what may stay.
            let most = self.memory.capacity_bytes() / KEPT_PART / block.slot_bytes().max(1);
            let width = self.ahead.window.as_ref().map_or(0, Window::width);
            let mut at = Some(mark.0);
            for _ in 0..width.min(usize::try_from(most).unwrap_or(usize::MAX)) {
                at = at.and_then(|id| self.behind(id));
                let Some(id) = at else { break };
                let named = self.named(id);
                Ahead::push(&mut self.ahead.guesses, WAITING, named);
            }
        }
        self.ahead.guesses.front().copied()
    }

    /// The block behind another that was read last, or else the one that was stored last.
    fn behind(&self, id: BlockId) -> Option<BlockId> {
        let block = self.table.get(id)?;
        let (key, next) = (block.key, block.next);
        let ours = |id: &BlockId| {
            let behind = self.table.get(*id).filter(|behind| !behind.doomed);
            behind.is_some_and(|b| b.key.ns == key.ns && b.parent == Some(key.key))
        };
        next.filter(ours).or_else(|| self.table.children(&key).next())
    }

    /// Whether a block is on its drive only and may be read.
    fn is_movable(&self, named: Named) -> bool {
        let Some(block) = self.still(named) else { return false };
        let idle = block.is_durable() && !block.in_dram && block.load.is_none();
        let known = self.namespaces[block.key.ns as usize].layout.is_some();
        idle && known && self.is_asked(named.0) && self.fits_layout(named.0, block.key.ns)
    }

    /// Whether somebody waits for reads of the block's drive, or too much is being read.
    fn is_waited_for(&self, id: BlockId) -> bool {
        let block = self.table.get(id).expect("it is movable");
        let drive = &self.drives[usize::from(block.home)];
        let busy = self.loading_bytes + block.bytes() > self.limits.load_high_bytes / 2;
        busy || drive.pace.waiting() > drive.ahead_bytes || self.is_joined()
    }

    /// Whether somebody waits for what is being read ahead.
    fn is_joined(&self) -> bool {
        let load = |id: &BlockId| self.table.get(*id).and_then(|block| block.load.as_ref());
        self.ahead.flying.iter().filter_map(load).any(|load| !load.waiters.is_empty())
    }

    fn move_up(&mut self, id: BlockId, why: Why, out: &mut Vec<Command>) {
        if !self.begin_load(id, out) {
            return;
        }
        let block = self.table.get_mut(id).expect("mapped blocks exist");
        let load = block.load.as_mut().expect("just begun");
        (load.ahead, load.why) = (true, why);
        let bytes = block.bytes();
        self.drives[usize::from(block.home)].ahead_bytes += bytes;
        self.ahead.flying.push(id);
        self.ahead.flying_bytes += bytes;
    }

    /// Whether a block that only its drive has is worth more in memory than what would have to
    /// leave.
    fn belongs_in_memory(&mut self, id: BlockId) -> bool {
        let block = self.table.get(id).expect("it is movable");
        let classes: SmallVec<[u64; 1]> =
            block.slabs.iter().map(|(bytes, _)| round_up_to_page(*bytes)).collect();
        let value = self.value_in_memory(id, Tier::Nvme);
        classes.iter().all(|class| {
            let free = self.memory.has_room(*class);
            let victim = (!free).then(|| {
                self.find_victim(Tier::Dram, 0, |shape| shape.contains(class))
                    .map(|victim| self.value_in_memory(victim, Tier::Dram))
            });
            match victim {
                None => belongs(value, None),
                Some(marginal) => marginal.is_some_and(|least| belongs(value, Some(least))),
            }
        })
    }

    /// Seconds that memory saves of reading a block, for each second and byte.
    fn value_in_memory(&self, id: BlockId, there: Tier) -> f64 {
        let block = self.table.get(id).expect("mapped blocks exist");
        let rate = self.drives[usize::from(block.home)].pace.bytes_per_s();
        let bytes = block.bytes() as f64;
        // Beside each other, blocks of a drive that was never measured are as fast as any.
        let costs = Costs { recompute_s: bytes / rate.unwrap_or(1e9), load_s: 0.0, bytes };
        costs.value(self.policy.worth(there, id))
    }

    /// Whether a block is worth more on a drive than what would leave for a slot of `class`.
    pub(super) fn belongs_on_drive(&mut self, id: BlockId, home: DriveId, class: u64) -> bool {
        let key = self.table.get(id).expect("the caller holds a live block").key;
        if self.table.kin(&key).drive > 0 {
            // What has blocks behind it there goes with them, whatever it is worth.
            return true;
        }
        let victim = self.find_victim(Tier::Nvme, home, |shape| shape.contains(&class));
        let Some(victim) = victim else { return true };
        let value = self.value_on_drive(id, Tier::Dram);
        belongs(value, Some(self.value_on_drive(victim, Tier::Nvme)))
    }

    /// What a drive saves of computing a block, for each second and byte. What a token takes to
    /// compute is in no comparison between blocks.
    fn value_on_drive(&self, id: BlockId, there: Tier) -> f64 {
        let block = self.table.get(id).expect("mapped blocks exist");
        let recompute_s = f64::from(block.info.tokens.max(1));
        let costs = Costs { recompute_s, load_s: 0.0, bytes: block.bytes() as f64 };
        costs.value(self.policy.worth(there, id))
    }
}

impl GetOp {
    /// The keys of the blocks that are there, or on their way.
    fn found(&self) -> impl Iterator<Item = tiered_kv_types::BlockKey> + '_ {
        let there = |state: &State| !matches!(state, State::Miss(_));
        self.keys().iter().zip(self.states()).filter(move |(_, s)| there(s)).map(|(key, _)| *key)
    }
}
