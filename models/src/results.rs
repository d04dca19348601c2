//! How a result gets back to a thread or a coroutine that waits for it.

use crate::op::Op;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

pub(crate) fn waited_for() {
    let (op, done) = Op::new();
    let thread = thread::spawn(move || done(7));
    assert_eq!(op.wait(), 7);
    thread.join().expect("no panic");
}

pub(crate) fn awaited() {
    let (op, done) = Op::new();
    let thread = thread::spawn(move || done(7));
    assert_eq!(loom::future::block_on(op), 7);
    thread.join().expect("no panic");
}

struct Counted(Arc<AtomicU64>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) fn forgotten() {
    let drops = Arc::new(AtomicU64::new(0));
    let (op, done) = Op::new();
    let value = Counted(drops.clone());
    let thread = thread::spawn(move || done(value));
    drop(op);
    thread.join().expect("no panic");
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}
