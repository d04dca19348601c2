//! One memfd, mapped twice: writable for the core, read-only for those who are served.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The size of a huge page, to which mappings are aligned so that they can have some.
pub(crate) const HUGE_BYTES: usize = 2 << 20;

/// A sealed memfd and its two mappings. Hands out addresses; who may use them is the arena's
/// affair.
pub(crate) struct Extent {
    memfd: OwnedFd,
    writable: Mapping,
    readable: Mapping,
}

impl Extent {
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("tiered-kv", flags)?;
        rustix::fs::fchmod(&memfd, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&memfd, len as u64)?;
        // Nobody who gets hold of the descriptor can shrink the file, which would make reads trap.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memfd, seals)?;
        let writable = Mapping::new(&memfd, len, ProtFlags::READ | ProtFlags::WRITE)?;
        // A forked child shares the memory but not the books of it: its writes must trap.
        writable.advise(0, len, Advice::LinuxDontFork)?;
        let readable = Mapping::new(&memfd, len, ProtFlags::READ)?;
        Ok(Self { memfd, writable, readable })
    }

    pub(crate) fn len(&self) -> usize {
        self.writable.len
    }

    pub(crate) fn writable(&self) -> NonNull<u8> {
        self.writable.start
    }

    pub(crate) fn readable(&self) -> NonNull<u8> {
        self.readable.start
    }

    /// Gives the range memory of its own, now.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        match self.writable.advise(offset, len, Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know the advice; allocating the file's pages does as well.
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) => {
                let none = FallocateFlags::empty();
                rustix::fs::fallocate(&self.memfd, none, offset as u64, len as u64)?;
                Ok(())
            }
            other => other,
        }
    }

    /// Asks for huge pages in the range, which must be populated.
    pub(crate) fn collapse(&self, offset: usize, len: usize) -> io::Result<()> {
        self.writable.collapse(offset, len)
    }

    /// Fills the read-only mapping's page table, so that the first read does not fault. Best
    /// effort.
    pub(crate) fn map_readable(&self, offset: usize, len: usize) {
        if let Err(err) = self.readable.advise(offset, len, Advice::LinuxPopulateRead) {
            tracing::debug!(%err, "the read-only mapping is filled on first use");
        }
    }
}

struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range that lives until drop; using it needs a slot's ownership.
unsafe impl Send for Mapping {}
// SAFETY: its methods only advise the kernel, which is safe from any thread.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(memfd: &OwnedFd, len: usize, prot: ProtFlags) -> io::Result<Self> {
        let mapping = Self { start: map_aligned(memfd, len, prot)?, len };
        // A core dump must not hold what users have said.
        if let Err(err) = mapping.advise(0, len, Advice::LinuxDontDump) {
            tracing::debug!(%err, "arena stays in core dumps");
        }
        Ok(mapping)
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> io::Result<()> {
        let start = self.range(offset, len);
        loop {
            // SAFETY: the range lies in this mapping, and the advices used here (dump, fork,
            // populate) change no byte of it.
            match unsafe { rustix::mm::madvise(start.cast(), len, advice) } {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                other => return Ok(other?),
            }
        }
    }

    fn collapse(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.range(offset, len);
        // SAFETY: the range lies in this mapping; collapsing moves pages and changes no byte.
        match unsafe { libc::madvise(start.cast(), len, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn range(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "range outside of the mapping");
        // SAFETY: `offset` is inside the mapping, as just asserted.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's own, and its users keep it alive until they are done.
        if let Err(err) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) } {
            tracing::error!(%err, "arena mapping leaked");
        }
    }
}

/// Maps the file at an address that is a multiple of a huge page.
fn map_aligned(fd: impl AsFd, len: usize, prot: ProtFlags) -> io::Result<NonNull<u8>> {
    let room = len.checked_add(HUGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
    let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), room, ProtFlags::empty(), reserve) }?;
    let head = base.cast::<u8>().align_offset(HUGE_BYTES);
    // SAFETY: `head < HUGE_BYTES`, so the range of `len` from here lies in the reservation.
    let start = unsafe { base.cast::<u8>().add(head) };
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: this replaces pages of the reservation, which nobody uses.
    let mapped = unsafe { rustix::mm::mmap(start.cast(), len, prot, flags, fd, 0) };
    if let Err(err) = mapped {
        // SAFETY: the reservation is unused.
        unsafe { rustix::mm::munmap(base, room) }?;
        return Err(err.into());
    }
    let tail = room - head - len;
    // SAFETY: head and tail are the unused ends of the reservation, page-aligned like the mapping.
    unsafe {
        if head > 0 {
            rustix::mm::munmap(base, head)?;
        }
        if tail > 0 {
            rustix::mm::munmap(start.add(len).cast(), tail)?;
        }
    }
    Ok(NonNull::new(start).expect("the kernel maps nothing at address zero"))
}
