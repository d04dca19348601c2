//! A device and callers' memory that go on one step at a time, so that a test stops a call at any
//! place where it can wait.

use super::{BLOCK, BlockKey, bytes_of};
use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiered_kv::Result;
use tiered_kv::io_seams::{Alignment, Disk, FileId, MemDisk};

/// Around a caller's memory, and in a slot that was not asked for.
pub const CANARY: u8 = 0xa5;
/// What the caller writes into its memory as soon as it has it back.
pub const REUSED: u8 = 0x3c;
const PAGE: usize = 4096;

/// Counts down the steps that the core's threads may take.
pub struct Steps {
    /// Steps left, and threads that wait for one.
    state: Mutex<(u64, usize)>,
    changed: Condvar,
}

impl Steps {
    pub fn unlimited() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new((u64::MAX, 0)), changed: Condvar::new() })
    }

    /// So many more steps.
    pub fn allow(&self, steps: u64) {
        self.state.lock().0 = steps;
        self.changed.notify_all();
    }

    pub fn open(&self) {
        self.allow(u64::MAX);
    }

    /// Whether a thread waits for a step that is not allowed.
    pub fn is_stuck(&self) -> bool {
        let state = self.state.lock();
        state.0 == 0 && state.1 > 0
    }

    fn pass(&self) {
        // The test's own thread sees to lengths and inline copies, and must not wait for itself.
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with("tkv-")) {
            return;
        }
        let mut state = self.state.lock();
        state.1 += 1;
        // Not for ever: a test that fails closes its store behind it.
        let until = Instant::now() + Duration::from_secs(30);
        while state.0 == 0 && !self.changed.wait_until(&mut state, until).timed_out() {}
        state.1 -= 1;
        state.0 = state.0.saturating_sub(1);
    }
}

/// A disk in memory, each of whose operations on data is a step.
pub struct SteppedDisk {
    pub inner: MemDisk,
    pub steps: Arc<Steps>,
}

impl Disk for SteppedDisk {
    fn name(&self) -> &'static str {
        "stepped"
    }
    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }
    fn is_direct(&self) -> bool {
        true
    }
    fn direct_reason(&self) -> String {
        String::new()
    }
    fn list(&self) -> Result<Vec<(String, u64)>> {
        self.inner.list()
    }
    fn read_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        self.inner.read_file(name, max_bytes)
    }
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.inner.write_file(name, bytes)
    }
    fn remove(&self, name: &str) -> Result<()> {
        self.inner.remove(name)
    }
    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        self.inner.create(name, bytes)
    }
    fn open(&self, name: &str) -> Result<(FileId, u64)> {
        self.inner.open(name)
    }
    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.steps.pass();
        // In two halves, as a device does that is in the midst of a transfer.
        let half = buf.len() / 2 / PAGE * PAGE;
        let (first, second) = buf.split_at_mut(half);
        if !first.is_empty() {
            self.inner.read_at(file, offset, first)?;
            self.steps.pass();
        }
        self.inner.read_at(file, offset + half as u64, second)
    }
    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.steps.pass();
        self.inner.write_at(file, offset, buf)
    }
    fn sync(&self, file: FileId) -> io::Result<()> {
        self.steps.pass();
        self.inner.sync(file)
    }
}

/// Where buffers go that the caller has back.
pub type Pen = Arc<Mutex<Vec<Vec<u8>>>>;

/// A caller's buffer between two canaries. Dropping it is the moment at which the caller has its
/// memory back: it is written anew at once, and kept to see whether anybody else still writes.
pub struct Lent {
    bytes: Vec<u8>,
    pen: Pen,
    steps: Arc<Steps>,
}

impl Lent {
    pub fn new(content: &[u8], pen: &Pen, steps: &Arc<Steps>) -> Self {
        let mut bytes = vec![CANARY; BLOCK + 2 * PAGE];
        bytes[PAGE..PAGE + BLOCK].copy_from_slice(content);
        Self { bytes, pen: pen.clone(), steps: steps.clone() }
    }

    /// Blocks of a put, one a key.
    pub fn full(keys: &[BlockKey], pen: &Pen, steps: &Arc<Steps>) -> Vec<Self> {
        keys.iter().map(|key| Self::new(&bytes_of(key), pen, steps)).collect()
    }

    /// Buffers to be filled.
    pub fn empty(n: usize, pen: &Pen, steps: &Arc<Steps>) -> Vec<Self> {
        (0..n).map(|_| Self::new(&[CANARY; BLOCK], pen, steps)).collect()
    }

    pub fn content(&self) -> &[u8] {
        &self.bytes[PAGE..PAGE + BLOCK]
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.steps.pass();
        self.content()
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        self.steps.pass();
        &mut self.bytes[PAGE..PAGE + BLOCK]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.bytes[PAGE..PAGE + BLOCK].fill(REUSED);
        self.pen.lock().push(std::mem::take(&mut self.bytes));
    }
}

/// Checks that `n` buffers came back and hold what the caller wrote then, canaries included.
pub fn assert_pen(pen: &Pen, n: usize, what: &str) {
    let pen = pen.lock();
    assert_eq!(pen.len(), n, "{what}: every buffer comes back once");
    for bytes in pen.iter() {
        let is = |range: &[u8], byte: u8| range.iter().all(|b| *b == byte);
        assert!(is(&bytes[..PAGE], CANARY), "{what}: written in front of a buffer");
        assert!(is(&bytes[PAGE + BLOCK..], CANARY), "{what}: written behind a buffer");
        assert!(is(&bytes[PAGE..PAGE + BLOCK], REUSED), "{what}: written after it was given back");
    }
}
