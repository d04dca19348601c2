//! loom's locks, atomics and shared ownership, with the interface that the store's sources use.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

pub(crate) use loom::sync::atomic;
pub(crate) use loom::sync::{Arc, RwLockReadGuard};

const NOT_POISONED: &str = "a model that has panicked is over";

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// `None` only while a condition variable has it.
pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect(NOT_POISONED)))
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is held")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it is held")
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

pub(crate) struct TimedOut;

impl TimedOut {
    pub(crate) fn timed_out(&self) -> bool {
        true
    }
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.0.take().expect("it is held");
        guard.0 = Some(self.0.wait(inner).expect(NOT_POISONED));
    }

    /// Models have no time: every limit has passed.
    pub(crate) fn wait_until<T>(&self, _: &mut MutexGuard<'_, T>, _: Instant) -> TimedOut {
        TimedOut
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[derive(Debug)]
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect(NOT_POISONED)
    }

    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        self.0.try_read().ok()
    }

    pub(crate) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
        self.0.write().expect(NOT_POISONED)
    }
}

/// A queue that orders what is before a push before what is after its pop, as the real one does.
pub(crate) struct SegQueue<T>(Mutex<VecDeque<T>>);

impl<T> Default for SegQueue<T> {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
}

impl<T> SegQueue<T> {
    pub(crate) fn push(&self, value: T) {
        self.0.lock().push_back(value);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.lock().pop_front()
    }
}

impl<T> fmt::Debug for SegQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegQueue").finish_non_exhaustive()
    }
}
