//! The engine that performs reads and writes behind the store, and the blocking backend.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tiered_kv_types::{Error, ErrorKind, Result};

use crate::buf::{AlignedBuf, ReadBuf};
use crate::cancel::CancelFlag;
use crate::clock::Threads;
use crate::disk::{Disk, FileId};
use crate::join::{ALONE_BYTES, JOINED_BYTES, Queued, joins, perform_joined, requests_of};
use crate::loads::Loads;
use crate::pool::{Workers, contained, panic_text};
use crate::region::{ReadInto, Region};

/// Whom an operation serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    Load,
    /// The few bytes, or the sync, that all the stores of a group wait for.
    Commit,
    /// Nobody does.
    Store,
    /// It can wait for all of these.
    Scrub,
}

/// One operation, with the buffers that it owns until it has ended.
pub enum IoOp {
    /// Fill `buf` from `offset`.
    Read {
        /// The file to read.
        file: FileId,
        /// Where, in bytes.
        offset: u64,
        /// Filled whole; its bytes mean nothing after an error.
        buf: ReadInto,
    },
    /// Write all of `buf` at `offset`.
    Write {
        /// The file to write.
        file: FileId,
        /// Where, in bytes.
        offset: u64,
        /// The bytes.
        buf: Arc<dyn ReadBuf>,
    },
    /// Make the file's completed writes durable.
    Sync {
        /// The file to sync.
        file: FileId,
    },
    /// Create a data file, write its header and make both durable; or leave nothing.
    Create {
        /// The new file's name.
        name: String,
        /// Its whole length, all of it allocated.
        bytes: u64,
        /// What is written at its beginning.
        header: AlignedBuf,
        /// The new file, once it is there.
        file: Option<FileId>,
    },
}

/// An operation to be performed.
pub struct IoRequest {
    /// The caller's mark; comes back in [`IoDone`].
    pub token: u64,
    /// Whom it serves.
    pub priority: Priority,
    /// What to do.
    pub op: IoOp,
    /// Says whether it is still wanted when its turn comes.
    pub cancel: Option<CancelFlag>,
}

impl IoRequest {
    pub(crate) fn is_wanted(&self) -> bool {
        !self.cancel.as_ref().is_some_and(CancelFlag::is_set)
    }
}

/// The error of a request that was dropped before the device had it.
#[derive(Debug)]
struct Cancelled;

impl std::fmt::Display for Cancelled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the request was cancelled before the device had it")
    }
}

impl std::error::Error for Cancelled {}

/// Whether a request ended since its flag was set, without having reached the device.
pub fn is_cancelled(err: &io::Error) -> bool {
    err.get_ref().is_some_and(|inner| inner.is::<Cancelled>())
}

/// What became of the wish to tell the device of a region beforehand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registration {
    /// It knows the region: reads into it need no look at its pages.
    Done,
    /// This backend has nothing to register with.
    NotNeeded,
    /// It does not, which costs speed only; why.
    Refused(String),
}

/// An operation that has ended; gives its buffers back.
pub struct IoDone {
    /// The mark of its request.
    pub token: u64,
    /// What was done.
    pub op: IoOp,
    /// How it ended.
    pub result: io::Result<()>,
    /// The CRC-32C of all the bytes that were read, where it came for free.
    pub crc: Option<u32>,
}

impl IoDone {
    pub(crate) fn new(token: u64, op: IoOp, result: io::Result<()>) -> Self {
        Self { token, op, result, crc: None }
    }
}

/// Called once for each request, on one of the engine's threads and with no lock of the engine
/// held. Only a request submitted after `close` is answered on the thread that submits it.
pub type OnDone = Arc<dyn Fn(IoDone) + Send + Sync>;

/// Performs operations in the background.
pub trait IoEngine: Send + Sync + 'static {
    /// A short name of the backend.
    fn name(&self) -> &'static str;

    /// The backend, with what of it is in use and why: one line for whoever looks at the store's
    /// health.
    fn describe(&self) -> String {
        self.name().to_owned()
    }

    /// Takes operations and returns at once. Operations may be performed in any order.
    fn submit(&self, batch: Vec<IoRequest>);

    /// Tells the device of a region whose slots will be read into. It is forgotten when the region
    /// is gone.
    fn register(&self, region: &Arc<Region>) -> Registration {
        let _ = region;
        Registration::NotNeeded
    }

    /// Operations taken whose completion has not yet been handled.
    fn in_flight(&self) -> usize;

    /// Waits until everything submitted has completed, then ends the engine's threads. Called from
    /// a completion it cannot wait: the rest then completes by itself.
    fn close(&self);
}

/// An engine of threads that block in a [`Disk`]'s calls.
///
/// Loads have threads of their own, so that no number of stores keeps one waiting. Commits have
/// one: while it syncs the stores of the next group are written. Dropping the engine closes it.
pub struct BlockingEngine {
    loads: Loads,
    stores: Workers<Queued>,
    commits: Workers<IoRequest>,
    shared: Arc<Shared>,
    description: String,
}

/// What the threads of an engine, of either backend, have in common.
pub(crate) struct Shared {
    pub(crate) disk: Arc<dyn Disk>,
    on_done: OnDone,
    in_flight: AtomicUsize,
}

impl BlockingEngine {
    /// Starts the threads.
    ///
    /// # Errors
    /// `InvalidArgument` where a number of threads is zero; the refusal of `threads`.
    pub fn new(
        disk: Arc<dyn Disk>,
        threads: &dyn Threads,
        load_threads: usize,
        store_threads: usize,
        on_done: OnDone,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::new(disk, on_done));
        let loads = Loads::new(Arc::clone(&shared), threads, load_threads)?;
        let store = {
            let shared = Arc::clone(&shared);
            Arc::new(move |queued: Vec<Queued>| {
                let mut requests = requests_of(queued);
                let joined = shared.join(&mut requests);
                requests.into_iter().for_each(|r| shared.complete(shared.end(r, joined)));
            })
        };
        let recent = loads.recent();
        let joins = Box::new(move |taken: &[_], next: &_| {
            joins(taken, next, if recent.is() { JOINED_BYTES } else { ALONE_BYTES })
        });
        let stores = Workers::joining("tkv-store", store_threads, threads, joins, store);
        let stores = stores.inspect_err(|_| loads.end())?;
        let commit = {
            let shared = Arc::clone(&shared);
            Arc::new(move |request| shared.serve(request))
        };
        let commits = Workers::new("tkv-commit", 1, threads, commit);
        let commits = commits.inspect_err(|_| {
            loads.end();
            stores.end();
        })?;
        let description = "blocking".into();
        Ok(Self { loads, stores, commits, shared, description })
    }

    /// The same engine, which now also says why it is this one that works here.
    #[must_use]
    pub fn because(mut self, reason: &str) -> Self {
        self.description = format!("blocking: {reason}");
        self
    }
}

impl IoEngine for BlockingEngine {
    fn name(&self) -> &'static str {
        "blocking"
    }

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        self.shared.begin(batch.len());
        let (mut loads, mut stores) = (Vec::new(), Vec::new());
        let (mut commits, mut creates) = (Vec::new(), Vec::new());
        for request in batch {
            match (request.priority, &request.op) {
                (Priority::Load, _) => loads.push(Queued::from(request)),
                // Allocating a file can take long, which no commit is to wait for.
                (Priority::Commit, IoOp::Create { .. }) => creates.push(Queued::from(request)),
                (Priority::Commit, _) => commits.push(request),
                (Priority::Store | Priority::Scrub, _) => stores.push(Queued::from(request)),
            }
        }
        let loads = self.loads.submit(loads).err().into_iter().flatten();
        let stores = self.stores.submit_with(creates, stores).err().into_iter().flatten();
        let commits = self.commits.submit(commits.into_iter()).err().into_iter().flatten();
        for request in loads.chain(stores).map(|queued| queued.request).chain(commits) {
            self.shared.refuse(request);
        }
    }

    fn in_flight(&self) -> usize {
        self.shared.in_flight()
    }

    fn close(&self) {
        self.loads.start_closing();
        self.stores.start_closing();
        self.commits.start_closing();
        // A thread of any kind that waited could be the one that another waits for.
        let own = self.loads.owns_this_thread()
            || self.stores.owns_this_thread()
            || self.commits.owns_this_thread();
        if own {
            return self.loads.stop_handing_over();
        }
        self.loads.wait_closed();
        self.stores.wait_closed();
        self.commits.wait_closed();
        self.loads.end_handing_over();
    }
}

impl Drop for BlockingEngine {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    pub(crate) fn new(disk: Arc<dyn Disk>, on_done: OnDone) -> Self {
        Self { disk, on_done, in_flight: AtomicUsize::new(0) }
    }

    pub(crate) fn begin(&self, requests: usize) {
        self.in_flight.fetch_add(requests, Ordering::SeqCst);
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Answers a request that came after the end.
    pub(crate) fn refuse(&self, IoRequest { token, op, .. }: IoRequest) {
        let closed = "the I/O engine is closed";
        let result = Err(io::Error::new(io::ErrorKind::BrokenPipe, closed));
        self.complete(IoDone::new(token, op, result));
    }

    /// Answers a request that nobody wants any more.
    pub(crate) fn drop_cancelled(request: IoRequest) -> std::result::Result<IoRequest, IoDone> {
        if request.is_wanted() {
            return Ok(request);
        }
        let IoRequest { token, op, .. } = request;
        Err(IoDone::new(token, op, Err(io::Error::other(Cancelled))))
    }

    /// Performs a request through the disk's blocking calls, and answers it.
    pub(crate) fn serve(&self, request: IoRequest) {
        self.complete(self.perform(request));
    }

    /// Performs requests that were taken together by one call, or says that this was not to be
    /// had.
    pub(crate) fn join(&self, requests: &mut [IoRequest]) -> bool {
        perform_joined(&*self.disk, requests)
    }

    /// Performs a request, unless that was done.
    pub(crate) fn end(&self, request: IoRequest, done: bool) -> IoDone {
        if !done {
            return self.perform(request);
        }
        IoDone::new(request.token, request.op, Ok(()))
    }

    fn perform(&self, request: IoRequest) -> IoDone {
        let IoRequest { token, mut op, .. } = match Self::drop_cancelled(request) {
            Ok(request) => request,
            Err(done) => return done,
        };
        let result = guarded("the disk", || perform(&*self.disk, &mut op));
        IoDone::new(token, op, result)
    }

    pub(crate) fn complete(&self, done: IoDone) {
        contained(|| (self.on_done)(done));
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What `work` gives, or an error where it panics: that must not lose the buffers and their waiter.
pub(crate) fn guarded<T>(who: &str, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = format!("{who} has panicked: {}", panic_text(&*panic));
        tracing::error!(text);
        Err(io::Error::other(text))
    })
}

fn perform(disk: &dyn Disk, op: &mut IoOp) -> io::Result<()> {
    match op {
        IoOp::Read { file, offset, buf } => disk.read_at(*file, *offset, buf.as_mut_slice()),
        IoOp::Write { file, offset, buf } => disk.write_at(*file, *offset, buf.as_slice()),
        IoOp::Sync { file } => disk.sync(*file),
        IoOp::Create { name, bytes, header, file } => {
            *file = Some(create(disk, name, *bytes, header)?);
            Ok(())
        }
    }
}

fn create(disk: &dyn Disk, name: &str, bytes: u64, header: &AlignedBuf) -> io::Result<FileId> {
    let file = disk.create(name, bytes).map_err(to_io)?;
    let written = disk.write_at(file, 0, header.as_slice()).and_then(|()| disk.sync(file));
    if let Err(err) = written {
        if let Err(err) = disk.remove(name) {
            tracing::error!(name, %err, "a file without header stays");
        }
        return Err(err);
    }
    Ok(file)
}

fn to_io(err: Error) -> io::Error {
    let kind = match err.kind() {
        ErrorKind::NoSpace => io::ErrorKind::StorageFull,
        ErrorKind::Permission => io::ErrorKind::PermissionDenied,
        ErrorKind::NotFound => io::ErrorKind::NotFound,
        ErrorKind::InvalidArgument => io::ErrorKind::InvalidInput,
        ErrorKind::Unsupported => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, err)
}
