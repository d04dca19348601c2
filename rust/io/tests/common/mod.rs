//! What the tests of several files need.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;

use tempfile::TempDir;
use tiered_kv_io::{
    Arena, ArenaConfig, BlockingEngine, Disk, FileId, IoDone, IoEngine, IoOp, IoRequest, OnDone,
    PAGE_BYTES, Priority, ReadInto, Slot, Threads, UringConfig, UringEngine, probe_io_uring,
};
use tiered_kv_types::Result;

/// Set in a child process to the path that it is to work on.
const CHILD: &str = "TIERED_KV_TEST_CHILD";

/// In a child process made by [`child`], the path given to it.
pub(crate) fn child_path() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

/// A command that runs one test of this binary again, in a process where `child_path` answers
/// `path`.
pub(crate) fn child(test: &str, path: impl Into<PathBuf>) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test binary has a path"));
    command.args(["--exact", test, "--nocapture"]).env(CHILD, path.into());
    command
}

/// A directory on the device that holds the build, which has direct I/O where any has.
pub(crate) fn disk_dir() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the build directory is writable")
}

/// Bytes that differ from place to place and from `seed` to `seed`.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let byte = |at: usize| {
        let mixed = (at as u64 ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 56) as u8
    };
    (0..len).map(byte).collect()
}

/// Refuses a child that failed, and one that found no test of that name and so did nothing.
pub(crate) fn assert_child_passed(output: &Output) {
    let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
    assert!(output.status.success() && ran, "{output:?}");
}

/// A backend under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    Blocking,
    Uring,
}

/// The backends that this machine has. Without io_uring the output says so.
#[expect(clippy::print_stderr, reason = "a test that has nothing to test must say so")]
pub(crate) fn backends() -> Vec<Backend> {
    match probe_io_uring() {
        Ok(_) => vec![Backend::Blocking, Backend::Uring],
        Err(reason) => {
            eprintln!("not tested: {reason}");
            vec![Backend::Blocking]
        }
    }
}

/// An engine with few threads and a small ring.
pub(crate) fn engine(
    backend: Backend,
    disk: Arc<dyn Disk>,
    arena: &Arc<Arena>,
    threads: &dyn Threads,
    on_done: OnDone,
) -> Result<Box<dyn IoEngine>> {
    Ok(match backend {
        Backend::Blocking => Box::new(BlockingEngine::new(disk, threads, 1, 1, on_done)?),
        Backend::Uring => Box::new(UringEngine::new(disk, arena, threads, small_ring(), on_done)?),
    })
}

/// A ring with room for few operations, whose completions come in order.
pub(crate) fn small_ring() -> UringConfig {
    UringConfig { depth: 8, store_depth: 4, completion_threads: 1, ..UringConfig::default() }
}

/// An arena of one extent.
pub(crate) fn arena(pages: u64) -> Arc<Arena> {
    let bytes = pages * PAGE_BYTES;
    let cfg = ArenaConfig { extent_bytes: bytes, huge_pages: false, ..ArenaConfig::new(bytes) };
    Arena::new(cfg).expect("memory for a small arena")
}

pub(crate) fn store(token: u64, op: IoOp) -> IoRequest {
    IoRequest { token, priority: Priority::Store, op, cancel: None }
}

/// A store of one page, from memory of no alignment.
pub(crate) fn write(token: u64, file: FileId, page: u64, byte: u8) -> IoRequest {
    let buf = Arc::new(vec![byte; PAGE_BYTES as usize]);
    store(token, IoOp::Write { file, offset: page * PAGE_BYTES, buf })
}

/// A load of `pages` pages into the arena's page of the token's number.
pub(crate) fn load_pages(
    token: u64,
    file: FileId,
    page: u64,
    pages: u64,
    arena: &Arc<Arena>,
) -> IoRequest {
    let buf = arena.take(token * PAGE_BYTES, pages * PAGE_BYTES).expect("free pages");
    let op = IoOp::Read { file, offset: page * PAGE_BYTES, buf: buf.into() };
    IoRequest { token, priority: Priority::Load, op, cancel: None }
}

pub(crate) fn load(token: u64, file: FileId, page: u64, arena: &Arc<Arena>) -> IoRequest {
    load_pages(token, file, page, 1, arena)
}

/// What a read has brought.
pub(crate) fn bytes_of(done: IoDone) -> Slot {
    done.result.expect("no fault");
    match done.op {
        IoOp::Read { buf: ReadInto::Slot(buf), .. } => buf.freeze(),
        _ => panic!("not a read"),
    }
}

/// Lets this thread, and those that it starts, make no io_uring: as container runtimes do.
pub(crate) fn forbid_io_uring() {
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    // The number of the call is the first field of what the filter sees.
    let mut filter = [
        libc::sock_filter { code: load, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: equal, jt: 0, jf: 1, k: libc::SYS_io_uring_setup as u32 },
        libc::sock_filter { code: answer, jt: 0, jf: 0, k: REFUSE },
        libc::sock_filter { code: answer, jt: 0, jf: 0, k: ALLOW },
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the calls restrict this thread; the program lives until the second returns.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}
