//! What comes in from outside: clock, randomness, threads and files.

use std::path::Path;
use std::sync::Arc;
use tiered_kv_io::{
    Clock, Disk, Entropy, OsEntropy, OsThreads, PlacedThreads, PosixDisk, SystemClock, Threads,
};
use tiered_kv_types::{CpuList, Result};

/// Opens the files of one store directory.
pub type OpenDisk = Arc<dyn Fn(&Path) -> Result<Arc<dyn Disk>> + Send + Sync>;

/// Everything that a store takes from its surroundings; a simulation brings its own.
#[derive(Clone)]
pub struct Seams {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Randomness: the store's identity and the seed of its hash tables.
    pub entropy: Arc<dyn Entropy>,
    /// Threads.
    pub threads: Arc<dyn Threads>,
    /// Files.
    pub open_disk: OpenDisk,
    /// Take the directory's lock. A simulation has no directory.
    pub lock_directory: bool,
}

impl Default for Seams {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            entropy: Arc::new(OsEntropy),
            threads: Arc::new(OsThreads),
            open_disk: Arc::new(|dir| Ok(Arc::new(PosixDisk::open(dir)?) as Arc<dyn Disk>)),
            lock_directory: true,
        }
    }
}

impl Seams {
    /// The same, with threads that run on the processors that a configuration names.
    pub(crate) fn placed(&self, cpus: &CpuList) -> Self {
        let threads = Arc::new(PlacedThreads::new(self.threads.clone(), cpus));
        Self { threads, ..self.clone() }
    }
}

impl std::fmt::Debug for Seams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seams")
            .field("lock_directory", &self.lock_directory)
            .finish_non_exhaustive()
    }
}
