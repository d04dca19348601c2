//! The timer's thread: it is woken for what is due, and by no call that only moves a deadline.

mod support;

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use support::{GatedDisk, blocks_of, chain, config, namespace, seams};
use tiered_kv::{GetOptions, PutOptions, Store};

/// The directories in `/proc` of this process's timers.
fn timers() -> HashSet<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let named = |task: &PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "tkv-timer")
    };
    tasks.map(|task| task.expect("a task").path()).filter(named).collect()
}

/// How often a thread has gone to sleep.
fn sleeps(task: &std::path::Path) -> u64 {
    let status = std::fs::read_to_string(task.join("status")).expect("it lives");
    let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
    line.and_then(|line| line.split_whitespace().nth(1)).expect("a number").parse().expect("one")
}

/// Each load has a deadline, and each put may wait for room: to wake a thread for each took the
/// processor from the caller.
#[test]
fn a_call_with_a_deadline_wakes_nobody() {
    let before = timers();
    let config = config("/simulated".as_ref(), 4 << 20);
    let store = Store::open_with(&config, &seams(GatedDisk::new())).expect("opens");
    let ns = namespace(&store);
    // A thread gives itself its name.
    let limit = Instant::now() + Duration::from_secs(60);
    let timer = loop {
        if let Some(timer) = timers().difference(&before).next() {
            break timer.clone();
        }
        assert!(Instant::now() < limit, "there is a timer");
        std::thread::yield_now();
    };
    let absent = chain(&ns, 9, 4);
    let begin = (sleeps(&timer), Instant::now());
    let calls: u64 = 400;
    for number in 0..calls {
        let keys = chain(&ns, 100 + u32::try_from(number).expect("few"), 2);
        let wait = Some(Duration::from_secs(30));
        let options = PutOptions { wait, ..PutOptions::default() };
        store.put(&ns, &keys, blocks_of(&keys), &options).expect("open").wait();
        let options = GetOptions { timeout: wait, ..GetOptions::default() };
        store.get(&ns, &absent, &options).expect("open").wait();
    }
    let slept = sleeps(&timer) - begin.0;
    // By itself it looks twice a second.
    let by_itself = 4 + begin.1.elapsed().as_millis() as u64 / 100;
    assert!(slept < calls / 20 + by_itself, "{slept} times for {calls} puts and loads");
}
