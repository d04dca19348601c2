//! The block table: every block of every tier, its state, and the kinship that keeps leaves first.

use crate::index::{FullKey, KeyHasher};
use crate::machine::{BlockId, DriveId, OpId, PutStatus, SlotId};
use hashbrown::HashMap;
use hashbrown::hash_table::{Entry, HashTable};
use smallvec::SmallVec;
use std::hash::BuildHasher as _;
use tiered_kv_io::{CancelFlag, prefer_huge_pages};
use tiered_kv_types::{BlockInfo, BlockKey, TenantId, Tier, round_up_to_page};

/// Where a block stands on the drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OnDrive {
    None,
    /// In a group that is not durable yet.
    Writing(SmallVec<[SlotId; 1]>),
    Durable(SmallVec<[SlotId; 1]>),
}

/// Why a load began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Why {
    /// A caller asked, for now or for later.
    #[default]
    Asked,
    /// It is stored behind what was read.
    Behind,
    /// It was read past memory, and is worth to be there.
    Promoted,
}

/// A load in flight.
#[derive(Debug, Default)]
pub(crate) struct Load {
    /// Who waits for it: operation and item.
    pub(crate) waiters: Vec<(OpId, usize)>,
    /// Begun ahead of a request: it goes on without waiters.
    pub(crate) ahead: bool,
    pub(crate) why: Why,
    /// Set while nobody wants it.
    pub(crate) cancel: CancelFlag,
}

/// Links between the children of one parent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Siblings {
    prev: Option<BlockId>,
    next: Option<BlockId>,
}

/// One block.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) key: FullKey,
    pub(crate) parent: Option<BlockKey>,
    pub(crate) info: BlockInfo,
    pub(crate) generation: u64,
    pub(crate) put_id: u64,
    pub(crate) stored_unix_ns: u64,
    /// Who pays for it.
    pub(crate) tenant: TenantId,
    pub(crate) shape: u32,
    /// Columns of its grid, kept with it: nobody may have opened its namespace.
    pub(crate) head_groups: u16,
    /// Payload bytes and checksum of each slab.
    pub(crate) slabs: SmallVec<[(u64, u32); 1]>,
    /// Resident in memory.
    pub(crate) in_dram: bool,
    /// The segments of its slots in memory.
    pub(crate) memory: SmallVec<[u32; 1]>,
    pub(crate) drive: OnDrive,
    /// The drive it is on, where it is on one.
    pub(crate) home: DriveId,
    /// Position in the queue of blocks that wait to be durable.
    pub(crate) dirty: Option<u64>,
    /// The load in flight, if there is one; beside the block, of which there are very many.
    pub(crate) load: Option<Box<Load>>,
    /// Direct reads in flight.
    pub(crate) readers: u32,
    /// It is being read back and verified.
    pub(crate) is_scrubbed: bool,
    /// Without T1: puts (operation, item, what they are told) that wait for it to be durable.
    pub(crate) writers: Vec<(OpId, usize, PutStatus)>,
    /// Handles that keep it from leaving its last tier.
    pub(crate) holds: u32,
    /// No stored chain of parents leads from it to a root.
    pub(crate) orphan: bool,
    /// The other blocks of the same parent.
    pub(crate) siblings: Siblings,
    /// The block behind it that was read last.
    pub(crate) next: Option<BlockId>,
    /// It was moved up ahead of a request and not read since; and it stays for now.
    pub(crate) unread: bool,
    pub(crate) expected: bool,
    /// It was read into a caller's memory, past ours.
    pub(crate) passed: bool,
    /// Out of the table, kept until what is in flight on its slots has ended.
    pub(crate) doomed: bool,
}

impl Block {
    pub(crate) fn bytes(&self) -> u64 {
        self.slabs.iter().map(|(bytes, _)| bytes).sum()
    }

    /// Bytes of its slots.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slabs.iter().map(|(bytes, _)| round_up_to_page(*bytes)).sum()
    }

    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.drive, OnDrive::Durable(_))
    }

    /// Whether a read of its slots on the drive is in flight.
    pub(crate) fn is_being_read(&self) -> bool {
        self.load.is_some() || self.readers > 0 || self.is_scrubbed
    }

    fn parent_key(&self) -> Option<FullKey> {
        self.parent.map(|key| FullKey { ns: self.key.ns, key })
    }
}

/// Children of a key, whether the key itself is stored or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kin {
    pub(crate) dram: u32,
    pub(crate) drive: u32,
    pub(crate) all: u32,
    /// Least depth of the children linked since there were none.
    min_depth: u32,
    first: Option<BlockId>,
}

/// The key of a block that is there.
fn key_of(blocks: &[Option<Block>], id: BlockId) -> &FullKey {
    &blocks[id as usize].as_ref().expect("a block is mapped for as long as it is there").key
}

#[derive(Debug)]
pub(crate) struct BlockTable {
    blocks: Vec<Option<Block>>,
    free: Vec<BlockId>,
    /// Numbers by the key of their block, which is not kept a second time.
    by_key: HashTable<BlockId>,
    hasher: KeyHasher,
    kin: HashMap<FullKey, Kin, KeyHasher>,
    orphans: u64,
}

impl BlockTable {
    pub(crate) fn new(hasher: KeyHasher) -> Self {
        Self {
            blocks: Vec::new(),
            free: Vec::new(),
            by_key: HashTable::new(),
            hasher: hasher.clone(),
            kin: HashMap::with_hasher(hasher),
            orphans: 0,
        }
    }

    /// Makes room for so many more blocks.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        self.blocks.reserve(blocks);
        prefer_huge_pages(self.blocks.spare_capacity_mut());
        let (table, hasher) = (&self.blocks, &self.hasher);
        self.by_key.reserve(blocks, |id| hasher.hash_one(key_of(table, *id)));
    }

    /// Looks where `key` will go, of no other use than that it lies in the processor's cache then:
    /// it waits for the memory of several at once, and insertions would for one after the other.
    pub(crate) fn look_ahead(&self, key: &FullKey) {
        _ = std::hint::black_box(self.by_key.find(self.hash(key), |_| false));
    }

    pub(crate) fn hasher(&self) -> &KeyHasher {
        &self.hasher
    }

    fn hash(&self, key: &FullKey) -> u64 {
        self.hasher.hash_one(key)
    }

    /// Blocks that no root reaches.
    pub(crate) fn orphans(&self) -> u64 {
        self.orphans
    }

    /// Behind the highest number of a block.
    pub(crate) fn end(&self) -> BlockId {
        BlockId::try_from(self.blocks.len()).expect("fewer than 2^32 blocks")
    }

    /// Number of blocks in the table.
    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(crate) fn id(&self, key: &FullKey) -> Option<BlockId> {
        self.by_key.find(self.hash(key), |id| *key_of(&self.blocks, *id) == *key).copied()
    }

    /// A block by its number, doomed ones included.
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id as usize).and_then(Option::as_ref)
    }

    pub(crate) fn get_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        self.blocks.get_mut(id as usize).and_then(Option::as_mut)
    }

    /// The parent of a block, where it is in the table.
    pub(crate) fn parent_of(&self, id: BlockId) -> Option<BlockId> {
        self.get(id)?.parent_key().and_then(|key| self.id(&key))
    }

    pub(crate) fn kin(&self, key: &FullKey) -> Kin {
        self.kin.get(key).copied().unwrap_or_default()
    }

    /// Every block, doomed ones included, in the order of their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        let number = |i: usize| BlockId::try_from(i).expect("block numbers are u32");
        self.blocks.iter().enumerate().filter_map(move |(i, b)| Some((number(i), b.as_ref()?)))
    }

    /// The blocks numbered from `from` to `to`, doomed ones left out, and whether there are more.
    pub(crate) fn page(&self, from: u32, to: u32) -> (impl Iterator<Item = &Block>, bool) {
        let len = self.blocks.len();
        let (from, to) = ((from as usize).min(len), (to as usize).min(len));
        let live = self.blocks[from..to].iter().flatten().filter(|block| !block.doomed);
        (live, to < len)
    }

    /// Whether linking a block of this depth to its parent keeps the chain free of circles, which
    /// would leave no leaf to evict: depths must rise from parent to child.
    fn may_link(&self, key: &FullKey, parent: &FullKey, depth: u32) -> bool {
        let above =
            self.id(parent).and_then(|id| self.get(id)).is_none_or(|p| p.info.depth < depth);
        let kin = self.kin(key);
        above && key != parent && (kin.all == 0 || depth < kin.min_depth)
    }

    /// Adds a block; returns its number, and the blocks that a root reaches again through it.
    pub(crate) fn insert(&mut self, mut block: Block) -> (BlockId, Vec<BlockId>) {
        let key = block.key;
        if let Some(parent) = block.parent_key()
            && !self.may_link(&key, &parent, block.info.depth)
        {
            block.parent = None;
        }
        block.orphan = block.parent_key().is_some_and(|parent| self.is_unreachable(&parent));
        let (depth, parent, orphan) = (block.info.depth, block.parent_key(), block.orphan);
        let id = match self.free.pop() {
            Some(id) => {
                self.blocks[id as usize] = Some(block);
                id
            }
            None => {
                self.blocks.push(Some(block));
                BlockId::try_from(self.blocks.len() - 1).expect("fewer than 2^32 blocks")
            }
        };
        self.map(&key, id);
        self.orphans += u64::from(orphan);
        if let Some(parent) = parent {
            let kin = self.kin.entry(parent).or_default();
            kin.min_depth = if kin.all == 0 { depth } else { kin.min_depth.min(depth) };
            kin.all += 1;
            self.link(id, &parent);
        }
        let adopted = if orphan { Vec::new() } else { self.set_orphans(&key, false) };
        (id, adopted)
    }

    fn map(&mut self, key: &FullKey, id: BlockId) {
        let (hash, table, hasher) = (self.hash(key), &self.blocks, &self.hasher);
        let same = |id: &BlockId| key_of(table, *id) == key;
        let rehash = |id: &BlockId| hasher.hash_one(key_of(table, *id));
        match self.by_key.entry(hash, same, rehash) {
            Entry::Vacant(place) => _ = place.insert(id),
            Entry::Occupied(_) => panic!("a key is removed before it is stored again"),
        }
    }

    fn is_unreachable(&self, key: &FullKey) -> bool {
        self.id(key).and_then(|id| self.get(id)).is_none_or(|block| block.orphan)
    }

    fn siblings(&mut self, id: BlockId) -> &mut Siblings {
        &mut self.get_mut(id).expect("linked blocks exist").siblings
    }

    fn link(&mut self, id: BlockId, parent: &FullKey) {
        let kin = self.kin.get_mut(parent).expect("counted before it is linked");
        let next = kin.first.replace(id);
        *self.siblings(id) = Siblings { prev: None, next };
        if let Some(next) = next {
            self.siblings(next).prev = Some(id);
        }
    }

    fn unlink(&mut self, id: BlockId, parent: &FullKey) {
        let Siblings { prev, next } = std::mem::take(self.siblings(id));
        if let Some(next) = next {
            self.siblings(next).prev = prev;
        }
        match prev {
            Some(prev) => self.siblings(prev).next = next,
            None => {
                if let Some(kin) = self.kin.get_mut(parent) {
                    kin.first = next;
                }
            }
        }
    }

    /// The blocks whose parent is `key`.
    pub(crate) fn children(&self, key: &FullKey) -> impl Iterator<Item = BlockId> + '_ {
        let next = |id: &BlockId| self.get(*id).and_then(|block| block.siblings.next);
        std::iter::successors(self.kin(key).first, next)
    }

    /// Marks everything that hangs on `key` as out of reach, or as reached again; returns what
    /// changed.
    fn set_orphans(&mut self, key: &FullKey, orphan: bool) -> Vec<BlockId> {
        let mut changed = Vec::new();
        if self.kin(key).first.is_none() {
            return changed;
        }
        let mut parents = vec![*key];
        while let Some(parent) = parents.pop() {
            let mut at = self.kin(&parent).first;
            while let Some(id) = at {
                let block = self.get_mut(id).expect("linked blocks exist");
                at = block.siblings.next;
                if block.orphan != orphan {
                    block.orphan = orphan;
                    parents.push(block.key);
                    changed.push(id);
                }
            }
        }
        let n = changed.len() as u64;
        self.orphans = if orphan { self.orphans + n } else { self.orphans - n };
        changed
    }

    /// Takes the key out of the table; the block stays, doomed, until [`BlockTable::forget`].
    /// Returns the blocks that no root reaches any more.
    pub(crate) fn unmap(&mut self, id: BlockId) -> Vec<BlockId> {
        let Some(block) = self.get_mut(id) else { return Vec::new() };
        if std::mem::replace(&mut block.doomed, true) {
            return Vec::new();
        }
        let (key, parent) = (block.key, block.parent_key());
        self.orphans -= u64::from(std::mem::take(&mut block.orphan));
        if let Ok(mapped) = self.by_key.find_entry(self.hash(&key), |mapped| *mapped == id) {
            mapped.remove();
        }
        if let Some(parent) = parent {
            self.unlink(id, &parent);
            self.change_kin(parent, |kin| kin.all -= 1);
        }
        self.set_orphans(&key, true)
    }

    /// Frees the number of a doomed block.
    pub(crate) fn forget(&mut self, id: BlockId) {
        debug_assert!(self.get(id).is_some_and(|b| b.doomed));
        self.blocks[id as usize] = None;
        self.free.push(id);
    }

    fn change_kin(&mut self, key: FullKey, change: impl FnOnce(&mut Kin)) {
        let kin = self.kin.entry(key).or_default();
        change(kin);
        if kin.all == 0 {
            self.kin.remove(&key);
        }
    }

    /// Counts the block among its parent's resident children of `tier`, or takes it off.
    pub(crate) fn count_child(&mut self, id: BlockId, tier: Tier, present: bool) {
        let Some(parent) = self.get(id).and_then(Block::parent_key) else { return };
        self.change_kin(parent, |kin| {
            let count = if tier == Tier::Dram { &mut kin.dram } else { &mut kin.drive };
            *count = if present { *count + 1 } else { *count - 1 };
        });
    }
}
