//! Deleting: keys, a namespace, what is old, and epochs.

use crate::call::{Call, Reply};
use crate::machine::{DeleteReport, Doomed, Event, OpId, Outcome};
use crate::namespace::Namespace;
use crate::op::Op;
use crate::store::Store;
use std::time::Duration;
use tiered_kv_types::{BlockKey, Result};

/// What is to be deleted in a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delete {
    /// These keys.
    Keys(Vec<BlockKey>),
    /// Everything that was stored longer ago than this.
    OlderThan(Duration),
    /// Everything.
    All,
}

impl Store {
    /// Deletes blocks from every tier. They are gone for every caller at once; the operation ends
    /// when nothing of it can come back after a crash. Leases stay valid until they are dropped.
    ///
    /// # Errors
    /// `Closed`.
    pub fn delete(&self, ns: &Namespace, what: &Delete) -> Result<Op<DeleteReport>> {
        let (op, done) = Op::new();
        self.delete_with(ns, what, None, done)?;
        Ok(op)
    }

    /// Like [`Store::delete`], with a deadline and a function instead of an operation. A delete
    /// whose deadline passes has deleted, and reports that it is not durable.
    ///
    /// # Errors
    /// `Closed`.
    pub fn delete_with(
        &self,
        ns: &Namespace,
        what: &Delete,
        timeout: Option<Duration>,
        done: impl FnOnce(DeleteReport) + Send + 'static,
    ) -> Result<OpId> {
        self.check_ns("delete", ns)?;
        let doomed = match what {
            Delete::Keys(keys) => Doomed::Keys(keys.clone()),
            Delete::All => Doomed::StoredBefore(u64::MAX),
            Delete::OlderThan(age) => {
                let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
                Doomed::StoredBefore(self.core.clock.unix_nanos().saturating_sub(age))
            }
        };
        let deadline = self.deadline(timeout, self.config.put_timeout_s);
        let reply: Reply = Box::new(move |outcome, _| {
            let Outcome::Deleted(report) = outcome else { unreachable!("a delete ends as one") };
            done(report);
        });
        let call = Call::plain(reply);
        let ns = ns.number;
        Ok(self.begin(call, |op| Event::Delete { op, ns, doomed, deadline }))
    }

    /// Begins a new epoch of a namespace, as after its weights were updated: nothing stored before
    /// is ever served again. Durable when the operation ends.
    ///
    /// # Errors
    /// `Closed`.
    pub fn new_epoch(&self, ns: &Namespace) -> Result<Op<DeleteReport>> {
        self.delete(ns, &Delete::All)
    }
}
