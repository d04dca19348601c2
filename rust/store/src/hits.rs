//! Gets for which nothing has to be waited, answered by the read index alone.

use crate::answers::{GetOptions, Leases};
use crate::batch::{LeaseBatch, Looked};
use crate::index::{KEYS_A_TURN, Residency};
use crate::machine::{Event, Told};
use crate::namespace::Namespace;
use crate::resident::{Lease, Resident};
use crate::stats::FastCounters;
use crate::store::Store;
use std::sync::Arc;
use tiered_kv_types::{BlockKey, MissReason, Result, Tier};

/// Leases that a `get` found at once.
#[derive(Debug)]
pub enum Found {
    /// All that is there, as a whole.
    Whole(LeaseBatch),
    /// Block by block.
    Each(Leases),
}

impl From<Leases> for Found {
    fn from(leases: Leases) -> Self {
        Self::Each(leases)
    }
}

impl Store {
    /// The whole answer of a [`Store::get`] for which nothing has to be waited; `None`, and nothing
    /// is counted, where something has.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn get_now(
        &self,
        ns: &Namespace,
        keys: &Arc<[BlockKey]>,
        options: &GetOptions,
    ) -> Result<Option<Found>> {
        self.check_get(ns)?;
        let core = &self.core;
        let take = |bytes| core.budget.take(bytes);
        let block_bytes = ns.layout.block_bytes();
        match LeaseBatch::lease(&core.index, ns.number, keys, block_bytes, take) {
            Looked::Leased(batch) => {
                let hits = batch.hits() as u64;
                let asked = keys.len() as u64;
                self.count_hits(asked, asked - hits, hits, hits * block_bytes);
                if hits > 0 && !options.in_request {
                    core.count_access(ns.number, keys.clone(), Told::BARE);
                }
                self.end_hold(options);
                Ok(Some(Found::Whole(batch)))
            }
            Looked::OneByOne => Ok(self.get_resident(ns, keys, options).map(Found::Each)),
            Looked::Elsewhere => Ok(None),
        }
    }

    pub(crate) fn check_get(&self, ns: &Namespace) -> Result<()> {
        self.check_ns("get", ns)?;
        self.check_dram("get", "leases")
    }

    fn count_hits(&self, keys: u64, absent: u64, hits: u64, bytes: u64) {
        let fast = &self.core.fast;
        FastCounters::add(&fast.requested, keys);
        if absent > 0 {
            FastCounters::add(&fast.absent, absent);
        }
        FastCounters::add(&fast.dram_hits, hits);
        FastCounters::add(&fast.dram_hit_bytes, bytes);
    }

    fn end_hold(&self, options: &GetOptions) {
        if let Some(hold) = options.hold {
            self.core.drive([Event::Release { hold }]);
        }
    }

    /// The whole answer of a `get` where nothing has to be loaded, without the machine's lock.
    pub(crate) fn get_resident(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        options: &GetOptions,
    ) -> Option<Leases> {
        let mut items = Vec::with_capacity(keys.len());
        let (mut hits, mut bytes) = (0, 0);
        for turn in keys.chunks(KEYS_A_TURN) {
            let tables = self.core.index.read();
            for key in turn {
                items.push(match tables.pin_or_residency(&ns.full(*key)) {
                    Ok(resident) => {
                        hits += 1;
                        bytes += resident.bytes();
                        Ok(resident)
                    }
                    Err(state) if state.is_hit() || state == Residency::Shut => return None,
                    Err(_) => Err(MissReason::Absent),
                });
            }
        }
        // The books are kept once for the whole batch, as long as it is below the cap.
        let budget = &self.core.budget;
        let whole = budget.take(bytes);
        let lease = |resident: Arc<Resident>| {
            if whole {
                return Ok(Lease::counted(resident));
            }
            budget.lease(resident).ok_or(MissReason::LeaseCap)
        };
        let items: Vec<_> = items.into_iter().map(|item| item.and_then(lease)).collect();
        let absent = keys.len() as u64 - hits;
        if !whole {
            let leased = items.iter().filter_map(|item| item.as_ref().ok());
            let (found, pinned) = (hits, bytes);
            (hits, bytes) = leased.fold((0, 0), |(n, bytes), one| (n + 1, bytes + one.bytes()));
            debug_assert!(bytes <= pinned);
            FastCounters::add(&self.core.fast.lease_cap, found - hits);
        }
        self.count_hits(keys.len() as u64, absent, hits, bytes);
        let leases = Leases { items, sources: vec![Tier::Dram; keys.len()] };
        if hits > 0 && !options.in_request {
            self.core.count_access(ns.number, keys.into(), Told::BARE);
        }
        self.end_hold(options);
        Some(leases)
    }
}
