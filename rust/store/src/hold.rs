//! Holds, prefetch, and lookups of hybrid models.

use crate::call::{Call, Reply};
use crate::driver::Core;
use crate::machine::{Event, HoldId, Outcome};
use crate::namespace::Namespace;
use crate::op::Op;
use crate::store::Store;
use std::sync::Arc;
use std::time::Duration;
use tiered_kv_io::Nanos;
use tiered_kv_types::{BlockKey, Error, ErrorKind, Result};

/// Keeps blocks in some tier until it is dropped, used by a `get`, or over time.
///
/// A hold that has ended is no error: the blocks may be misses then, like any others.
pub struct Hold {
    core: Arc<Core>,
    id: HoldId,
    held: Vec<bool>,
}

impl Hold {
    /// Its number, for [`crate::GetOptions::hold`].
    pub fn id(&self) -> HoldId {
        self.id
    }

    /// For each key asked for, whether it is held. One that is not stored is not, nor is one beyond
    /// the bytes that may be held at once.
    pub fn held(&self) -> &[bool] {
        &self.held
    }

    /// Leading keys that are held.
    pub fn hits(&self) -> usize {
        self.held.iter().take_while(|held| **held).count()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.core.drive([Event::Release { hold: self.id }]);
    }
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hold").field("id", &self.id).field("hits", &self.hits()).finish()
    }
}

/// Which blocks a group of layers still needs at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupRule {
    /// All blocks before it: full attention.
    All,
    /// The last blocks before it, this many: a sliding window.
    Window(usize),
    /// The block that ends at it: recurrent state.
    Last,
}

impl GroupRule {
    fn is_met(self, present: &[bool], position: usize) -> bool {
        let from = match self {
            Self::All => 0,
            Self::Window(blocks) => position.saturating_sub(blocks),
            Self::Last => position.saturating_sub(1),
        };
        present[from..position].iter().all(|p| *p)
    }
}

impl Store {
    /// Holds blocks on whatever tier they are, for at most `ttl`.
    ///
    /// # Errors
    /// `Closed`.
    pub fn hold(&self, ns: &Namespace, keys: &[BlockKey], ttl: Duration) -> Result<Hold> {
        self.check_ns("hold", ns)?;
        let expires = self.deadline(Some(ttl), 0.0);
        let (id, held) = self.core.hold(ns.number, keys.to_vec(), expires);
        Ok(Hold { core: self.core.clone(), id, held })
    }

    /// Begins to load blocks from a drive into memory, in their order, without waiting; it stops
    /// where memory or the budget of loads is used up.
    ///
    /// # Errors
    /// `Closed`.
    pub fn prefetch(&self, ns: &Namespace, keys: &[BlockKey]) -> Result<()> {
        self.check_ns("prefetch", ns)?;
        let (ns, keys) = (ns.number, keys.to_vec());
        self.core.drive([Event::Prefetch { ns, keys }]);
        Ok(())
    }

    /// The largest position, in blocks, for which every group of layers has all that it still
    /// needs, scanned from the end. Each group gives its keys, one a block of the prompt.
    ///
    /// # Errors
    /// `InvalidArgument` where the groups have different numbers of keys.
    pub fn lookup_hybrid(
        &self,
        ns: &Namespace,
        groups: &[(&[BlockKey], GroupRule)],
    ) -> Result<usize> {
        hybrid_position(groups, |keys| keys.iter().map(|key| self.contains(ns, key)).collect())
    }
}

/// The largest position at which every group has what its rule asks for; `present` says of keys
/// whether they are stored.
pub(crate) fn hybrid_position(
    groups: &[(&[BlockKey], GroupRule)],
    mut present: impl FnMut(&[BlockKey]) -> Vec<bool>,
) -> Result<usize> {
    let blocks = groups.first().map_or(0, |(keys, _)| keys.len());
    if groups.iter().any(|(keys, _)| keys.len() != blocks) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "lookup_hybrid",
            "`groups` have different numbers of keys: give each one a block of the prompt",
        ));
    }
    let there: Vec<Vec<bool>> = groups.iter().map(|(keys, _)| present(keys)).collect();
    let met = |position: &usize| {
        groups.iter().zip(&there).all(|((_, rule), there)| rule.is_met(there, *position))
    };
    Ok((0..=blocks).rev().find(met).unwrap_or(0))
}

impl Core {
    /// Holds those of the keys that are stored. The answer comes within the step that takes the
    /// hold in, so this never waits.
    pub(crate) fn hold(
        self: &Arc<Self>,
        ns: u32,
        keys: Vec<BlockKey>,
        expires: Nanos,
    ) -> (HoldId, Vec<bool>) {
        let (op, done) = Op::new();
        let reply: Reply = Box::new(move |outcome, _| {
            let Outcome::Held(id, held) = outcome else { unreachable!("a hold ends as one") };
            done((id, held));
        });
        self.submit(Call::plain(reply), |op| Event::Hold { op, ns, keys, expires });
        op.wait()
    }
}
