//! The loads of the blocking backend: threads that read, and threads that take over what was read.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tiered_kv_types::Result;

use crate::cancel::CancelFlag;
use crate::checksum::copy_checked;
use crate::clock::Threads;
use crate::engine::{IoDone, IoOp, IoRequest, Shared};
use crate::join::{Queued, joins};
use crate::pool::Workers;
use crate::staging::{Lent, STAGED_BYTES, Staged, Staging};
use crate::trial::{Trial, Way};

/// From this many bytes on a load may pass through a buffer, and is handled by another thread where
/// more loads wait: the drive reads the next one while its checksum is computed.
const HANDED_OVER_BYTES: usize = 64 << 10;

/// Threads that read, those that handle what was read, and what they have in common.
pub(crate) struct Loads {
    readers: Workers<Queued>,
    handlers: Arc<Workers<Read>>,
    /// Loads that no thread has taken yet.
    waiting: Arc<AtomicUsize>,
}

impl Loads {
    /// Starts `n` threads that read, and half as many that handle what was read.
    pub(crate) fn new(shared: Arc<Shared>, threads: &dyn Threads, n: usize) -> Result<Self> {
        let waiting = Arc::new(AtomicUsize::new(0));
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
            // One for each thread, and one more for each pair of them: to go on with.
            staging: Staging::new(n + 2 * others),
            trial: Trial::new(HANDED_OVER_BYTES),
        };
        let read = Arc::new(move |queued| reader.serve(queued));
        let readers = Workers::joining("tkv-load", n, threads, joins, read);
        let readers = readers.inspect_err(|_| handlers.end())?;
        Ok(Self { readers, handlers, waiting })
    }

    /// Queues loads, or returns them where the queue is closed.
    pub(crate) fn submit(
        &self,
        loads: Vec<Queued>,
    ) -> std::result::Result<(), std::vec::IntoIter<Queued>> {
        self.waiting.fetch_add(loads.len(), Ordering::Relaxed);
        self.readers.submit(loads.into_iter())
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
            done.crc = Some(copy_checked(buf.as_mut_slice(), staged.as_slice()));
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
}

impl Reader {
    /// Performs loads that were taken together.
    fn serve(&self, queued: Vec<Queued>) {
        let n = queued.len();
        let more = self.waiting.fetch_sub(n, Ordering::Relaxed) > n;
        let mut requests: Vec<IoRequest> = queued.into_iter().map(|q| q.request).collect();
        let ranges = ranges(&mut requests);
        let bytes = ranges.last().map_or(0, |range| range.end);
        let large = (HANDED_OVER_BYTES..=STAGED_BYTES).contains(&bytes);
        let way = if large { self.trial.choose(bytes) } else { Way::Direct };
        // A buffer that is made now, for the first time, takes longer than the read.
        let lent = if way == Way::Staged { self.staging.take() } else { None };
        let begin = Instant::now();
        let took = |way| {
            if large {
                self.trial.took(way, bytes, begin.elapsed())
            }
        };
        let mut staged = Vec::new();
        if let Some(lent) = lent {
            staged = self.stage(lent, &requests, ranges).unwrap_or_default();
        }
        let joined = !staged.is_empty() || self.shared.join(&mut requests);
        if joined {
            took(if staged.is_empty() { Way::Direct } else { Way::Staged });
        }
        let mut staged = staged.into_iter();
        // Of what was read at once this thread handles a half, if nothing more waits.
        let others = if joined { n / 2 } else { n - 1 };
        for (at, request) in requests.into_iter().enumerate() {
            let done = self.shared.end(request, joined);
            if n == 1 && !joined && done.result.is_ok() {
                took(Way::Direct);
            }
            let mut read = Read { done, staged: staged.next() };
            let gives = more || at < others;
            if !gives || read.bytes() < HANDED_OVER_BYTES {
                self.shared.complete(read.land());
            } else if let Err(refused) = self.handlers.submit(std::iter::once(read)) {
                refused.for_each(|read| self.shared.complete(read.land()));
            }
        }
    }

    /// Reads neighbouring ranges by one call into a buffer. Where this is not to be had, or has
    /// failed, nothing is said about any of them.
    fn stage(
        &self,
        mut lent: Lent,
        requests: &[IoRequest],
        ranges: Vec<Range<usize>>,
    ) -> Option<Vec<Staged>> {
        let bytes = ranges.last()?.end;
        let &IoOp::Read { file, offset, .. } = &requests.first()?.op else { return None };
        let read = || self.shared.disk.read_at(file, offset, &mut lent.as_mut_slice()[..bytes]);
        // A disk that panics does so again, contained, when each is read by itself.
        catch_unwind(AssertUnwindSafe(read)).ok()?.ok()?;
        let lent = Arc::new(lent);
        Some(ranges.into_iter().map(|range| Staged { lent: Arc::clone(&lent), range }).collect())
    }
}

/// What each request has of the bytes that all of them read; none where one of them is not wanted
/// any more.
fn ranges(requests: &mut [IoRequest]) -> Vec<Range<usize>> {
    let mut ranges = Vec::with_capacity(requests.len());
    let mut end = 0;
    for request in requests {
        let wanted = !request.cancel.as_ref().is_some_and(CancelFlag::is_set);
        let IoOp::Read { buf, .. } = &mut request.op else { return Vec::new() };
        if !wanted {
            return Vec::new();
        }
        let begin = end;
        end += buf.as_mut_slice().len();
        ranges.push(begin..end);
    }
    ranges
}
