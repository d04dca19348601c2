//! Threads around the state machine: one lock for the decisions, none of it held across I/O.
//!
//! A caller's thread, an I/O thread, a copy thread or the timer brings events, holds the lock for
//! the microseconds of one step, and carries the commands out after it has let go.

mod failed;
mod learn;
mod queue;

use crate::call::{BlockSource, Call, WriteBuf};
use crate::due::Due;
use crate::event_file::EventFile;
use crate::index::{KeyHasher, ReadIndex};
use crate::io::{IoBridge, LoadInto};
use crate::machine::{Access, Command, DriveId, Event, Machine, Now, OpId, Outcome};
use crate::owner::Calls;
use crate::record::Recorder;
use crate::resident::{Filling, LeaseBudget, Resident};
use crate::stats::FastCounters;
pub(crate) use failed::Asked;
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
pub(crate) use queue::ACCESS_QUEUE;
use queue::AccessQueue;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tiered_kv_io::{Clock, Nanos, Origin, RegionSlot, Running, WorkerPool};

/// Copies up to this many bytes run on the caller's thread.
const INLINE_COPY_BYTES: u64 = 64 << 10;
/// Most bytes that a copy thread copies before it tells: the drive can begin with them.
const COPY_JOB_BYTES: u64 = 2 << 20;

/// Numbers of the cores of this process, from 1.
static NEXT_CORE: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Calls into the caller's code that this thread is in the midst of.
    static IN_CALLER: Cell<u32> = const { Cell::new(0) };
}

/// Whether the core is calling the caller on this thread: it cannot wait for the core here.
pub(crate) fn in_caller() -> bool {
    IN_CALLER.get() > 0
}

/// Marks the thread as calling the caller, until it is dropped.
struct InCaller;

impl InCaller {
    fn enter() -> Self {
        IN_CALLER.set(IN_CALLER.get() + 1);
        Self
    }
}

impl Drop for InCaller {
    fn drop(&mut self) {
        IN_CALLER.set(IN_CALLER.get() - 1);
    }
}

/// What the lock guards: the machine and what the core holds for each call.
pub(crate) struct State {
    pub(crate) machine: Machine,
    calls: HashMap<OpId, Call, KeyHasher>,
    next_op: u64,
    commands: Vec<Command>,
    events: Option<EventFile>,
}

/// What is taken in, in one order.
struct Learning {
    recorder: Option<Recorder>,
    /// Taken out of the queue, and to be learned from next.
    held: Option<Access>,
}

#[derive(Default)]
struct Timer {
    /// Guards the time of the next tick.
    at: Mutex<Option<Nanos>>,
    changed: Condvar,
}

pub(crate) struct Core {
    /// Its number in this process.
    pub(crate) number: u64,
    state: Mutex<State>,
    pub(crate) index: Arc<ReadIndex>,
    pub(crate) budget: Arc<LeaseBudget>,
    pub(crate) fast: FastCounters,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) io: Vec<IoBridge>,
    copies: WorkerPool,
    copy_threads: usize,
    accesses: AccessQueue,
    /// Whether the timer's thread has been told that accesses wait.
    learning_due: Due,
    /// Guards the order in which accesses are taken in, and where they are recorded.
    learning: Mutex<Learning>,
    timer: Timer,
    /// The process whose threads these are.
    origin: Origin,
    /// Until the threads have ended.
    running: Running,
    closed: AtomicBool,
    stopped: AtomicBool,
    failure: OnceLock<String>,
}

/// What is left to do after the lock is let go.
#[derive(Default)]
struct Work {
    copies: Vec<Copy>,
    io: BTreeMap<DriveId, Vec<Command>>,
    direct: BTreeMap<DriveId, Vec<LoadInto>>,
    done: Vec<(Call, Outcome)>,
}

enum Copy {
    In { op: OpId, item: usize, into: Filling, source: Arc<dyn BlockSource> },
    Out { op: OpId, item: usize, from: Arc<Resident>, buffer: Box<dyn WriteBuf> },
}

/// The results of copies: events, and the caller's buffers on their way back to their call.
#[derive(Default)]
struct Copied {
    events: Vec<Event>,
    buffers: Vec<(OpId, usize, Box<dyn WriteBuf>)>,
}

/// What a core is made of.
pub(crate) struct CoreParts {
    pub(crate) machine: Machine,
    pub(crate) index: Arc<ReadIndex>,
    pub(crate) budget: Arc<LeaseBudget>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) io: Vec<IoBridge>,
    pub(crate) copies: WorkerPool,
    pub(crate) copy_threads: usize,
    pub(crate) hasher: KeyHasher,
    pub(crate) events: Option<EventFile>,
    pub(crate) recorder: Option<Recorder>,
}

impl Core {
    pub(crate) fn new(parts: CoreParts) -> Self {
        let state = State {
            machine: parts.machine,
            calls: HashMap::with_hasher(parts.hasher),
            next_op: 1,
            commands: Vec::new(),
            events: parts.events,
        };
        Self {
            number: NEXT_CORE.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(state),
            index: parts.index,
            budget: parts.budget,
            fast: FastCounters::default(),
            clock: parts.clock,
            io: parts.io,
            copies: parts.copies,
            copy_threads: parts.copy_threads,
            accesses: AccessQueue::new(),
            learning_due: Due::default(),
            learning: Mutex::new(Learning { recorder: parts.recorder, held: None }),
            timer: Timer::default(),
            origin: Origin::here(),
            running: Running::begin(),
            closed: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            failure: OnceLock::new(),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether this process is a forked child of the core's: none of its threads are here, and its
    /// locks may be held by one of them for ever.
    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Takes no more calls. Returns whether it took some before.
    pub(crate) fn refuse_calls(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }

    fn now(&self) -> Now {
        Now { mono: self.clock.now(), unix_ns: self.clock.unix_nanos() }
    }

    /// Begins a call.
    pub(crate) fn submit(
        self: &Arc<Self>,
        mut call: Call,
        event: impl FnOnce(OpId) -> Event,
    ) -> OpId {
        let mut state = self.state.lock();
        let op = OpId(state.next_op);
        state.next_op += 1;
        let event = event(op);
        call.asked = Asked::of(&event);
        state.calls.insert(op, call);
        let work = self.step(&mut state, [event]);
        drop(state);
        self.carry_out(work);
        op
    }

    /// Ends every call of one handle. Each ends through its own result.
    pub(crate) fn cancel_calls(self: &Arc<Self>, calls: &Arc<Calls>) {
        let of = |call: &Call| call.in_flight.as_ref().is_some_and(|call| call.is_of(calls));
        let state = self.state.lock();
        let ops: Vec<OpId> =
            state.calls.iter().filter(|(_, call)| of(call)).map(|(op, _)| *op).collect();
        drop(state);
        self.drive(ops.into_iter().map(|op| Event::Cancel { op }));
    }

    /// Brings events that belong to no caller.
    pub(crate) fn drive(self: &Arc<Self>, events: impl IntoIterator<Item = Event>) {
        if self.is_forked() {
            return;
        }
        let mut state = self.state.lock();
        let work = self.step(&mut state, events);
        drop(state);
        self.carry_out(work);
    }

    /// Looks into the machine, as statistics and audits do.
    pub(crate) fn with_machine<R>(&self, look: impl FnOnce(&mut Machine) -> R) -> R {
        look(&mut self.state.lock().machine)
    }

    fn step(&self, state: &mut State, events: impl IntoIterator<Item = Event>) -> Work {
        let mut work = Work::default();
        if self.failure().is_some() {
            self.give_up(state, &mut work);
            return work;
        }
        let decide = AssertUnwindSafe(|| self.decide(state, events, &mut work));
        match catch_unwind(decide) {
            Ok(()) => work,
            Err(panic) => self.fail(state, work, &*panic),
        }
    }

    fn decide(&self, state: &mut State, events: impl IntoIterator<Item = Event>, work: &mut Work) {
        let State { machine, commands, events: file, .. } = state;
        machine.step(self.now(), events, commands);
        if let Some(file) = file {
            file.catch_up(machine);
        }
        self.arm(machine.next_deadline());
        for command in std::mem::take(commands) {
            sort_command(state, command, work);
        }
    }

    fn carry_out(self: &Arc<Self>, work: Work) {
        for (drive, commands) in work.io {
            self.io[usize::from(drive)].submit(self, commands);
        }
        for (drive, loads) in work.direct {
            self.io[usize::from(drive)].load_into(self, loads);
        }
        self.copy(work.copies);
        for (Call { reply, source, buffers, in_flight, .. }, outcome) in work.done {
            let _calling = InCaller::enter();
            // The caller's own, like the rest: not dropped under the lock, and before it is told.
            drop(source);
            reply(outcome, buffers);
            drop(in_flight);
        }
    }

    fn copy(self: &Arc<Self>, copies: Vec<Copy>) {
        if copies.is_empty() {
            return;
        }
        let bytes: u64 = copies.iter().map(Copy::bytes).sum();
        if bytes <= INLINE_COPY_BYTES {
            return self.copied(copies.into_iter().map(Copy::run).collect());
        }
        let jobs = bytes.div_ceil(COPY_JOB_BYTES).max(self.copy_threads as u64);
        let share = copies.len().div_ceil(usize::try_from(jobs).unwrap_or(usize::MAX));
        let mut copies = copies.into_iter().peekable();
        while copies.peek().is_some() {
            let job: Vec<Copy> = copies.by_ref().take(share).collect();
            let core = self.clone();
            self.copies.run(Box::new(move || {
                core.copied(job.into_iter().map(Copy::run).collect());
            }));
        }
    }

    /// Brings a slot back that nobody else touches any more, and what became of it.
    pub(crate) fn slot_back(self: &Arc<Self>, slot: RegionSlot, event: Event) {
        let Event::LoadedInto { op, item, .. } = &event else {
            unreachable!("slots come back from direct reads")
        };
        let buffers = vec![(*op, *item, Box::new(slot) as Box<dyn WriteBuf>)];
        self.copied(Copied { events: vec![event], buffers });
    }

    fn copied(self: &Arc<Self>, copied: Copied) {
        let mut state = self.state.lock();
        for (op, item, buffer) in copied.buffers {
            if let Some(call) = state.calls.get_mut(&op) {
                call.buffers[item] = Some(buffer);
            }
        }
        let work = self.step(&mut state, copied.events);
        drop(state);
        self.carry_out(work);
    }

    fn arm(&self, deadline: Option<Nanos>) {
        let mut at = self.timer.at.lock();
        if *at != deadline {
            *at = deadline;
            self.timer.changed.notify_one();
        }
    }

    /// Ends the copy threads and the I/O threads, after everything in flight has ended.
    pub(crate) fn stop(&self) {
        for io in &self.io {
            io.close();
        }
        self.copies.close();
        self.stopped.store(true, Ordering::Release);
        // Under the lock, so that the timer is either before its check or already waiting.
        let _at = self.timer.at.lock();
        self.timer.changed.notify_all();
        self.running.end();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // A batch that outlives the core keeps its own blocks and no others.
        self.index.clear();
    }
}

/// Binds a command to the caller's memory that it needs, while the lock is held.
fn sort_command(state: &mut State, command: Command, work: &mut Work) {
    match command {
        Command::CopyIn { op, item, into } => {
            let call = state.calls.get(&op).expect("a call is kept until it completes");
            let source = call.source.clone().expect("a put has a source");
            work.copies.push(Copy::In { op, item, into, source });
        }
        Command::CopyOut { op, item, from } => {
            let call = state.calls.get_mut(&op).expect("a call is kept until it completes");
            let buffer = call.buffers[item].take().expect("each buffer is filled once");
            work.copies.push(Copy::Out { op, item, from, buffer });
        }
        Command::LoadInto { op, item, block, drive, reads, cancel } => {
            let call = state.calls.get_mut(&op).expect("a call is kept until it completes");
            let buffer = call.buffers[item].take().expect("each buffer is filled once");
            let slot = buffer.into_any().downcast::<RegionSlot>();
            let slot = *slot.expect("only slots of a region are read into");
            let load = LoadInto { op, item, block, reads, cancel, slot };
            work.direct.entry(drive).or_default().push(load);
        }
        Command::Complete { op, outcome } => {
            let call = state.calls.remove(&op).expect("a call completes once");
            work.done.push((call, outcome));
        }
        Command::Load { drive, .. }
        | Command::Scrub { drive, .. }
        | Command::Probe { drive }
        | Command::PrepareSegment { drive, .. }
        | Command::WriteSlabs { drive, .. }
        | Command::WriteHeaders { drive, .. }
        | Command::Sync { drive, .. }
        | Command::WriteJournal { drive, .. } => {
            work.io.entry(drive).or_default().push(command);
        }
    }
}

/// Runs a copy that calls into the caller's code: a panic there, or a length that changed, must not
/// leave the call without an end.
fn contained<R>(copy: impl FnOnce() -> R) -> Option<R> {
    let _calling = InCaller::enter();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(copy));
    result.inspect_err(|_| tracing::error!("a caller's buffer panicked")).ok()
}

enum CopyResult {
    In(Event),
    Out(Event, (OpId, usize, Box<dyn WriteBuf>)),
}

impl Copy {
    fn bytes(&self) -> u64 {
        match self {
            Self::In { into, .. } => into.bytes(),
            Self::Out { from, .. } => from.bytes(),
        }
    }

    fn run(self) -> CopyResult {
        match self {
            Self::In { op, item, into, source } => {
                let filled = contained(|| {
                    let block = source.block(item);
                    (block.len() as u64 == into.bytes()).then(|| into.fill_from(block))
                });
                CopyResult::In(Event::CopiedIn { op, item, filled: filled.flatten() })
            }
            Self::Out { op, item, from, mut buffer } => {
                let intact = contained(|| {
                    let out = buffer.as_mut_slice();
                    (out.len() as u64 == from.bytes()).then(|| from.copy_out(out))
                });
                let (intact, generation) = (intact.flatten(), from.generation());
                let event = Event::CopiedOut { op, item, intact, generation };
                CopyResult::Out(event, (op, item, buffer))
            }
        }
    }
}

impl FromIterator<CopyResult> for Copied {
    fn from_iter<I: IntoIterator<Item = CopyResult>>(results: I) -> Self {
        let mut copied = Self::default();
        for result in results {
            match result {
                CopyResult::In(event) => copied.events.push(event),
                CopyResult::Out(event, buffer) => {
                    copied.events.push(event);
                    copied.buffers.push(buffer);
                }
            }
        }
        copied
    }
}
