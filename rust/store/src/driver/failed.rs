//! A core whose state machine has panicked: it answers every call with nothing, and decides no
//! more. What was durable is found again by the next open, as after a crash.

use super::{Core, State, Work};
use crate::call::Call;
use crate::machine::{
    DeleteReport, Event, FlushReport, GetItem, GetTarget, HoldId, Outcome, PutStatus, ScrubReport,
};
use crate::stats::FastCounters;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tiered_kv_io::panic_text;
use tiered_kv_types::{MissReason, Tier};

/// What a call asks for, and of how many blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    Put(usize),
    Leases(usize),
    Buffers(usize),
    Reservation(usize),
    Hold(usize),
    Flush,
    Delete,
    Scrub,
    Close,
}

impl Asked {
    /// What the event of a call asks for; `None` where it begins none.
    pub(super) fn of(event: &Event) -> Option<Self> {
        Some(match event {
            Event::Put { items, .. } => Self::Put(items.len()),
            Event::Publish { items, .. } => Self::Put(items.len()),
            Event::Reserve { items, .. } => Self::Reservation(items.len()),
            Event::Get { keys, target: GetTarget::Leases, .. } => Self::Leases(keys.len()),
            Event::Get { keys, .. } => Self::Buffers(keys.len()),
            Event::Hold { keys, .. } => Self::Hold(keys.len()),
            Event::Flush { .. } => Self::Flush,
            Event::Delete { .. } => Self::Delete,
            Event::Scrub { .. } => Self::Scrub,
            Event::Close { .. } => Self::Close,
            _ => return None,
        })
    }

    /// Nothing, in the words of the call. `waiting` blocks were not durable.
    fn refused(self, waiting: u64) -> Outcome {
        let miss = MissReason::Closed;
        let item = || GetItem { result: Err(miss), source: Tier::Dram };
        match self {
            Self::Put(n) => Outcome::Put(vec![PutStatus::Ended; n]),
            Self::Leases(n) => Outcome::Get(std::iter::repeat_with(item).take(n).collect()),
            Self::Buffers(n) => Outcome::Into(vec![Err(miss); n]),
            Self::Reservation(n) => {
                let none = || Err(PutStatus::Ended);
                Outcome::Reserved(std::iter::repeat_with(none).take(n).collect())
            }
            Self::Hold(n) => Outcome::Held(HoldId(0), vec![false; n]),
            Self::Flush => {
                let failed = waiting.max(1);
                Outcome::Flush(FlushReport { failed, ..FlushReport::default() })
            }
            Self::Delete => Outcome::Deleted(DeleteReport::default()),
            Self::Scrub => Outcome::Scrubbed(ScrubReport::default()),
            Self::Close => Outcome::Closed(waiting),
        }
    }
}

impl Core {
    /// What the state machine said when it panicked; such a core serves nothing.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Ends what can be ended after a panic, and takes no decision any more. Of the step that
    /// panicked, copies are still made: they bring the caller's buffers back.
    pub(super) fn fail(&self, state: &mut State, mut work: Work, panic: &(dyn Any + Send)) -> Work {
        let text = panic_text(panic).to_owned();
        tracing::error!(
            panic = text,
            "the store has failed: it serves nothing until it is reopened"
        );
        let _ = self.failure.set(text);
        // Whatever is left half done there, nothing shall be found in it.
        let cleared = catch_unwind(AssertUnwindSafe(|| self.index.clear()));
        if cleared.is_err() {
            tracing::error!("the index of a store that has failed could not be cleared");
        }
        state.commands.clear();
        work.io.clear();
        self.arm(None);
        self.give_up(state, &mut work);
        work
    }

    /// Answers what is left when the copies and the drives have ended: nobody uses any memory.
    pub(crate) fn end_failed(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let mut work = Work::default();
        if self.failure().is_some() {
            self.answer(&mut state, &mut work, |_| true);
        }
        drop(state);
        self.carry_out(work);
    }

    /// Answers the calls whose memory nobody uses any more. Of the caller's source others may have
    /// references, too: such a put ends when the store closes.
    pub(super) fn give_up(&self, state: &mut State, work: &mut Work) {
        self.answer(state, work, |call| {
            let lent = call.source.as_ref().is_some_and(|source| Arc::strong_count(source) > 1);
            !lent && call.buffers.iter().all(Option::is_some)
        });
    }

    fn answer(&self, state: &mut State, work: &mut Work, free: impl Fn(&Call) -> bool) {
        let waiting = state.machine.blocks_waiting();
        for (_, call) in state.calls.extract_if(|_, call| free(call)) {
            // A call that asks for nothing is never entered.
            let Some(asked) = call.asked else { continue };
            if let Asked::Leases(n) | Asked::Buffers(n) = asked {
                FastCounters::add(&self.fast.closed, n as u64);
            }
            work.done.push((call, asked.refused(waiting)));
        }
    }
}
