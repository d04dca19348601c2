//! Threads that run on some processors only.

use crate::clock::Threads;
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
    /// Has the threads of `inner` run on `cpus`.
    ///
    /// # Errors
    /// `Config`, naming the field, where the machine or its container has none of them.
    pub fn new(inner: Arc<dyn Threads>, cpus: &CpuList) -> Result<Self> {
        let mut set = CpuSet::new();
        for number in cpus.numbers() {
            set.set(usize::from(*number));
        }
        // What a process may use, only the kernel knows: what it is bound to may be less.
        let tried = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("tkv-open".into());
            let thread = thread.spawn_scoped(scope, || sched_setaffinity(None, &set));
            thread.map(|thread| thread.join().expect("a system call does not panic"))
        });
        match tried {
            Ok(Ok(())) => Ok(Self { inner, cpus: set }),
            Ok(Err(_)) => {
                let context = format!(
                    "`cpus` is {cpus}, and this process may run on none of them: give some of \
                     those that `nproc` and the container's cpuset allow, or leave it out"
                );
                Err(Error::new(ErrorKind::Config, "open", context))
            }
            Err(err) => Err(Error::from_io("start thread", "thread tkv-open did not start", err)),
        }
    }
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
