//! Attaching: what other processes see of a store, over a Unix socket in its first directory.
//!
//! The owner answers on one thread of its own ([`server`]), the attached process asks and never
//! waits longer than its deadline ([`client`]); both speak [`protocol`]. Within the owner's own
//! process the same calls go to the core directly. A hold belongs to its connection, and ends with
//! it, however the process ended.

mod client;
#[cfg(debug_assertions)]
pub(crate) mod fuzzing;
mod hold;
mod link;
mod protocol;
mod remote;
mod server;
#[cfg(test)]
mod tests;

pub use client::{AttachCounters, AttachOptions, Attached};
pub use hold::AttachedHold;
pub(crate) use server::Listening;

use crate::answers::{Lookup, LookupMode};
use crate::index::FullKey;
use crate::machine::{Event, HoldId};
use crate::owner::Owner;
use std::time::Duration;
use tiered_kv_types::{BlockKey, NamespaceId};

/// Longest time that an attached process may hold blocks for.
const MAX_TTL: Duration = Duration::from_secs(24 * 3600);

/// What an owner does for those who are attached. A namespace is named by its digest; one that the
/// store has never met has nothing, and is not made known by asking.
impl Owner {
    fn known(&self, ns: &NamespaceId) -> Option<u32> {
        self.core.with_machine(|m| m.known_namespace(ns))
    }

    fn lookup_for(&self, ns: &NamespaceId, keys: &[BlockKey], mode: LookupMode) -> Lookup {
        match self.known(ns) {
            Some(ns) => self.core.lookup(ns, keys, mode),
            None => Lookup::absent(keys.len(), mode),
        }
    }

    fn present_for(&self, ns: &NamespaceId, keys: &[BlockKey]) -> Vec<bool> {
        let Some(ns) = self.known(ns) else { return vec![false; keys.len()] };
        let there = |key: &BlockKey| {
            let key = FullKey { ns, key: *key };
            self.core.index.residency(&key).0.is_hit()
        };
        keys.iter().map(there).collect()
    }

    /// Which keys are held, and the hold, where there is one.
    fn hold_for(
        &self,
        ns: &NamespaceId,
        keys: Vec<BlockKey>,
        ttl: Duration,
    ) -> (Option<HoldId>, Vec<bool>) {
        let Some(ns) = self.known(ns) else { return (None, vec![false; keys.len()]) };
        let ttl = u64::try_from(ttl.min(MAX_TTL).as_nanos()).expect("a day fits");
        let expires = self.core.clock.now().saturating_add(ttl);
        let (id, held) = self.core.hold(ns, keys, expires);
        if held.contains(&true) {
            return (Some(id), held);
        }
        self.release_for([id]);
        (None, held)
    }

    fn release_for(&self, holds: impl IntoIterator<Item = HoldId>) {
        self.core.drive(holds.into_iter().map(|hold| Event::Release { hold }));
    }
}
