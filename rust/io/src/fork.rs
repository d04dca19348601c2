//! Telling a forked child from its parent, without a system call.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static FORKS: AtomicU64 = AtomicU64::new(0);
static REGISTER: Once = Once::new();

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A number that differs in a forked child from what its parent saw.
///
/// What was made under another number belongs to the parent: its threads are not there, and its locks
/// may be held by one of them for ever.
pub fn fork_generation() -> u64 {
    REGISTER.call_once(|| {
        // SAFETY: `in_child` only adds to an atomic, which is allowed in a child of a process with
        // several threads; it is a function of the program and lives as long.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if refused != 0 {
            tracing::warn!(refused, "forks cannot be noticed");
        }
    });
    FORKS.load(Ordering::Relaxed)
}
