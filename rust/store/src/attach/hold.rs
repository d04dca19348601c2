//! Holds of an attached process.

use super::client::Face;
use crate::machine::HoldId;
use std::sync::Arc;

/// Keeps blocks in some tier of an attached store until it is released or dropped, over time, or
/// until its connection ends: with [`crate::Attached::close`], with this process, or with a call
/// that the owner does not answer in time.
pub struct AttachedHold {
    face: Arc<Face>,
    /// Number of the connection that the holds belong to.
    link: u64,
    holds: Vec<HoldId>,
    held: Vec<bool>,
}

impl AttachedHold {
    pub(super) fn new(face: Arc<Face>, link: u64, holds: Vec<HoldId>, held: Vec<bool>) -> Self {
        Self { face, link, holds, held }
    }

    /// For each key asked for, whether it was held. None is where the owner was not to be had.
    pub fn held(&self) -> &[bool] {
        &self.held
    }

    /// Leading keys that were held.
    pub fn hits(&self) -> usize {
        self.held.iter().take_while(|held| **held).count()
    }

    /// Whether the connection that it belongs to is still the one in use; it may have ended over
    /// time all the same.
    pub fn is_in_force(&self) -> bool {
        !self.holds.is_empty() && self.face.is_link(self.link)
    }
}

impl Drop for AttachedHold {
    fn drop(&mut self) {
        if !self.holds.is_empty() {
            self.face.release(self.link, &self.holds);
        }
    }
}

impl std::fmt::Debug for AttachedHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttachedHold").field("hits", &self.hits()).finish_non_exhaustive()
    }
}
