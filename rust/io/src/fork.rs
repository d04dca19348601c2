//! Noticing that this process is a forked child of the one that opened something.
//!
//! A child has the parent's memory but none of its threads, and shares the arena and the
//! directory's lock with it. What was opened before the fork must neither be used nor be given back
//! there.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

/// Forks between the first process and this one, since the first origin was noted.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// Whether threads were running in a parent when it forked.
static FORKED_RUNNING: AtomicBool = AtomicBool::new(false);
static REGISTERED: Once = Once::new();
/// Owners of threads that run in this process.
static RUNNING: AtomicU32 = AtomicU32::new(0);
const NONE: RawFd = -1;
/// Descriptors that a forked child closes; more than these it keeps until it ends.
static CLOSED_IN_CHILD: [AtomicI32; 256] = [const { AtomicI32::new(NONE) }; 256];

/// The process in which something was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u32);

impl Origin {
    /// This process.
    pub fn here() -> Self {
        REGISTERED.call_once(|| {
            // SAFETY: the handler only uses atomics and `close`, which a forked child may do. It is
            // never unloaded: Rust libraries are not, and Python keeps its extensions.
            let refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if refused != 0 {
                tracing::warn!(refused, "forks go unnoticed: do not use a store in a child");
            }
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this process is another: a child, forked since.
    pub fn is_forked(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}

/// A descriptor that a forked child closes as soon as it begins: what its peer or the kernel takes
/// for the owner's presence (a lock, a connection) must not outlive the owner in a child.
///
/// In a child it must not be used: its number may be another file's there.
#[derive(Debug)]
pub(crate) struct ParentOnly<F: AsRawFd> {
    inner: ManuallyDrop<F>,
    origin: Origin,
}

impl<F: AsRawFd> ParentOnly<F> {
    pub(crate) fn new(inner: F) -> Self {
        let origin = Origin::here();
        close_in_child(inner.as_raw_fd());
        Self { inner: ManuallyDrop::new(inner), origin }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }
}

impl<F: AsRawFd> std::ops::Deref for ParentOnly<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.inner
    }
}

impl<F: AsRawFd> Drop for ParentOnly<F> {
    fn drop(&mut self) {
        if self.is_forked() {
            // Closed when the child began; the number may be another file's by now.
            return;
        }
        keep_in_child(self.inner.as_raw_fd());
        // SAFETY: `inner` is not used after this.
        unsafe { ManuallyDrop::drop(&mut self.inner) };
    }
}

/// Something with threads that use locks. The locks' bookkeeping is one for the whole process
/// (parking_lot's table of waiting threads), so that a child forked meanwhile can never use it.
#[derive(Debug)]
pub struct Running {
    ended: AtomicBool,
}

impl Running {
    /// Marks threads as running until [`Running::end`].
    pub fn begin() -> Self {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        Self { ended: AtomicBool::new(false) }
    }

    /// The threads wait for nothing any more. A second end does nothing.
    pub fn end(&self) {
        if !self.ended.swap(true, Ordering::SeqCst) {
            RUNNING.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether this process was forked from one while such threads were running in it.
    pub fn in_parent() -> bool {
        FORKED_RUNNING.load(Ordering::SeqCst)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    if RUNNING.load(Ordering::SeqCst) > 0 {
        FORKED_RUNNING.store(true, Ordering::SeqCst);
    }
    for slot in &CLOSED_IN_CHILD {
        let fd = slot.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: its owner keeps it open until it has taken it off the list, and forgets it in
            // a child.
            unsafe { libc::close(fd) };
        }
    }
}

/// Has a forked child close `fd`, until [`keep_in_child`] is called.
fn close_in_child(fd: RawFd) {
    let take = |slot: &&AtomicI32| {
        slot.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    if CLOSED_IN_CHILD.iter().find(take).is_none() {
        tracing::debug!("too many descriptors: a forked child keeps this one");
    }
}

/// Takes `fd` off the list; call it before `fd` is closed.
fn keep_in_child(fd: RawFd) {
    let give = |slot: &&AtomicI32| {
        slot.compare_exchange(fd, NONE, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    let _ = CLOSED_IN_CHILD.iter().find(give);
}
