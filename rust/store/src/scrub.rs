//! Reading back everything durable.

use crate::call::{Call, Reply};
use crate::machine::{Event, OpId, Outcome, ScrubReport};
use crate::op::Op;
use crate::store::Store;
use std::time::Duration;
use tiered_kv_types::Result;

/// Deadline in seconds where the call names none: a pass reads every byte of every drive.
const SCRUB_TIMEOUT_S: f64 = 86_400.0;

impl Store {
    /// Reads back and verifies everything that is durable now, at the least priority. What is bad
    /// is taken out of use and counted, and written anew where memory still has it. A pass whose
    /// deadline comes first tells what it has found until then.
    ///
    /// # Errors
    /// `Closed`.
    pub fn scrub(&self, timeout: Option<Duration>) -> Result<Op<ScrubReport>> {
        let (op, done) = Op::new();
        self.scrub_with(timeout, done)?;
        Ok(op)
    }

    /// Like [`Store::scrub`], with a function instead of an operation.
    ///
    /// # Errors
    /// `Closed`.
    pub fn scrub_with(
        &self,
        timeout: Option<Duration>,
        done: impl FnOnce(ScrubReport) + Send + 'static,
    ) -> Result<OpId> {
        self.check_open("scrub")?;
        let deadline = self.deadline(timeout, SCRUB_TIMEOUT_S);
        let reply: Reply = Box::new(move |outcome, _| {
            let Outcome::Scrubbed(report) = outcome else { unreachable!("a scrub ends as one") };
            done(report);
        });
        Ok(self.begin(Call::plain(reply), |op| Event::Scrub { op, deadline }))
    }
}
