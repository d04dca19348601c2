//! The io_uring backend.
//!
//! One thread owns the ring and does nothing but submit and reap: requests come to it through an
//! inbox, completions go to a pool of threads, and what the ring cannot do (creating files, memory
//! off the alignment) goes to a thread that blocks.

mod inbox;
mod op;
mod ring;
mod setup;
mod tables;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use tiered_kv_types::{Error, ErrorKind, Result};

use crate::arena::Arena;
use crate::clock::Threads;
use crate::disk::Disk;
use crate::engine::{IoDone, IoEngine, IoOp, IoRequest, OnDone, Registration, Shared};
use crate::fork::Origin;
use crate::pool::{Job, Workers};
use crate::region::Region;
use inbox::Inbox;
use ring::{Ring, RingParts};

pub use setup::{UringFeatures, probe_io_uring};

const OP: &str = "open io_uring";

/// How an io_uring engine is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UringConfig {
    /// Operations that the kernel has at once; 2 to 4096. The rest waits: loads go first, then
    /// commits, then stores.
    pub depth: usize,
    /// How many of these may be stores; at least 1, less than `depth`, so that no number of
    /// stores keeps a load waiting.
    pub store_depth: usize,
    /// Stores are handed to the kernel while it has fewer bytes of them than this; at least 1. So
    /// many small ones keep a drive busy, and a load does not come behind many large ones.
    pub store_bytes: usize,
    /// Threads on which completions are handled.
    pub completion_threads: usize,
    /// How long the end waits without any completion before it gives up on what the kernel still
    /// has, whose buffers then stay taken forever.
    pub drain_timeout: Duration,
}

impl Default for UringConfig {
    fn default() -> Self {
        Self {
            depth: 128,
            store_depth: 64,
            store_bytes: 32 << 20,
            completion_threads: 2,
            drain_timeout: Duration::from_secs(30),
        }
    }
}

impl UringConfig {
    fn check(&self) -> Result<()> {
        let context = if !(2..=4096).contains(&self.depth) {
            format!("depth = {}: give 2 to 4096", self.depth)
        } else if !(1..self.depth).contains(&self.store_depth) {
            format!("store_depth = {}: give 1 to less than depth", self.store_depth)
        } else if self.store_bytes == 0 {
            "store_bytes = 0: give 1 or more".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidArgument, OP, context))
    }
}

/// An engine that hands operations to the kernel through an io_uring.
///
/// An operation owns its buffers until the kernel has completed it, whoever else has gone by then.
/// Dropping the engine closes it.
pub struct UringEngine {
    inbox: Arc<Inbox>,
    shared: Arc<Shared>,
    /// The one thread that owns the ring.
    ring: Workers<Job>,
    helpers: Arc<Workers<IoRequest>>,
    completions: Arc<Workers<IoDone>>,
    abandoned: Arc<AtomicUsize>,
    description: String,
}

impl UringEngine {
    /// Makes the ring, registers the arena's memory and a table of files, and starts the threads.
    /// What cannot be registered costs speed only, and [`IoEngine::describe`] says so.
    ///
    /// # Errors
    /// `InvalidArgument` for a configuration out of its bounds, `Unsupported` for a disk without
    /// descriptors or a kernel that refuses (the text says why); the refusal of `threads`.
    pub fn new(
        disk: Arc<dyn Disk>,
        arena: &Arc<Arena>,
        threads: &dyn Threads,
        config: UringConfig,
        on_done: OnDone,
    ) -> Result<Self> {
        config.check()?;
        if disk.descriptors().is_none() {
            let context = format!("the files of disk {:?} have no descriptors", disk.name());
            return Err(Error::new(ErrorKind::Unsupported, OP, context));
        }
        let inbox = Inbox::new().map_err(|err| Error::from_io(OP, "eventfd", err))?;
        let (inbox, shared) = (Arc::new(inbox), Arc::new(Shared::new(disk, on_done)));
        let completions = {
            let shared = Arc::clone(&shared);
            let handler = Arc::new(move |done| shared.complete(done));
            Workers::new("tkv-done", config.completion_threads, threads, handler)?
        };
        let helpers = {
            let (shared, inbox) = (Arc::clone(&shared), Arc::clone(&inbox));
            let handler = Arc::new(move |request| help(&shared, &inbox, request));
            Workers::new("tkv-help", 1, threads, handler)
        };
        let helpers = helpers.inspect_err(|_| completions.end())?;
        let ring = Workers::new("tkv-ring", 1, threads, Arc::new(|job: Job| job()));
        let ring = ring.inspect_err(|_| {
            helpers.end();
            completions.end();
        })?;
        let mut engine = Self {
            inbox,
            shared,
            ring,
            helpers: Arc::new(helpers),
            completions: Arc::new(completions),
            abandoned: Arc::default(),
            description: String::new(),
        };
        // On an error here the engine is dropped, which ends its threads.
        engine.description = engine.start(arena, config)?;
        Ok(engine)
    }

    /// Operations given up on, at the end or after a fault of the ring: the kernel may still use
    /// their buffers, which are therefore never freed.
    pub fn abandoned(&self) -> usize {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// Lets the ring's thread make the ring, which only that thread may then use.
    fn start(&self, arena: &Arc<Arena>, config: UringConfig) -> Result<String> {
        let (told, made) = channel();
        let parts = RingParts {
            inbox: Arc::clone(&self.inbox),
            shared: Arc::clone(&self.shared),
            helpers: Arc::clone(&self.helpers),
            completions: Arc::clone(&self.completions),
            abandoned: Arc::clone(&self.abandoned),
            arena: Arc::clone(arena),
            config,
        };
        let job: Job = Box::new(move || {
            let (helpers, completions) =
                (Arc::clone(&parts.helpers), Arc::clone(&parts.completions));
            match Ring::new(parts) {
                Ok((ring, description)) => {
                    // Nobody listening means that the engine is gone, which closed the inbox.
                    let _ = told.send(Ok(description));
                    ring.run_to_end();
                }
                Err(reason) => _ = told.send(Err(reason)),
            }
            // Only now can no more work for them appear.
            helpers.start_closing();
            completions.start_closing();
        });
        if self.ring.submit(std::iter::once(job)).is_err() {
            unreachable!("the ring's thread has just been started");
        }
        // The thread ends when its one job has.
        self.ring.start_closing();
        let refused = |reason: String| Error::new(ErrorKind::Unsupported, OP, reason);
        made.recv().map_err(|_| refused("the ring's thread has panicked".into()))?.map_err(refused)
    }
}

/// Performs what the ring cannot.
fn help(shared: &Shared, inbox: &Inbox, request: IoRequest) {
    if matches!(request.op, IoOp::Create { .. }) {
        // A removed file that is still registered occupies the space that the new one needs.
        inbox.forget_removed_files();
    }
    shared.serve(request);
}

impl IoEngine for UringEngine {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        self.shared.begin(batch.len());
        if let Err(refused) = self.inbox.submit(batch) {
            refused.into_iter().for_each(|request| self.shared.refuse(request));
        }
    }

    fn register(&self, region: &Arc<Region>) -> Registration {
        let registered = self.inbox.register(region);
        if registered == Registration::Done {
            let (inbox, number) = (Arc::downgrade(&self.inbox), region.number());
            let origin = Origin::here();
            region.on_gone(Box::new(move || {
                // In a forked child nobody serves the inbox, and its lock may be held for ever.
                if !origin.is_forked()
                    && let Some(inbox) = inbox.upgrade()
                {
                    inbox.forget_region(number);
                }
            }));
        }
        registered
    }

    fn in_flight(&self) -> usize {
        self.shared.in_flight()
    }

    /// As the trait says; but operations that the kernel does not complete within
    /// [`UringConfig::drain_timeout`] are given up, counted by [`UringEngine::abandoned`], and
    /// never answered, because their buffers cannot be given back.
    fn close(&self) {
        self.inbox.close();
        let own = self.ring.owns_this_thread()
            || self.helpers.owns_this_thread()
            || self.completions.owns_this_thread();
        if own {
            return;
        }
        self.ring.wait_closed();
        // Where the ring's thread has panicked nobody has told them.
        self.helpers.end();
        self.completions.end();
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        self.close();
    }
}

/// The error of an operation that the ring's end has overtaken.
fn ring_ended(cause: &io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, format!("the io_uring has ended: {cause}"))
}
