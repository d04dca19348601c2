//! The timer's thread: deadlines, and what requests tell the policy, off their path.

use super::{ACCESS_QUEUE, Core, Learning};
use crate::machine::{Access, Event, Told};
use crate::stats::FastCounters;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tiered_kv_io::Nanos;
use tiered_kv_types::BlockKey;

/// As many in the queue are taken in at once, by the timer's thread.
const ACCESSES_DUE: usize = ACCESS_QUEUE / 4;
/// Fewer are after this time.
const LEARN_EVERY: Nanos = 10_000_000;
/// After learning the timer's thread lets this many times as long pass: where callers are faster
/// than it learns, it takes a quarter of a core, and what does not fit in the queue is dropped.
const REST: u64 = 3;
/// Blocks of requests, and blocks before them, that are taken in with one step, so that no call
/// waits long for the lock. A request that has more is taken in alone.
const LEARN_BLOCKS: usize = 1024;

const MAX_NAP: Duration = Duration::from_millis(500);

impl Core {
    /// Counts one request's blocks, given root first, soon: the caller neither waits nor learns.
    /// Where nobody keeps up with the callers they are dropped and counted.
    pub(crate) fn count_access(&self, ns: u32, keys: Arc<[BlockKey]>, told: Told) {
        if self.is_forked() || self.failure().is_some() {
            // Nobody takes it in; in a forked child the timer's lock may be held for ever.
            return;
        }
        let n = keys.len() as u64;
        let access = Access { ns, keys, now: self.clock.now(), told };
        if !self.accesses.push(access) {
            return FastCounters::add(&self.fast.accesses_dropped, n);
        }
        // Once for each time that they are taken in: a wake-up costs as much as a call.
        if self.learning_due.tell(self.accesses.len() >= ACCESSES_DUE) {
            // Under the lock, so that the timer is either before its check or already waiting.
            let _at = self.timer.at.lock();
            self.timer.changed.notify_one();
        }
    }

    /// Lets the policy take in what was accessed up to now, a little at a time. What ends meanwhile
    /// is told at once, and the record's file is another thread's.
    pub(crate) fn learn(self: &Arc<Self>) {
        if self.is_forked() {
            return;
        }
        // Before they are counted: what comes later calls again.
        self.learning_due.take();
        if self.failure().is_some() {
            return self.accesses.clear();
        }
        let mut left = self.accesses.len();
        loop {
            let mut learning = self.learning.lock();
            let Learning { recorder, held } = &mut *learning;
            let mut state = self.state.lock();
            let cost = |access: &Access| state.machine.cost(access);
            let some = self.accesses.next(LEARN_BLOCKS, &mut left, held, cost);
            if some.is_empty() {
                return;
            }
            let sized = |access: &Access| (access.clone(), state.machine.sizes(access));
            let recorded: Vec<_> = some.iter().filter(|_| recorder.is_some()).map(sized).collect();
            let work = self.step(&mut state, some.into_iter().map(Event::Accessed));
            drop(state);
            if let Some(recorder) = recorder {
                recorded.iter().for_each(|(access, sizes)| recorder.note(access, *sizes));
                recorder.hand_over();
            }
            // It may call the caller, who may ask for what was learned.
            drop(learning);
            self.carry_out(work);
        }
    }

    /// Waits until what was learned from is in the record's file, if there is one; not longer than
    /// `limit`, since a disk may not answer.
    pub(crate) fn wait_recorded(&self, limit: Duration) {
        let file = self.learning.lock().recorder.as_ref().map(|recorder| recorder.file());
        if let Some(file) = file {
            file.wait_written(limit);
        }
    }

    /// Records no more, and waits until the file is free, for as long as `limit`.
    pub(crate) fn end_recording(&self, limit: Duration) {
        let recorder = self.learning.lock().recorder.take();
        if let Some(recorder) = recorder {
            recorder.file().close(limit);
        }
    }

    /// Body of the timer thread: a step whenever a deadline has passed, and what was accessed is
    /// learned from, until the store is closed.
    pub(crate) fn run_timer(core: &std::sync::Weak<Self>) {
        // When something was first seen to be waiting, and until when nothing is learned.
        let (mut since, mut rests_until): (Option<Nanos>, Nanos) = (None, 0);
        while let Some(core) = core.upgrade() {
            let mut at = core.timer.at.lock();
            let now = core.clock.now();
            since = core.learning_due.is_set().then(|| since.unwrap_or(now));
            let many = core.accesses.len() >= ACCESSES_DUE;
            let soon = |since| if many { since } else { since + LEARN_EVERY };
            let learn_at = since.map(|since| soon(since).max(rests_until));
            let passed = |time: Option<Nanos>| time.is_some_and(|time| time <= now);
            let due = passed(*at);
            let mut learns = passed(learn_at);
            if !due && !learns {
                // Bounded, so that a dropped store ends the thread soon.
                let next = at.iter().chain(&learn_at).min().copied();
                let wait = next.map_or(MAX_NAP, |next| Duration::from_nanos(next - now));
                let waited = core.timer.changed.wait_for(&mut at, wait.min(MAX_NAP));
                // A clock that stands still makes nothing due.
                learns = waited.timed_out() && learn_at.is_some() && next == learn_at;
            }
            drop(at);
            if due {
                core.drive([Event::Tick]);
            }
            if learns {
                let begin = core.clock.now();
                core.learn();
                let end = core.clock.now();
                (since, rests_until) = (None, end + REST * (end - begin));
            }
            if core.stopped.load(Ordering::Acquire) {
                return;
            }
        }
    }
}
