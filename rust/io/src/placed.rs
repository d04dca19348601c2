//! Threads that run on some processors only.

use crate::clock::Threads;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::Arc;
use std::thread::JoinHandle;
use tiered_kv_types::{CpuList, Error, ErrorKind, Result};

/// Threads that run on some processors, whatever the thread that starts them is bound to.
pub struct PlacedThreads {
    inner: Arc<dyn Threads>,
    cpus: CpuSet,
}

impl PlacedThreads {
    /// Has the threads of `inner` run on those of `cpus` that there are.
    pub fn new(inner: Arc<dyn Threads>, cpus: &CpuList) -> Self {
        Self { inner, cpus: set_of(cpus) }
    }
}

fn set_of(cpus: &CpuList) -> CpuSet {
    let mut set = CpuSet::new();
    for number in cpus.numbers() {
        set.set(usize::from(*number));
    }
    set
}

/// Runs `body` on those of `cpus` that there are, in a thread that ends with it.
///
/// # Errors
/// `Config`, naming the field, where the process may run on none of them; `Io` where the operating
/// system refuses for another reason. `body` has then not run.
pub fn on_processors<R: Send>(cpus: &CpuList, body: impl FnOnce() -> R + Send) -> Result<R> {
    let place = || {
        // Which of them a process may use, only the kernel knows: it may be bound to fewer.
        sched_setaffinity(None, &set_of(cpus)).map_err(|err| match err {
            Errno::INVAL => {
                let context = format!(
                    "`cpus` is {cpus}, and this process may run on none of them: give some of \
                     those that the machine has and the container's cpuset allows, or leave it out"
                );
                Error::new(ErrorKind::Config, "open", context)
            }
            _ => Error::from_io("open", format!("`cpus` {cpus} cannot be had"), err.into()),
        })
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("tkv-open".into());
        let thread = thread.spawn_scoped(scope, || place().map(|()| body()));
        let context = "thread tkv-open did not start: raise the limit of processes (ulimit -u)";
        let thread = thread.map_err(|err| Error::from_io("start thread", context, err))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Threads for PlacedThreads {
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> Result<JoinHandle<()>> {
        let cpus = self.cpus;
        let body = move || {
            if let Err(err) = sched_setaffinity(None, &cpus) {
                tracing::warn!(%err, "a thread stays on the processors of the one that made it");
            }
            body();
        };
        self.inner.spawn(name, Box::new(body))
    }
}
