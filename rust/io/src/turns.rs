//! Whose turn it is on a processor, as far as a thread has a say in it.

/// Threads that no call waits for on its way: the timer ends those that have waited too long.
const BEHIND_OTHERS: [&str; 3] = ["tkv-timer", "tkv-names", "tkv-record"];

/// Has such a thread, by its name, wait for the turn of others to end when it
/// wakes up: where processors are few it would take that of the caller who has woken it.
///
/// A wish: where it is refused nothing changes.
pub(crate) fn behind_others(name: &str) {
    if !BEHIND_OTHERS.contains(&name) {
        return;
    }
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads `param`; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const param) } != 0 {
        tracing::debug!(name, "the scheduler takes no wishes");
    }
}

#[cfg(test)]
mod tests {
    use crate::{OsThreads, Threads};
    use std::sync::mpsc;

    #[test]
    fn only_threads_that_nobody_waits_for_are_behind_others() {
        let policy_of = |name: &str| {
            let (tell, told) = mpsc::channel();
            // SAFETY: it asks for the calling thread's own policy.
            let body = Box::new(move || tell.send(unsafe { libc::sched_getscheduler(0) }).unwrap());
            OsThreads.spawn(name.into(), body).unwrap().join().unwrap();
            told.recv().unwrap()
        };
        assert_eq!(policy_of("tkv-timer"), libc::SCHED_BATCH);
        assert_eq!(policy_of("tkv-done-0"), libc::SCHED_OTHER);
    }
}
