//! The thread that owns the ring: it submits, reaps and sleeps, and computes nothing.

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

use super::inbox::{Inbox, RegionChange};
use super::op::{Next, Prepared, RingOp, ended, prepare};
use super::tables::{BufferTable, FileTable};
use super::{UringConfig, ring_ended, setup};
use crate::arena::Arena;
use crate::disk::FileId;
use crate::engine::{IoDone, IoOp, IoRequest, Priority, Shared};
use crate::pool::{Workers, panic_text};

/// Marks the completion of the poll that wakes the thread; the other marks are places in `ops`.
const WAKE: u64 = u64::MAX;
/// How many commits the kernel may have beside its stores.
const COMMIT_DEPTH: usize = 8;
/// How long the thread rests when the kernel lacks memory for a submission.
const REST: Duration = Duration::from_millis(1);

/// What a ring is made of, and whom it works with.
pub(super) struct RingParts {
    pub(super) inbox: Arc<Inbox>,
    pub(super) shared: Arc<Shared>,
    pub(super) helpers: Arc<Workers<IoRequest>>,
    pub(super) completions: Arc<Workers<IoDone>>,
    /// Counts the operations given up on.
    pub(super) abandoned: Arc<AtomicUsize>,
    /// Held because its memory is registered.
    pub(super) arena: Arc<Arena>,
    pub(super) config: UringConfig,
}

/// The ring and all that is under way.
pub(super) struct Ring {
    /// Dropped only when the kernel has nothing left: closing a ring does not wait for it.
    ring: ManuallyDrop<IoUring>,
    /// The operations that the kernel has, by their mark. Dropped like the ring.
    ops: ManuallyDrop<Vec<Option<RingOp>>>,
    free: Vec<usize>,
    live_stores: usize,
    live_store_bytes: usize,
    live_commits: usize,
    /// Operations to be submitted once more.
    again: VecDeque<usize>,
    loads: VecDeque<IoRequest>,
    commits: VecDeque<IoRequest>,
    stores: VecDeque<IoRequest>,
    scrubs: VecDeque<IoRequest>,
    done: Vec<IoDone>,
    wake_armed: bool,
    reaped: Vec<(u64, i32)>,
    /// While closing: when something last happened.
    progress: Option<Instant>,
    files: FileTable,
    buffers: BufferTable,
    parts: RingParts,
}

impl Ring {
    /// Makes the ring on this thread, the only one that may use it, and describes it.
    pub(super) fn new(parts: RingParts) -> Result<(Self, String), String> {
        let depth = parts.config.depth;
        // One entry more for the poll.
        let entries = u32::try_from(depth + 1).expect("a depth of at most 4096, as checked");
        let (ring, features) = setup::build(entries.next_power_of_two())?;
        let (buffers, with_buffers) = BufferTable::register(&ring, &parts.arena);
        let (files, with_files) = FileTable::register(&ring);
        let description = setup::describe(&features, depth, &with_buffers, &with_files);
        if with_buffers.is_err() || with_files.is_err() {
            tracing::warn!(description, "not everything is registered");
        }
        let ring = Self {
            ring: ManuallyDrop::new(ring),
            ops: ManuallyDrop::new(std::iter::repeat_with(|| None).take(depth).collect()),
            free: (0..depth).rev().collect(),
            live_stores: 0,
            live_store_bytes: 0,
            live_commits: 0,
            again: VecDeque::new(),
            loads: VecDeque::new(),
            commits: VecDeque::new(),
            stores: VecDeque::new(),
            scrubs: VecDeque::new(),
            done: Vec::new(),
            wake_armed: false,
            reaped: Vec::new(),
            progress: None,
            files,
            buffers,
            parts,
        };
        Ok((ring, description))
    }

    /// Serves until the inbox is closed and everything has ended. If the ring fails before, what
    /// the kernel does not have is answered with an error, and the rest is given up.
    pub(super) fn run_to_end(mut self) {
        let ran = catch_unwind(AssertUnwindSafe(|| self.run()));
        let ran = ran.unwrap_or_else(|panic| Err(io::Error::other(panic_text(&*panic).to_owned())));
        let left = self.parts.inbox.end();
        if let Err(cause) = ran {
            tracing::error!(%cause, "the io_uring ends before its work does");
            let commits = self.commits.drain(..);
            let stores = self.stores.drain(..).chain(self.scrubs.drain(..));
            let waiting = self.loads.drain(..).chain(commits).chain(stores);
            let failed = waiting.chain(left).map(|request| ended(request, Err(ring_ended(&cause))));
            self.done.extend(failed);
        } else {
            assert!(left.is_empty(), "a closed inbox takes no requests");
        }
        self.hand_over();
    }

    fn run(&mut self) -> io::Result<()> {
        loop {
            let taken = self.parts.inbox.take();
            for request in taken.requests {
                match request.priority {
                    Priority::Load => self.loads.push_back(request),
                    Priority::Commit => self.commits.push_back(request),
                    Priority::Store => self.stores.push_back(request),
                    Priority::Scrub => self.scrubs.push_back(request),
                }
            }
            if !taken.sweeps.is_empty() {
                self.files.sweep(&self.ring);
                // Whoever asked may have gone.
                taken.sweeps.into_iter().for_each(|told| _ = told.send(()));
            }
            taken.regions.into_iter().for_each(|change| self.change_region(change));
            self.fill();
            self.hand_over();
            if taken.closing && self.live() == 0 {
                return Ok(());
            }
            if !self.wake_armed {
                let fd = types::Fd(self.parts.inbox.wake_fd().as_raw_fd());
                let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
                // SAFETY: the poll uses no memory, and the inbox keeps its descriptor open.
                unsafe { push(&mut self.ring, &poll) };
                self.wake_armed = true;
            }
            let patience = taken.closing.then(|| self.patience()).transpose()?;
            self.wait(patience)?;
            self.reap()?;
        }
    }

    fn change_region(&mut self, change: RegionChange) {
        match change {
            RegionChange::Register(region, told) => {
                let registered = self.buffers.add(&self.ring, &region);
                // Not the last owner: the end of its memory may have to be waited for.
                drop(region);
                // Whoever asked may have gone.
                _ = told.send(registered);
            }
            RegionChange::Forget(number) => self.buffers.forget(&self.ring, number),
        }
    }

    /// Operations that the kernel has.
    fn live(&self) -> usize {
        self.ops.len() - self.free.len()
    }

    /// Puts as much into the ring as it may have: what was begun, then loads, commits, stores,
    /// scrubs. A commit needs no place among the stores: the next group waits for it, not it for
    /// the next group.
    fn fill(&mut self) {
        while let Some(place) = self.again.pop_front() {
            self.enter(place);
        }
        while !self.free.is_empty() {
            let UringConfig { store_depth, store_bytes, .. } = self.parts.config;
            let live = self.live_stores + self.live_commits;
            // One place is never theirs, so that a load finds it.
            let room = live + 1 < self.ops.len();
            let below = self.live_stores < store_depth && self.live_store_bytes < store_bytes;
            let may_store = room && below;
            let may_commit = room && live < store_depth + COMMIT_DEPTH;
            let mut next = self.loads.pop_front();
            if may_commit {
                next = next.or_else(|| self.commits.pop_front());
            }
            if may_store {
                let waiting = || self.stores.pop_front().or_else(|| self.scrubs.pop_front());
                next = next.or_else(waiting);
            }
            let Some(request) = next else { return };
            self.start(request);
        }
    }

    /// Books an operation that the kernel has from now on.
    fn begins(&mut self, op: &RingOp) {
        match op.priority {
            Priority::Load | Priority::Scrub => {}
            Priority::Commit => self.live_commits += 1,
            Priority::Store => {
                self.live_stores += 1;
                self.live_store_bytes += op.bytes();
            }
        }
    }

    /// Books one that the kernel has no more.
    fn ends(&mut self, op: &RingOp) {
        match op.priority {
            Priority::Load | Priority::Scrub => {}
            Priority::Commit => self.live_commits -= 1,
            Priority::Store => {
                self.live_stores -= 1;
                self.live_store_bytes -= op.bytes();
            }
        }
    }

    fn start(&mut self, request: IoRequest) {
        let request = match Shared::drop_cancelled(request) {
            Ok(request) => request,
            Err(done) => return self.done.push(done),
        };
        let id = file_of(&request.op);
        match prepare(request, &*self.parts.shared.disk, &self.buffers) {
            Prepared::Ring(mut op) => {
                op.file_index = id.and_then(|id| self.files.index(&self.ring, id, &op.file));
                self.begins(&op);
                let place = self.free.pop().expect("checked by the caller");
                self.ops[place] = Some(op);
                self.enter(place);
            }
            Prepared::Helper(request) => {
                if let Err(refused) = self.parts.helpers.submit(std::iter::once(request)) {
                    refused.for_each(|request| self.parts.shared.refuse(request));
                }
            }
            Prepared::Ended(done) => self.done.push(done),
        }
    }

    fn enter(&mut self, place: usize) {
        let op = self.ops[place].as_ref().expect("a place that is not free has an operation");
        let entry = op.entry(place as u64);
        // SAFETY: the operation owns its memory and its file and stays in `ops` until the entry's
        // completion; where none comes, `drop` leaves it there forever.
        unsafe { push(&mut self.ring, &entry) };
    }

    /// Gives completions to the threads that handle them.
    fn hand_over(&mut self) {
        if self.done.is_empty() {
            return;
        }
        if let Err(refused) = self.parts.completions.submit(self.done.drain(..)) {
            // They close after this thread, unless somebody's defect has ended them.
            refused.for_each(|done| self.parts.shared.complete(done));
        }
    }

    /// How much longer the end waits without a completion.
    fn patience(&mut self) -> io::Result<Duration> {
        let since = *self.progress.get_or_insert_with(Instant::now);
        let left = self.parts.config.drain_timeout.saturating_sub(since.elapsed());
        if left.is_zero() {
            let text = format!("{} operations have not completed in time", self.live());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        Ok(left)
    }

    /// Submits, and sleeps until something completes.
    fn wait(&mut self, patience: Option<Duration>) -> io::Result<()> {
        let entered = match patience {
            None => self.ring.submit_and_wait(1),
            Some(time) => {
                let time = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match entered {
            Ok(_) => Ok(()),
            Err(err) => match err.raw_os_error() {
                Some(libc::EINTR | libc::ETIME | libc::EBUSY) => Ok(()),
                // The kernel lacks memory. Completions may free some.
                Some(libc::EAGAIN | libc::ENOMEM) => {
                    std::thread::sleep(REST);
                    Ok(())
                }
                _ => Err(err),
            },
        }
    }

    fn reap(&mut self) -> io::Result<()> {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        let unit = self.parts.shared.disk.alignment();
        let mut polled = Ok(());
        for (mark, result) in reaped.drain(..) {
            if mark == WAKE {
                self.wake_armed = false;
                self.parts.inbox.clear_wake();
                if result < 0 && ![libc::EINTR, libc::EAGAIN].contains(&-result) {
                    polled = Err(io::Error::from_raw_os_error(-result));
                }
                continue;
            }
            let place = mark as usize;
            let op = self.ops[place].as_mut().expect("an operation completes once");
            match op.advance(result, unit) {
                Next::Again => self.again.push_back(place),
                Next::Ended(result) => {
                    let op = self.ops[place].take().expect("just seen");
                    self.free.push(place);
                    self.ends(&op);
                    self.done.push(op.end(result));
                    self.progress = None;
                }
            }
        }
        self.reaped = reaped;
        polled
    }
}

/// The ring ends with nothing under way, or not at all: what the kernel still has stays as it is,
/// and so does the memory of it.
impl Drop for Ring {
    fn drop(&mut self) {
        let live = self.live();
        if live > 0 {
            self.parts.abandoned.fetch_add(live, Ordering::SeqCst);
            // The memory is registered, and the ring lives on.
            std::mem::forget(Arc::clone(&self.parts.arena));
            tracing::error!(live, "operations are given up on, and their buffers with them");
            return;
        }
        // SAFETY: both are dropped here and nowhere else, and not used afterwards.
        unsafe {
            ManuallyDrop::drop(&mut self.ring);
            ManuallyDrop::drop(&mut self.ops);
        }
    }
}

fn file_of(op: &IoOp) -> Option<FileId> {
    match op {
        IoOp::Read { file, .. } | IoOp::Write { file, .. } | IoOp::Sync { file } => Some(*file),
        IoOp::Create { .. } => None,
    }
}

/// Puts an entry into the ring.
///
/// # Safety
/// What the entry points to must stay valid until its completion.
unsafe fn push(ring: &mut IoUring, entry: &Entry) {
    // SAFETY: the caller's promise is the one asked for.
    let pushed = unsafe { ring.submission().push(entry) };
    // Every operation has at most one entry in the ring, and so has the poll.
    pushed.expect("the ring has room for all operations and the poll");
}
