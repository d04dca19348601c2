//! What the parts that `models/` checks take for atomics and shared ownership: one place, so that
//! a model puts its own in their stead.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic;
