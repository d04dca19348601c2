//! Nothing that was brought stays without anybody being told of it.

use crate::due::Due;
use crate::sync::{Arc, Mutex, SegQueue};
use loom::thread;

/// How many are taken; who takes them looks for more only when it is woken.
fn take(due: &Due, queue: &SegQueue<u8>) -> u8 {
    due.take();
    let mut taken = 0;
    while queue.pop().is_some() {
        taken += 1;
    }
    taken
}

pub(crate) fn brought_or_woken() {
    let shared = Arc::new((Due::default(), SegQueue::default(), Mutex::new(0u8)));
    let bring = |shared: Arc<(Due, SegQueue<u8>, Mutex<u8>)>| {
        move || {
            shared.1.push(1);
            if shared.0.tell(false) {
                *shared.2.lock() += 1;
            }
        }
    };
    let threads = [shared.clone(), shared.clone()].map(|to| thread::spawn(bring(to)));
    let mut taken = take(&shared.0, &shared.1);
    for thread in threads {
        thread.join().expect("no panic");
    }
    if shared.0.is_set() {
        assert!(*shared.2.lock() > 0, "told, and nobody woke");
        taken += take(&shared.0, &shared.1);
    }
    assert_eq!(taken, 2, "something waits for ever");
}
