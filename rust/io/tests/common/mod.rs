//! What the tests of several files need.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

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
