//! What other threads hand to the ring's thread, and how they wake it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::engine::{IoRequest, Registration};
use crate::region::Region;

/// Requests on their way to the ring's thread.
///
/// It has no bound of its own: the callers' budgets bound what is under way, as they do for the
/// blocking engine, and a full inbox could only block or refuse them.
pub(super) struct Inbox {
    /// Guards what is handed over, and whether the thread must be woken to see it.
    state: Mutex<State>,
    /// Readable when the thread is to look into the inbox; the ring polls it.
    wake: OwnedFd,
}

/// A region that the ring is to know, or to forget.
pub(super) enum RegionChange {
    /// Whoever asked is told what became of it.
    Register(Arc<Region>, Sender<Registration>),
    /// It is gone; its number.
    Forget(u64),
}

#[derive(Default)]
struct State {
    requests: Vec<IoRequest>,
    sweeps: Vec<Sender<()>>,
    regions: Vec<RegionChange>,
    /// The thread has looked, and will not look again by itself before something completes.
    must_wake: bool,
    closing: bool,
    /// The ring is gone: nobody looks any more.
    ended: bool,
}

/// What the ring's thread found.
pub(super) struct Taken {
    pub(super) requests: Vec<IoRequest>,
    /// Each is to be told once removed files are out of the ring's table.
    pub(super) sweeps: Vec<Sender<()>>,
    /// Regions to be registered or forgotten, before the requests are begun.
    pub(super) regions: Vec<RegionChange>,
    /// No more requests come after these.
    pub(super) closing: bool,
}

impl Inbox {
    pub(super) fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Mutex::default(), wake })
    }

    /// Hands requests over, or returns them where the inbox is closed.
    pub(super) fn submit(&self, batch: Vec<IoRequest>) -> Result<(), Vec<IoRequest>> {
        self.with_wake(|state| {
            if state.closing {
                return Err(batch);
            }
            if state.requests.is_empty() {
                state.requests = batch;
            } else {
                state.requests.extend(batch);
            }
            Ok(())
        })
    }

    /// Takes no more requests.
    pub(super) fn close(&self) {
        self.with_wake(|state| state.closing = true);
    }

    /// Waits until the ring's table holds no file that the disk has removed.
    pub(super) fn forget_removed_files(&self) {
        let (told, swept) = channel();
        self.with_wake(|state| {
            if !state.ended {
                state.sweeps.push(told);
            }
        });
        // An error means that the ring is gone, and its table with it.
        let _ = swept.recv();
    }

    /// Waits until the ring's table has a region, or cannot have it.
    pub(super) fn register(&self, region: &Arc<Region>) -> Registration {
        let (told, registered) = channel();
        self.with_wake(|state| {
            if !state.ended {
                state.regions.push(RegionChange::Register(Arc::clone(region), told));
            }
        });
        // An error means that the ring is gone: nothing will be read through it.
        registered.recv().unwrap_or(Registration::Refused("the io_uring has ended".into()))
    }

    /// Takes a region that is gone out of the ring's table, some time soon.
    pub(super) fn forget_region(&self, number: u64) {
        self.with_wake(|state| {
            if !state.ended {
                state.regions.push(RegionChange::Forget(number));
            }
        });
    }

    /// Takes everything. Whoever hands something over afterwards wakes the thread.
    pub(super) fn take(&self) -> Taken {
        let mut state = self.state.lock();
        state.must_wake = true;
        let requests = std::mem::take(&mut state.requests);
        let sweeps = std::mem::take(&mut state.sweeps);
        let regions = std::mem::take(&mut state.regions);
        Taken { requests, sweeps, regions, closing: state.closing }
    }

    /// Ends the inbox and takes what is left.
    pub(super) fn end(&self) -> Vec<IoRequest> {
        let mut state = self.state.lock();
        state.closing = true;
        state.ended = true;
        state.sweeps.clear();
        let regions = std::mem::take(&mut state.regions);
        let requests = std::mem::take(&mut state.requests);
        drop(state);
        // The last handle of a region, whose end would come back here.
        drop(regions);
        requests
    }

    /// The descriptor to poll.
    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes the descriptor unreadable again.
    pub(super) fn clear_wake(&self) {
        // It may have been cleared already, which is as good.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn with_wake<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state);
        let must_wake = std::mem::take(&mut state.must_wake);
        drop(state);
        if must_wake {
            // Fails only where the counter is full, and then the descriptor is readable.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
        result
    }
}
