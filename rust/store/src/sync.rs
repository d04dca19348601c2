//! What the parts that `models/` checks take for locks, atomics, queues and shared ownership: one
//! place, so that a model puts its own in their stead.

pub(crate) use crossbeam_queue::SegQueue;
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};
pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic;
