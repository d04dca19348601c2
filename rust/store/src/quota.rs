//! Limiting what a namespace uses.

use crate::machine::{Quota, Usage};
use crate::namespace::Namespace;
use crate::store::Store;
use tiered_kv_types::{Error, ErrorKind, Result};

/// Rounds of evictions until a namespace is within a lowered quota; each is a step of its own.
const MAX_ROUNDS: usize = 1024;

impl Store {
    /// Limits what a namespace may use, from now until the store is closed. At its quota a
    /// namespace makes room among its own blocks first; where that is not enough, its puts are
    /// throttled, and what finds no room on the drives stays in memory only.
    ///
    /// What it uses beyond the quota is evicted. Returns whether it is within it now: what is
    /// leased, held or not yet written stays till later puts.
    ///
    /// # Errors
    /// `InvalidArgument` where too many namespaces have a quota; `Closed`.
    pub fn set_quota(&self, ns: &Namespace, quota: Quota) -> Result<bool> {
        self.check_ns("set_quota", ns)?;
        let mut before = None;
        for _ in 0..MAX_ROUNDS {
            let (within, used) = self.core.with_machine(|m| {
                let within = m.set_quota(ns.number, quota);
                (within, m.usage(ns.number))
            });
            let Some(within) = within else {
                let context =
                    "too many namespaces have a quota: give one to those that matter most";
                return Err(Error::new(ErrorKind::InvalidArgument, "set_quota", context));
            };
            if within || before == Some(used) {
                return Ok(within);
            }
            before = Some(used);
        }
        Ok(false)
    }

    /// What a namespace uses.
    ///
    /// # Errors
    /// `Closed`.
    pub fn usage(&self, ns: &Namespace) -> Result<Usage> {
        self.check_ns("usage", ns)?;
        Ok(self.core.with_machine(|m| m.usage(ns.number)))
    }
}
