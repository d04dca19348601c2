//! Memory that an engine lends: registered once, then named by the numbers of its slots.

use crate::store::Store;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use tiered_kv_io::{Region, RegionMemory, Registration};
use tiered_kv_types::Result;

/// The regions of one store.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// Guards the list; with each region, why the kernel does not know it, where it does not.
    known: Mutex<Vec<(Weak<Region>, Option<String>)>>,
}

/// How many regions there are, and how many the kernel does not know.
pub(crate) struct RegionReport {
    pub(crate) count: usize,
    pub(crate) plain: usize,
    pub(crate) reason: String,
}

impl Regions {
    fn add(&self, region: &Arc<Region>, refused: Option<String>) {
        let mut known = self.known.lock();
        known.retain(|(region, _)| region.strong_count() > 0);
        known.push((Arc::downgrade(region), refused));
    }

    pub(crate) fn report(&self) -> RegionReport {
        let known = self.known.lock();
        let alive = || known.iter().filter(|(region, _)| region.strong_count() > 0);
        let refused = || alive().filter_map(|(_, refused)| refused.as_ref());
        RegionReport {
            count: alive().count(),
            plain: refused().count(),
            reason: refused().next_back().cloned().unwrap_or_default(),
        }
    }
}

impl Store {
    /// Registers memory of the caller's, cut into slots of `slot_bytes` one behind the other.
    ///
    /// `get_into` then reads into its slots from a drive without a copy: give it the slots that
    /// [`Region::claim_all`] takes. Slots at addresses that are multiples of 4,096 are read in
    /// place; others, and the end of a slab that fills no page, through a buffer. Where the kernel
    /// refuses to know the memory beforehand, for want of locked memory, reads are a little slower,
    /// and [`Store::health`] says so.
    ///
    /// The memory is freed when the last handle of the region and the last slot in use are dropped;
    /// a read in flight holds its slot.
    ///
    /// # Errors
    /// `InvalidArgument` where no slot fits in the memory; `Closed`.
    pub fn register(&self, memory: impl RegionMemory, slot_bytes: usize) -> Result<Arc<Region>> {
        self.register_strided(memory, slot_bytes, slot_bytes)
    }

    /// Like [`Store::register`], with slots that begin `stride` bytes behind one another.
    ///
    /// # Errors
    /// As [`Store::register`]; a `stride` smaller than `slot_bytes`.
    pub fn register_strided(
        &self,
        memory: impl RegionMemory,
        slot_bytes: usize,
        stride: usize,
    ) -> Result<Arc<Region>> {
        self.check_open("register")?;
        let region = Region::new(memory, slot_bytes, stride)?;
        let mut refused = None;
        for io in &self.core.io {
            if let Registration::Refused(why) = io.register(&region) {
                tracing::warn!(why, "a region is read into without registration");
                refused = Some(why);
            }
        }
        self.owner.regions.add(&region, refused);
        Ok(region)
    }
}
