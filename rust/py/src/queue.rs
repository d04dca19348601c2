//! The completion queue: calls in progress and results that wait, behind one eventfd.
//!
//! Every call has a place from its submission on, so that completing it neither waits nor
//! allocates. The eventfd is written only when the queue goes from empty to not empty: one wake for
//! a batch.

use crate::completion::{About, Done};
use crate::store::{Shared, StoreRef};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tiered_kv::io_seams::Origin;
use tiered_kv::{Error, ErrorKind, OpId, Result};

/// A call that has ended and waits to be drained, with the buffers that are released then.
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) done: Done,
    pub(crate) about: About,
    /// Seconds from the submission to the end.
    pub(crate) seconds: f64,
}

/// A call that can be cancelled.
pub(crate) struct Cancel {
    store: Weak<Shared>,
    op: OpId,
}

impl Cancel {
    /// Asks the core to end the call; it still ends through its own result.
    pub(crate) fn run(self) {
        if let Some(store) = self.store.upgrade() {
            store.store.cancel(self.op);
        }
    }
}

struct Running {
    about: About,
    begun: Instant,
    /// Where the core has the call; known once the submission has returned.
    at: Option<(Weak<Shared>, OpId)>,
    /// Result of a call that ended before its submission returned, kept for the submitter.
    early: Option<Done>,
    submitted: bool,
}

impl Running {
    fn cancel(&self) -> Option<Cancel> {
        self.at.as_ref().map(|(store, op)| Cancel { store: store.clone(), op: *op })
    }
}

struct Entries {
    next: u64,
    /// Calls in progress.
    running: HashMap<u64, Running>,
    done: Vec<Completion>,
    /// How many of `done` were refused for want of room.
    refused: usize,
    /// Takes no more calls.
    closed: bool,
    /// Nobody will drain any more: results are dropped as they come.
    abandoned: bool,
    /// When the descriptor last became readable.
    rung: Option<Instant>,
}

/// What a queue made of a call.
pub(crate) enum Begun {
    /// It has a place.
    Running(u64),
    /// There was no room: it has ended as failed.
    Refused(u64),
}

/// Calls in progress and results, of one event loop or one channel.
pub(crate) struct Queue {
    wake: OwnedFd,
    capacity: usize,
    /// A result that is there when the submission returns is the submitter's, not the queue's.
    inline: bool,
    /// The process that may use it: in a forked child another thread may hold the lock for ever.
    origin: Origin,
    /// Guards the calls in progress and the completions.
    entries: Mutex<Entries>,
    /// Told when no call is in progress any more.
    idle: Condvar,
}

impl Queue {
    pub(crate) fn new(capacity: usize, inline: bool) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let entries = Entries {
            next: 0,
            running: HashMap::new(),
            done: Vec::new(),
            refused: 0,
            closed: false,
            abandoned: false,
            rung: None,
        };
        let (entries, idle) = (Mutex::new(entries), Condvar::new());
        Ok(Self { wake, capacity, inline, origin: Origin::here(), entries, idle })
    }

    /// Whether this process is a forked child of the queue's.
    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Whether a result that is there when its submission returns is the submitter's.
    pub(crate) fn is_inline(&self) -> bool {
        self.inline
    }

    /// The descriptor that is readable while there are results.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Wakes the pollers; fails only where the counter is full, and then they wake all the same.
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn push(&self, entries: &mut Entries, completion: Completion) {
        let was_empty = entries.done.is_empty();
        entries.done.push(completion);
        if was_empty {
            entries.rung = Some(Instant::now());
            self.ring();
        }
    }

    /// Takes up a call.
    ///
    /// # Errors
    /// `Closed`; `NoSpace` where as many calls as the queue is made for were refused already and
    /// nobody has drained them, or where refused calls have no place at all.
    pub(crate) fn begin(&self, about: About) -> Result<Begun> {
        let mut entries = self.entries.lock();
        if entries.closed {
            let remedy = "the channel is closed: make another one";
            return Err(Error::new(ErrorKind::Closed, "channel", remedy));
        }
        let id = entries.next + 1;
        if entries.running.len() + entries.done.len() - entries.refused < self.capacity {
            entries.next = id;
            let begun = Instant::now();
            let call = Running { about, begun, at: None, early: None, submitted: false };
            entries.running.insert(id, call);
            let room = entries.running.len();
            entries.done.reserve(room);
            return Ok(Begun::Running(id));
        }
        if self.inline || entries.refused >= self.capacity {
            let context = format!(
                "{} calls wait to be drained and {} were refused: drain them, or raise `capacity`",
                self.capacity, entries.refused
            );
            return Err(Error::new(ErrorKind::NoSpace, "channel", context));
        }
        entries.next = id;
        entries.refused += 1;
        self.push(&mut entries, Completion { id, done: Done::Refused, about, seconds: 0.0 });
        Ok(Begun::Refused(id))
    }

    /// A call has ended: the core no longer touches its memory. Buffers are kept until somebody
    /// with the GIL takes the completion.
    pub(crate) fn end(&self, id: u64, done: Done) {
        let mut entries = self.entries.lock();
        if self.inline
            && let Some(call) = entries.running.get_mut(&id)
            && !call.submitted
        {
            call.early = Some(done);
            return;
        }
        let call = entries.running.remove(&id).expect("a call ends once");
        if entries.abandoned {
            // Its leases and buffers are freed after the lock is let go: that may wait for the GIL.
            drop(entries);
            drop(done);
            return;
        }
        let (about, seconds) = (call.about, call.begun.elapsed().as_secs_f64());
        self.push(&mut entries, Completion { id, done, about, seconds });
        self.tell_idle(&entries);
    }

    /// The submission has returned: the result, where it is the submitter's, else `None` and the
    /// result comes through the queue.
    pub(crate) fn settle(&self, id: u64, store: &StoreRef, op: Option<OpId>) -> Option<Done> {
        let mut entries = self.entries.lock();
        let closed = entries.closed;
        // A call that is gone has ended and is in the queue.
        let call = entries.running.get_mut(&id)?;
        if let Some(done) = call.early.take() {
            entries.running.remove(&id);
            self.tell_idle(&entries);
            return Some(done);
        }
        call.submitted = true;
        call.at = op.map(|op| (Arc::downgrade(store), op));
        // Closed meanwhile, when the call could not be named yet.
        let cancel = if closed { call.cancel() } else { None };
        drop(entries);
        if let Some(cancel) = cancel {
            cancel.run();
        }
        None
    }

    /// The submission failed: nothing will come.
    pub(crate) fn withdraw(&self, id: u64) {
        let mut entries = self.entries.lock();
        entries.running.remove(&id);
        self.tell_idle(&entries);
    }

    fn tell_idle(&self, entries: &Entries) {
        if entries.running.is_empty() {
            self.idle.notify_all();
        }
    }

    /// How long ago the descriptor last became readable, where it has.
    pub(crate) fn rung_ago(&self) -> Option<Duration> {
        self.entries.lock().rung.map(|rung| rung.elapsed())
    }

    /// What cancels a call in progress.
    pub(crate) fn cancel(&self, id: u64) -> Option<Cancel> {
        self.entries.lock().running.get(&id).and_then(Running::cancel)
    }

    /// Takes all results.
    pub(crate) fn take(&self) -> Vec<Completion> {
        let mut entries = self.entries.lock();
        // Pollers stay awake once it is closed, so that each of them sees that it is.
        if !entries.closed {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        entries.refused = 0;
        // Calls in progress have their room in the next one.
        let room = entries.running.len();
        std::mem::replace(&mut entries.done, Vec::with_capacity(room))
    }

    /// Refuses new calls and wakes the pollers; what cancels those in progress.
    pub(crate) fn close(&self) -> Vec<Cancel> {
        let mut entries = self.entries.lock();
        entries.closed = true;
        self.ring();
        entries.running.values().filter_map(Running::cancel).collect()
    }

    /// The same for a queue that nobody will drain: its results, and what cancels the rest, whose
    /// results are dropped as they come.
    pub(crate) fn abandon(&self) -> (Vec<Completion>, Vec<Cancel>) {
        let cancels = self.close();
        let mut entries = self.entries.lock();
        entries.abandoned = true;
        (std::mem::take(&mut entries.done), cancels)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.entries.lock().closed
    }

    /// Calls in progress.
    pub(crate) fn pending(&self) -> usize {
        self.entries.lock().running.len()
    }

    /// Waits until no call is in progress; false where `until` comes first.
    pub(crate) fn wait_idle(&self, until: Instant) -> bool {
        let mut entries = self.entries.lock();
        while !entries.running.is_empty() {
            if self.idle.wait_until(&mut entries, until).timed_out() {
                return entries.running.is_empty();
            }
        }
        true
    }
}
