//! Memory arenas, checked copies, directories and I/O backends.
//!
//! This crate holds the unsafe code that memory mappings and streaming copies need, behind an API
//! that is safe to use: the store above it forbids unsafe code. Clock, randomness, threads and
//! files are traits, so that a simulation can supply its own.

mod access;
mod arena;
mod beside;
mod bitmap;
mod buf;
mod cancel;
mod checksum;
mod choose;
mod clock;
mod directory;
mod dirlock;
mod disk;
mod engine;
mod fork;
mod join;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod loads;
mod mapping;
mod memdisk;
mod memory;
mod parallel;
mod placed;
mod pool;
mod posix;
mod readonly;
mod region;
mod socket;
mod staging;
mod sync;
mod trial;
mod uring;
mod vectored;
mod whole;

pub use arena::{Arena, ArenaConfig, ArenaReport, Slot, SlotMut};
pub use beside::beside;
pub use buf::{AlignedBuf, ReadBuf};
pub use cancel::CancelFlag;
pub use checksum::{copy, copy_checked, crc32c};
pub use choose::{EngineConfig, choose_engine};
pub use clock::{
    Clock, Entropy, ManualClock, Nanos, OsEntropy, OsThreads, SeededEntropy, SystemClock, Threads,
};
pub use directory::open_for_append;
pub use dirlock::DirLock;
pub use disk::{Alignment, DataFile, Descriptors, Disk, FileId};
pub use engine::{
    BlockingEngine, IoDone, IoEngine, IoOp, IoRequest, OnDone, Priority, Registration, is_cancelled,
};
pub use fork::{Origin, Running};
pub use memdisk::{DiskOp, FaultHook, MemDisk};
pub use memory::{available_memory_bytes, memory_limit_bytes, open_files_limit, prefer_huge_pages};
pub use parallel::{in_parallel, recovery_threads};
pub use placed::{PlacedThreads, on_processors};
pub use pool::{WorkerPool, panic_text};
pub use posix::PosixDisk;
pub use readonly::ReadOnlyDisk;
pub use region::{CutSlot, ReadInto, Region, RegionMemory, RegionPart, RegionSlot};
pub use socket::{Ready, SOCKET_NAME, SocketListener, SocketStream, Wake, is_trusted, wait_ready};
pub use uring::{UringConfig, UringEngine, UringFeatures, probe_io_uring};

/// The unit of arenas, buffers and slots, in bytes.
pub const PAGE_BYTES: u64 = 4096;
