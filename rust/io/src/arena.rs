//! Arenas of shared memory, and the slots cut out of them.
//!
//! An extent is mapped twice. A [`SlotMut`] writes through the writable mapping; frozen into a
//! [`Slot`] it is read through the read-only one, so that whoever is served cannot change what
//! others get: a write through such an address traps. A page belongs to at most one slot, of either
//! kind, at a time.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Instant;

use parking_lot::Mutex;
use tiered_kv_types::{Error, ErrorKind, Result};

use crate::PAGE_BYTES;
use crate::bitmap::PageBitmap;
use crate::mapping::{Extent, HUGE_BYTES};
use crate::memory::available_memory_bytes;

const OP: &str = "open arena";
/// The piece in which memory is populated and collapsed; a multiple of a huge page.
const PIECE_BYTES: usize = 64 << 20;

/// How an arena is made.
#[derive(Clone, Debug)]
pub struct ArenaConfig {
    /// All bytes of the arena, a multiple of a page; zero makes an arena without memory.
    pub capacity_bytes: u64,
    /// Bytes of an extent, a multiple of a page; no slot crosses the end of one.
    pub extent_bytes: u64,
    /// Whether all memory is had at once, so that its lack is an error now and no signal later.
    pub populate: bool,
    /// Whether huge pages are asked for; needs `populate`.
    pub huge_pages: bool,
    /// The field of the configuration that gives the capacity, for errors.
    pub field: &'static str,
}

impl ArenaConfig {
    /// The usual extent, in bytes: the kernel registers a buffer of at most 1 GiB.
    pub const EXTENT_BYTES: u64 = 1 << 30;

    /// An arena of `capacity_bytes` as production wants it: populated, huge pages.
    pub fn new(capacity_bytes: u64) -> Self {
        let extent_bytes = Self::EXTENT_BYTES;
        let field = "dram_capacity";
        Self { capacity_bytes, extent_bytes, populate: true, huge_pages: true, field }
    }
}

/// What opening an arena has cost and brought.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ArenaReport {
    /// Seconds to populate all memory.
    pub populate_s: f64,
    /// Seconds to ask for huge pages.
    pub collapse_s: f64,
    /// Bytes that the kernel has put on huge pages.
    pub huge_bytes: u64,
}

/// The addresses of one extent's two mappings, and its length in bytes.
pub(crate) struct MappedExtent {
    pub(crate) writable: usize,
    pub(crate) readable: usize,
    pub(crate) len: usize,
}

/// Shared memory in extents, of which slots are taken.
pub struct Arena {
    extents: Vec<Extent>,
    capacity_bytes: u64,
    extent_bytes: u64,
    pages: PageBitmap,
    report: ArenaReport,
}

impl Arena {
    /// Maps, populates and collapses the memory.
    ///
    /// # Errors
    /// `Config` for a capacity or an extent that is no multiple of a page, `NoSpace` where the
    /// memory cannot be had; each names its field.
    pub fn new(cfg: ArenaConfig) -> Result<Arc<Self>> {
        check_config(&cfg)?;
        let mut extents = Vec::new();
        let mut left = cfg.capacity_bytes;
        while left > 0 {
            let len = left.min(cfg.extent_bytes);
            extents.push(Extent::new(len as usize).map_err(|err| no_memory(&cfg, err))?);
            left -= len;
        }
        let mut report = ArenaReport::default();
        if cfg.populate {
            let start = Instant::now();
            in_parallel(&extents, |extent, at, len| extent.populate(at, len))
                .map_err(|err| no_memory(&cfg, err))?;
            report.populate_s = start.elapsed().as_secs_f64();
        }
        if cfg.populate && cfg.huge_pages {
            let start = Instant::now();
            report.huge_bytes = collapse(&extents);
            report.collapse_s = start.elapsed().as_secs_f64();
        }
        if cfg.populate {
            extents.iter().for_each(|extent| extent.map_readable(0, extent.len()));
        }
        let pages = PageBitmap::new(cfg.capacity_bytes / PAGE_BYTES);
        let ArenaConfig { capacity_bytes, extent_bytes, .. } = cfg;
        Ok(Arc::new(Self { extents, capacity_bytes, extent_bytes, pages, report }))
    }

    /// All bytes of the arena.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes of an extent; the last one may be shorter.
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// Bytes that belong to slots now.
    pub fn taken_bytes(&self) -> u64 {
        self.pages.taken_pages() * PAGE_BYTES
    }

    /// What opening has cost and brought.
    pub fn report(&self) -> ArenaReport {
        self.report
    }

    /// Takes the pages at `offset` for writing. Their bytes are whatever was there before.
    ///
    /// `None` where the range is empty, off the page grid, outside of the arena, across the end of
    /// an extent, or where any page belongs to another slot (also while another thread tries to
    /// take it).
    pub fn take(self: &Arc<Self>, offset: u64, len: u64) -> Option<SlotMut> {
        let on_grid = offset.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(PAGE_BYTES);
        let end = offset.checked_add(len)?;
        if !on_grid || len == 0 || end > self.capacity_bytes {
            return None;
        }
        if offset / self.extent_bytes != (end - 1) / self.extent_bytes {
            return None;
        }
        if !self.pages.try_take(offset / PAGE_BYTES, len / PAGE_BYTES) {
            return None;
        }
        Some(SlotMut { pages: OwnedPages { arena: Arc::clone(self), offset, len: len as usize } })
    }

    /// Where the extents are mapped, for whoever tells the kernel of them.
    pub(crate) fn mapped(&self) -> Vec<MappedExtent> {
        let mapped = |extent: &Extent| MappedExtent {
            writable: extent.writable().as_ptr() as usize,
            readable: extent.readable().as_ptr() as usize,
            len: extent.len(),
        };
        self.extents.iter().map(mapped).collect()
    }

    /// The extent that holds `offset`, and where in it.
    fn locate(&self, offset: u64) -> (&Extent, usize) {
        let extent = &self.extents[(offset / self.extent_bytes) as usize];
        (extent, (offset % self.extent_bytes) as usize)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("capacity_bytes", &self.capacity_bytes)
            .field("taken_bytes", &self.taken_bytes())
            .finish_non_exhaustive()
    }
}

fn check_config(cfg: &ArenaConfig) -> Result<()> {
    let fields = [(cfg.field, cfg.capacity_bytes), ("extent_bytes", cfg.extent_bytes.max(1))];
    for (field, bytes) in fields {
        if !bytes.is_multiple_of(PAGE_BYTES) || usize::try_from(bytes).is_err() {
            let context = format!("{field} = {bytes}: give a multiple of {PAGE_BYTES} bytes");
            return Err(Error::new(ErrorKind::Config, OP, context));
        }
    }
    // The kernel would answer a lack of memory by killing somebody, so ask before.
    match available_memory_bytes() {
        Some(have) if cfg.populate && have < cfg.capacity_bytes => {
            let (field, want) = (cfg.field, cfg.capacity_bytes);
            let context = format!(
                "{field} = {want} bytes but {have} are available: lower {field} or free memory"
            );
            Err(Error::new(ErrorKind::NoSpace, OP, context))
        }
        _ => Ok(()),
    }
}

fn no_memory(cfg: &ArenaConfig, err: io::Error) -> Error {
    let (field, want) = (cfg.field, cfg.capacity_bytes);
    let context = format!(
        "{field} = {want} bytes cannot be had: lower {field}, free memory or raise the limit of \
         the control group"
    );
    Error::new(ErrorKind::NoSpace, OP, context).with_source(err)
}

/// Runs `work(extent, offset, len)` over all memory, piece by piece, and returns the first error.
fn in_parallel(
    extents: &[Extent],
    work: impl Fn(&Extent, usize, usize) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let pieces: Vec<(&Extent, usize)> = extents
        .iter()
        .flat_map(|extent| (0..extent.len()).step_by(PIECE_BYTES).map(move |at| (extent, at)))
        .collect();
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let run = || {
        while let Some(&(extent, at)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(err) = work(extent, at, PIECE_BYTES.min(extent.len() - at)) {
                failure.lock().get_or_insert(err);
                next.store(pieces.len(), Ordering::Relaxed);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let helpers = cores.min(pieces.len()).saturating_sub(1);
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // Without another thread this one does the work.
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Asks for huge pages and returns how many bytes got some. A refusal costs speed, nothing else.
fn collapse(extents: &[Extent]) -> u64 {
    let huge = AtomicU64::new(0);
    let result = in_parallel(extents, |extent, at, len| {
        let len = len / HUGE_BYTES * HUGE_BYTES;
        if len == 0 {
            return Ok(());
        }
        match extent.collapse(at, len) {
            Ok(()) => {
                huge.fetch_add(len as u64, Ordering::Relaxed);
                Ok(())
            }
            // Not known to this kernel: no piece will fare better.
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) => Err(err),
            Err(_) => Ok(()),
        }
    });
    if let Err(err) = result {
        tracing::debug!(%err, "no huge pages for the arena");
    }
    huge.into_inner()
}

/// Pages that belong to one slot; dropping it gives them back.
struct OwnedPages {
    arena: Arc<Arena>,
    offset: u64,
    len: usize,
}

impl OwnedPages {
    fn readable(&self) -> *const u8 {
        let (extent, at) = self.arena.locate(self.offset);
        // SAFETY: `take` has checked that the range lies in this extent.
        unsafe { extent.readable().as_ptr().add(at) }
    }

    fn writable(&self) -> *mut u8 {
        let (extent, at) = self.arena.locate(self.offset);
        // SAFETY: `take` has checked that the range lies in this extent.
        unsafe { extent.writable().as_ptr().add(at) }
    }
}

impl Drop for OwnedPages {
    fn drop(&mut self) {
        self.arena.pages.release(self.offset / PAGE_BYTES, self.len as u64 / PAGE_BYTES);
    }
}

/// Pages of an arena that only their owner sees, to be filled and then frozen.
pub struct SlotMut {
    pages: OwnedPages,
}

impl SlotMut {
    /// Where in the arena the slot begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.pages.offset
    }

    /// Bytes of the slot.
    #[expect(clippy::len_without_is_empty, reason = "no slot is empty")]
    pub fn len(&self) -> usize {
        self.pages.len
    }

    /// The bytes as they are.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is mapped and initialised (a memfd starts as zeros); its pages belong
        // to this slot alone, which is borrowed, so nobody writes them meanwhile.
        unsafe { std::slice::from_raw_parts(self.pages.writable(), self.pages.len) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.pages.writable(), self.pages.len) }
    }

    /// Ends writing: from here on the bytes are read through the read-only mapping.
    pub fn freeze(self) -> Slot {
        // The compiler does not know that two addresses are one memory: no write moves past this.
        fence(Ordering::SeqCst);
        Slot { pages: self.pages }
    }
}

impl fmt::Debug for SlotMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_pages(f, "SlotMut", &self.pages)
    }
}

/// Pages of an arena that never change again until it is dropped.
pub struct Slot {
    pages: OwnedPages,
}

impl Slot {
    /// Where in the arena the slot begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.pages.offset
    }

    /// Bytes of the slot.
    #[expect(clippy::len_without_is_empty, reason = "no slot is empty")]
    pub fn len(&self) -> usize {
        self.pages.len
    }

    /// The bytes, at an address through which no write is possible: it would trap.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is mapped and initialised; its pages belong to this slot alone, and no
        // writable view of them exists or can come to be while it lives.
        unsafe { std::slice::from_raw_parts(self.pages.readable(), self.pages.len) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_pages(f, "Slot", &self.pages)
    }
}

fn debug_pages(f: &mut fmt::Formatter<'_>, name: &str, pages: &OwnedPages) -> fmt::Result {
    f.debug_struct(name).field("offset", &pages.offset).field("len", &pages.len).finish()
}
