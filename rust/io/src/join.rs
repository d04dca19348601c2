//! Requests for neighbouring ranges of a file, joined into one call of the disk.

use std::io::{self, IoSlice, IoSliceMut};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::disk::{Disk, FileId};
use crate::engine::{IoOp, IoRequest};

/// Most bytes of one call: enough that the time between two calls counts for little.
pub(crate) const JOINED_BYTES: u64 = 2 << 20;
/// Most bytes that one call writes where nobody loads: a drive that does one thing after the other
/// is the faster for it, and a load would wait for all of them.
pub(crate) const ALONE_BYTES: u64 = 8 << 20;
/// Most requests of one call; well below what the operating system takes.
const JOINED: usize = 64;

/// A request that waits, and the range of a file that it is about.
pub(crate) struct Queued {
    pub(crate) request: IoRequest,
    range: Option<Range>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Range {
    reads: bool,
    file: FileId,
    begin: u64,
    end: u64,
}

impl From<IoRequest> for Queued {
    fn from(mut request: IoRequest) -> Self {
        // A buffer is foreign code; one that panics does so again, contained, when its turn comes.
        let range = catch_unwind(AssertUnwindSafe(|| range_of(&mut request.op)));
        Self { request, range: range.ok().flatten() }
    }
}

/// The requests of those that were taken together.
pub(crate) fn requests_of(queued: Vec<Queued>) -> Vec<IoRequest> {
    queued.into_iter().map(|queued| queued.request).collect()
}

fn range_of(op: &mut IoOp) -> Option<Range> {
    let (reads, file, begin, len) = match op {
        IoOp::Read { file, offset, buf } => (true, *file, *offset, buf.as_mut_slice().len()),
        IoOp::Write { file, offset, buf } => (false, *file, *offset, buf.as_slice().len()),
        IoOp::Sync { .. } | IoOp::Create { .. } => return None,
    };
    Some(Range { reads, file, begin, end: begin.checked_add(len as u64)? })
}

/// Whether `next` can be part of the call that performs `taken`, where one writes at most so much.
pub(crate) fn joins(taken: &[Queued], next: &Queued, most_written: u64) -> bool {
    let (Some(first), Some(last)) = (taken.first(), taken.last()) else { return false };
    let (Some(begin), Some(before), Some(range)) = (first.range, last.range, next.range) else {
        return false;
    };
    taken.len() < JOINED
        && before.reads == range.reads
        && before.file == range.file
        && before.end == range.begin
        && range.end - begin.begin <= if range.reads { JOINED_BYTES } else { most_written }
        && first.request.priority == next.request.priority
}

/// Performs neighbouring requests by one call. Where this is not to be had, or has failed, nothing
/// is said about any of them, and each is to be performed by itself.
pub(crate) fn perform_joined(disk: &dyn Disk, requests: &mut [IoRequest]) -> bool {
    if requests.len() < 2 || !requests.iter().all(IoRequest::is_wanted) {
        return false;
    }
    let join = || match requests.first().map(|request| &request.op) {
        Some(&IoOp::Read { file, offset, .. }) => read(disk, file, offset, requests),
        Some(&IoOp::Write { file, offset, .. }) => write(disk, file, offset, requests),
        _ => Err(io::ErrorKind::Unsupported.into()),
    };
    catch_unwind(AssertUnwindSafe(join)).is_ok_and(|joined| joined.is_ok())
}

fn read(disk: &dyn Disk, file: FileId, at: u64, requests: &mut [IoRequest]) -> io::Result<()> {
    let mut bufs = Vec::with_capacity(requests.len());
    for request in requests {
        let IoOp::Read { buf, .. } = &mut request.op else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        bufs.push(IoSliceMut::new(buf.as_mut_slice()));
    }
    disk.read_vectored_at(file, at, &mut bufs)
}

fn write(disk: &dyn Disk, file: FileId, at: u64, requests: &mut [IoRequest]) -> io::Result<()> {
    let mut bufs = Vec::with_capacity(requests.len());
    for request in requests.iter() {
        let IoOp::Write { buf, .. } = &request.op else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        bufs.push(IoSlice::new(buf.as_slice()));
    }
    disk.write_vectored_at(file, at, &mut bufs)
}
