//! The loads of the blocking backend: threads that read, and threads that take over what was read.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use tiered_kv_types::Result;

use crate::checksum::copy_checked;
use crate::clock::{Clock, SystemClock, Threads};
use crate::engine::{IoDone, IoOp, IoRequest, Shared, guarded};
use crate::join::{JOINED_BYTES, Queued, joins, requests_of};
use crate::pool::Workers;
use crate::region::ReadInto;
use crate::staging::{STAGED_BYTES, Staged, Staging};
use crate::trial::{Trial, Try, Way};

/// From this many bytes on a load may pass through a buffer, and is handled by another thread where
/// more loads wait: the drive reads the next one while its checksum is computed.
const HANDED_OVER_BYTES: usize = 64 << 10;

/// A load so long ago says nothing of the next one.
const RECENT_NANOS: u64 = 1_000_000_000;
/// Buffers of a drive, however many threads it has: 32 MiB, of which a cache has room for some.
const MOST_BUFFERS: usize = 16;

const _: () =
    assert!(JOINED_BYTES as usize <= STAGED_BYTES, "what one call reads fits in a buffer");

/// Threads that read, those that handle what was read, and what they have in common.
pub(crate) struct Loads {
    readers: Workers<Queued>,
    handlers: Arc<Workers<Read>>,
    /// Loads that no thread has taken yet.
    waiting: Arc<AtomicUsize>,
    recent: Recent,
}

/// When a load was last asked for, or begun.
#[derive(Clone, Default)]
pub(crate) struct Recent(Arc<AtomicU64>);

impl Recent {
    fn now(&self) {
        self.0.store(SystemClock.now().max(1), Ordering::Relaxed);
    }

    /// Whether another load is to be expected.
    pub(crate) fn is(&self) -> bool {
        let last = self.0.load(Ordering::Relaxed);
        last > 0 && SystemClock.now().saturating_sub(last) < RECENT_NANOS
    }
}

impl Loads {
    /// Starts `n` threads that read, and half as many that handle what was read.
    pub(crate) fn new(shared: Arc<Shared>, threads: &dyn Threads, n: usize) -> Result<Self> {
        let (waiting, recent) = (Arc::new(AtomicUsize::new(0)), Recent::default());
        let handler = {
            let shared = Arc::clone(&shared);
            Arc::new(move |read: Read| shared.complete(read.land()))
        };
        let others = n.div_ceil(2);
        let handlers = Arc::new(Workers::new("tkv-done", others, threads, handler)?);
        let reader = Reader {
            shared,
            waiting: Arc::clone(&waiting),
            handlers: Arc::clone(&handlers),
            // One for each thread that reads, and two for each that handles what was read.
            staging: Staging::new((n + 2 * others).min(MOST_BUFFERS)),
            trial: Trial::new(HANDED_OVER_BYTES),
            recent: recent.clone(),
        };
        let read = Arc::new(move |queued| reader.serve(queued));
        let joins = Box::new(|taken: &[_], next: &_| joins(taken, next, JOINED_BYTES));
        let readers = Workers::joining("tkv-load", n, threads, joins, read);
        let readers = readers.inspect_err(|_| handlers.end())?;
        Ok(Self { readers, handlers, waiting, recent })
    }

    /// Queues loads, or returns them where the queue is closed.
    pub(crate) fn submit(
        &self,
        loads: Vec<Queued>,
    ) -> std::result::Result<(), std::vec::IntoIter<Queued>> {
        if !loads.is_empty() {
            self.recent.now();
        }
        self.waiting.fetch_add(loads.len(), Ordering::Relaxed);
        self.readers.submit(loads.into_iter())
    }

    /// When one was last asked for.
    pub(crate) fn recent(&self) -> Recent {
        self.recent.clone()
    }

    pub(crate) fn start_closing(&self) {
        self.readers.start_closing();
    }

    pub(crate) fn wait_closed(&self) {
        self.readers.wait_closed();
    }

    /// What is read from now on is handled by the thread that has read it.
    pub(crate) fn stop_handing_over(&self) {
        self.handlers.start_closing();
    }

    /// Waits for what was handed over; to be called once nothing is read any more.
    pub(crate) fn end_handing_over(&self) {
        self.handlers.end();
    }

    /// Waits for all that is queued, and for the threads.
    pub(crate) fn end(&self) {
        self.readers.end();
        self.handlers.end();
    }

    pub(crate) fn owns_this_thread(&self) -> bool {
        self.readers.owns_this_thread() || self.handlers.owns_this_thread()
    }
}

/// A load that has ended, whose bytes may still be in a buffer.
struct Read {
    done: IoDone,
    staged: Option<Staged>,
}

impl Read {
    /// Bytes that were read, and are therefore to be checked.
    fn bytes(&mut self) -> usize {
        match &mut self.done.op {
            IoOp::Read { buf, .. } if self.done.result.is_ok() => buf.as_mut_slice().len(),
            _ => 0,
        }
    }

    /// Takes the bytes to where they belong.
    fn land(self) -> IoDone {
        let Self { mut done, staged } = self;
        if let (Some(staged), IoOp::Read { buf, .. }) = (staged, &mut done.op) {
            let copy = || Ok(copy_checked(buf.as_mut_slice(), staged.as_slice()));
            match guarded("a copy", copy) {
                Ok(crc) => done.crc = Some(crc),
                Err(err) => done.result = Err(err),
            }
        }
        done
    }
}

struct Reader {
    shared: Arc<Shared>,
    waiting: Arc<AtomicUsize>,
    handlers: Arc<Workers<Read>>,
    staging: Arc<Staging>,
    trial: Trial,
    recent: Recent,
}

impl Reader {
    /// Performs loads that were taken together.
    fn serve(&self, queued: Vec<Queued>) {
        let n = queued.len();
        let more = self.waiting.fetch_sub(n, Ordering::Relaxed) > n;
        let mut requests = requests_of(queued);
        self.recent.now();
        let read = bytes_to_stage(&mut requests).map(|bytes| self.trial.choose(bytes));
        let staged = match read {
            Some(read) if read.way == Way::Staged => self.stage(&mut requests, read),
            _ => Ok(Vec::new()),
        };
        if let (Err(_), true, Some(request)) = (&staged, n == 1, requests.first()) {
            // By itself it would be read the same way once more.
            let (token, op, result) = (request.token, requests.remove(0).op, staged.map(|_| ()));
            return self.shared.complete(IoDone::new(token, op, result));
        }
        let failed = staged.is_err();
        let mut staged = staged.unwrap_or_default().into_iter();
        let begin = Instant::now();
        let joined = staged.len() > 0 || (!failed && self.shared.join(&mut requests));
        let direct = |ended: bool| {
            if let Some(read) = read.filter(|_| ended) {
                self.trial.took(read, Way::Direct, begin.elapsed());
            }
        };
        direct(joined && staged.len() == 0);
        // Of what was read at once this thread handles a half, if nothing more waits.
        let others = if joined { n / 2 } else { n - 1 };
        for (at, request) in requests.into_iter().enumerate() {
            let done = self.shared.end(request, joined);
            direct(n == 1 && !joined && done.result.is_ok());
            let mut read = Read { done, staged: staged.next() };
            let gives = more || at < others;
            if !gives || read.bytes() < HANDED_OVER_BYTES {
                self.shared.complete(read.land());
            } else if let Err(refused) = self.handlers.submit(std::iter::once(read)) {
                refused.for_each(|read| self.shared.complete(read.land()));
            }
        }
    }

    /// Reads neighbouring ranges by one call into a buffer; nothing where none is to be had. An
    /// error says nothing about which of several it is of.
    fn stage(&self, requests: &mut [IoRequest], read: Try) -> io::Result<Vec<Staged>> {
        let first = requests.first().map(|request| &request.op);
        let Some(&IoOp::Read { file, offset, .. }) = first else { return Ok(Vec::new()) };
        let Some(mut lent) = self.staging.take() else { return Ok(Vec::new()) };
        let mut end = 0;
        let range = |request: &mut IoRequest| {
            let begin = end;
            end += read_into(request).map_or(0, |into| into.len());
            begin..end
        };
        let ranges: Vec<Range<usize>> = requests.iter_mut().map(range).collect();
        let begin = Instant::now();
        let into = &mut lent.as_mut_slice()[..end];
        guarded("the disk", || self.shared.disk.read_at(file, offset, into))?;
        self.trial.took(read, Way::Staged, begin.elapsed());
        let lent = Arc::new(lent);
        let part = |range: Range<usize>| Staged { lent: Arc::clone(&lent), range };
        Ok(ranges.into_iter().map(part).collect())
    }
}

/// Bytes that loads which were taken together read; none where they cannot pass through a buffer,
/// or are not of a size for which this is of use.
fn bytes_to_stage(requests: &mut [IoRequest]) -> Option<usize> {
    let wanted = |request: &mut IoRequest| {
        let into = read_into(request).map(|into| into.len());
        into.filter(|_| request.is_wanted())
    };
    let bytes = requests.iter_mut().map(wanted).sum::<Option<usize>>()?;
    (HANDED_OVER_BYTES..=STAGED_BYTES).contains(&bytes).then_some(bytes)
}

/// Where the bytes of a load belong. What is read into pages of its own is copied already.
fn read_into(request: &mut IoRequest) -> Option<&mut [u8]> {
    match &mut request.op {
        IoOp::Read { buf: ReadInto::Bounce(_), .. } => None,
        IoOp::Read { buf, .. } => Some(buf.as_mut_slice()),
        _ => None,
    }
}
