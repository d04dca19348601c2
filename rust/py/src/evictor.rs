//! The predictor over a cache that somebody else keeps: it is told what is there and what is used,
//! and says what goes.

use crate::errors::invalid;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use tiered_kv::{BlockType, Tier, request_kind};
use tiered_kv_policy::{
    Accesses, BetaOptions, BlockId, Facts, Nanos, Policy as _, Predictor, Request, Standing, Turn,
};

/// The only tier, and the only size class.
const TIER: Tier = Tier::Dram;
const SHAPE: u32 = 0;
/// Bytes of a key that its number is made of, at either end.
const NUMBER_BYTES: usize = 8;

/// What stands for a key of any width. Its ends differ where keys do: a hash is in front, and a
/// group of layers behind.
fn number(key: &[u8]) -> u64 {
    let part = |bytes: &[u8]| {
        let mut whole = [0; NUMBER_BYTES];
        let len = bytes.len().min(NUMBER_BYTES);
        whole[..len].copy_from_slice(&bytes[..len]);
        u64::from_le_bytes(whole)
    };
    let back = &key[key.len().saturating_sub(NUMBER_BYTES)..];
    part(key) ^ part(back).rotate_left(17)
}

struct Entry {
    key: Box<[u8]>,
    number: u64,
    parent: Option<u64>,
    evictable: bool,
}

struct State {
    predictor: Predictor,
    ids: HashMap<Box<[u8]>, BlockId>,
    entries: Vec<Option<Entry>>,
    free: Vec<BlockId>,
    /// Resident blocks behind each block, by its number; it need not be resident itself.
    children: HashMap<u64, u32>,
    /// Resident blocks by their numbers.
    by_number: HashMap<u64, BlockId>,
    evictable: usize,
}

impl State {
    fn new(metadata_bytes: u64, seed: u64) -> Self {
        Self {
            predictor: Predictor::new(BetaOptions::DEFAULT, metadata_bytes, seed),
            ids: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            children: HashMap::new(),
            by_number: HashMap::new(),
            evictable: 0,
        }
    }

    fn entry(&self, id: BlockId) -> &Entry {
        self.entries[id as usize].as_ref().expect("the numbers in use have an entry each")
    }

    /// Tells the predictor whether a block is a leaf that may go.
    fn stand(&mut self, id: BlockId) {
        let entry = self.entry(id);
        let leaf = !self.children.contains_key(&entry.number);
        let standing = if entry.evictable && leaf { Standing::Candidate } else { Standing::Kept };
        self.predictor.set_standing(TIER, id, standing);
    }

    fn insert(&mut self, key: &[u8], parent: Option<&[u8]>, depth: u32, now: Nanos) {
        if self.ids.contains_key(key) {
            return;
        }
        let id = self.free.pop().unwrap_or(self.entries.len() as BlockId);
        let (own, before) = (number(key), parent.map(number));
        let entry = Entry { key: key.into(), number: own, parent: before, evictable: false };
        if id as usize == self.entries.len() {
            self.entries.push(Some(entry));
        } else {
            self.entries[id as usize] = Some(entry);
        }
        self.ids.insert(key.into(), id);
        self.by_number.insert(own, id);
        let parent = before.and_then(|number| self.by_number.get(&number).copied());
        let block_type = BlockType::Unknown;
        let facts = Facts { shape: SHAPE, depth, block_type, key: own, parent, age: 0 };
        self.predictor.inserted(TIER, id, &facts, now);
        if let Some(before) = before {
            *self.children.entry(before).or_default() += 1;
            self.stand_number(before);
        }
        self.stand(id);
    }

    fn stand_number(&mut self, number: u64) {
        if let Some(id) = self.by_number.get(&number).copied() {
            self.stand(id);
        }
    }

    fn remove(&mut self, id: BlockId) -> Box<[u8]> {
        let entry = self.entries[id as usize].take().expect("it is resident");
        self.predictor.removed(TIER, id);
        self.ids.remove(&entry.key);
        if self.by_number.get(&entry.number) == Some(&id) {
            self.by_number.remove(&entry.number);
        }
        self.evictable -= usize::from(entry.evictable);
        self.free.push(id);
        if let Some(parent) = entry.parent
            && let Some(count) = self.children.get_mut(&parent)
        {
            *count -= 1;
            if *count == 0 {
                self.children.remove(&parent);
                self.stand_number(parent);
            }
        }
        entry.key
    }

    fn set_evictable(&mut self, key: &[u8], evictable: bool) {
        let Some(id) = self.ids.get(key).copied() else { return };
        let entry = self.entries[id as usize].as_mut().expect("it is resident");
        if entry.evictable != evictable {
            entry.evictable = evictable;
            self.evictable = if evictable { self.evictable + 1 } else { self.evictable - 1 };
        }
        self.stand(id);
    }

    /// Takes exactly `n` blocks out, or none.
    fn evict(&mut self, n: usize, kept: &HashSet<BlockId>, now: Nanos) -> Option<Vec<Box<[u8]>>> {
        let busy = kept.iter().filter(|id| self.entry(**id).evictable).count();
        if self.evictable - busy < n {
            return None;
        }
        let mut gone = Vec::with_capacity(n);
        while gone.len() < n {
            let chosen = self.predictor.victim(TIER, SHAPE, now, &mut |id| kept.contains(&id));
            let id = chosen.or_else(|| self.least(kept))?;
            gone.push(self.remove(id));
        }
        Some(gone)
    }

    /// What is worth least of all that may go, leaf or not: where every leaf is busy.
    fn least(&self, kept: &HashSet<BlockId>) -> Option<BlockId> {
        let free = self.ids.values().copied();
        let free = free.filter(|id| self.entry(*id).evictable && !kept.contains(id));
        free.min_by(|one, other| {
            let worth = |id| self.predictor.worth(TIER, id);
            worth(*one).total_cmp(&worth(*other)).then(one.cmp(other))
        })
    }
}

/// What a request tells of itself, as Python hands it over.
#[derive(FromPyObject)]
struct Told {
    session: String,
    kind: String,
    turn: u32,
    prompt: usize,
    block_tokens: u32,
}

/// A label as a number; the same text always gives the same one.
fn label(text: &str) -> u64 {
    let digest = blake3::hash(text.as_bytes());
    number(&digest.as_bytes()[..NUMBER_BYTES])
}

/// Numbers of the evictors of this process.
static NEXT_EVICTOR: AtomicU64 = AtomicU64::new(1);

/// As what an evictor has counted a request.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct CountedRequest {
    evictor: u64,
    turn: Turn,
}

/// The reuse predictor as the policy of a cache of somebody else's.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Evictor {
    number: u64,
    /// Guards the table and the predictor; held for the call alone.
    state: Mutex<State>,
}

#[pymethods]
impl Evictor {
    #[new]
    #[pyo3(signature = (metadata_bytes, seed=1))]
    fn new(metadata_bytes: u64, seed: u64) -> Self {
        let number = NEXT_EVICTOR.fetch_add(1, Ordering::Relaxed);
        Self { number, state: Mutex::new(State::new(metadata_bytes, seed)) }
    }

    fn __len__(&self) -> usize {
        self.state.lock().ids.len()
    }

    /// A block is there from now on, behind its parent, and may not go yet.
    #[pyo3(signature = (key, parent, depth, now_ns))]
    fn insert(&self, key: &[u8], parent: Option<&[u8]>, depth: u32, now_ns: u64) {
        self.state.lock().insert(key, parent, depth, now_ns);
    }

    /// A block is gone, and not by `evict`.
    fn remove(&self, key: &[u8]) {
        let mut state = self.state.lock();
        if let Some(id) = state.ids.get(key).copied() {
            state.remove(id);
        }
    }

    /// Whether a block may go.
    fn set_evictable(&self, key: &[u8], evictable: bool) {
        self.state.lock().set_evictable(key, evictable);
    }

    /// A request has used these blocks, which lie one behind the other; or all of those of one that
    /// was counted with its first.
    #[pyo3(signature = (keys, told, now_ns, counted=None))]
    fn requested(
        &self,
        py: Python<'_>,
        keys: Vec<Vec<u8>>,
        told: Told,
        now_ns: u64,
        counted: Option<&CountedRequest>,
    ) -> PyResult<CountedRequest> {
        if told.block_tokens == 0 || told.prompt > keys.len() {
            let remedy = "give the tokens of a block, and at most as many blocks as there are keys";
            return Err(invalid(py, "requested", format!("`block_tokens`, `prompt`: {remedy}")));
        }
        let state = &mut *self.state.lock();
        let numbers: Vec<u64> = keys.iter().map(|key| number(key)).collect();
        let ids: Vec<_> = keys.iter().map(|key| state.ids.get(&key[..]).copied()).collect();
        let tokens = |blocks: usize| (blocks as u32).saturating_mul(told.block_tokens);
        let request = Request {
            now: now_ns,
            session: (!told.session.is_empty()).then(|| label(&told.session)),
            kind: request_kind(&told.kind),
            blocks: &numbers,
            prompt: told.prompt,
            types: &[],
            input_tokens: tokens(told.prompt),
            output_tokens: tokens(keys.len() - told.prompt),
            block_tokens: told.block_tokens,
        };
        let accesses = Accesses { request, ids: &ids, turn: told.turn, bare: false };
        let turn = match counted.filter(|counted| counted.evictor == self.number) {
            Some(CountedRequest { turn, .. }) => {
                state.predictor.ended(&accesses, *turn);
                *turn
            }
            None => state.predictor.begun(&accesses),
        };
        Ok(CountedRequest { evictor: self.number, turn })
    }

    /// Takes out exactly `n` blocks that may go, none of `protected`; `None` where there are not so
    /// many, and then nothing has changed.
    fn evict<'py>(
        &self,
        py: Python<'py>,
        n: usize,
        protected: &Bound<'py, PyAny>,
        now_ns: u64,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        // The caller's code runs before the lock is held.
        let keys = protected.try_iter()?.map(|key| key?.extract()).collect::<PyResult<Vec<_>>>()?;
        let mut state = self.state.lock();
        let number = |key: &Vec<u8>| state.ids.get(&key[..]).copied();
        let kept = keys.iter().filter_map(number).collect();
        let gone = state.evict(n, &kept, now_ns);
        gone.map(|gone| PyList::new(py, gone.iter().map(|key| PyBytes::new(py, key)))).transpose()
    }
}
