//! Telling an engine that nobody wants a request any more.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};

/// Asks for requests to be dropped that the device does not have yet.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Nobody wants the requests any more, or somebody does again.
    pub fn set(&self, cancelled: bool) {
        self.0.store(cancelled, Ordering::Release);
    }

    /// Whether nobody wants the requests.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
