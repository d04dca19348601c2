//! Reserve and publish: fill the store's own memory in place, then make it visible.

use crate::call::{Call, PutReport, Reply};
use crate::machine::{Event, Outcome, PutItem, PutStatus};
use crate::namespace::{Namespace, PutOptions};
use crate::op::Op;
use crate::resident::Filling;
use crate::store::Store;
use std::time::Duration;
use tiered_kv_io::Nanos;
use tiered_kv_types::{BlockKey, Error, ErrorKind, Result};

/// Slots reserved for a batch of blocks. Dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    ns: u32,
    blocks: Vec<(PutItem, Reserved)>,
    expires: Nanos,
}

/// One block of a reservation.
#[derive(Debug)]
pub enum Reserved {
    /// Writable slots, one a slab.
    Slots(Filling),
    /// Why there are none: the key exists, or the store is throttled.
    Refused(PutStatus),
}

impl Reservation {
    /// Number of blocks asked for.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block was asked for.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The writable payload of slab `slab` of block `index`; `None` where none was reserved.
    pub fn slab_mut(&mut self, index: usize, slab: usize) -> Option<&mut [u8]> {
        match self.blocks.get_mut(index) {
            Some((_, Reserved::Slots(filling))) if slab < filling.slabs() => {
                Some(filling.slab_mut(slab))
            }
            _ => None,
        }
    }

    /// Why block `index` has no slots, if it has none.
    pub fn refused(&self, index: usize) -> Option<PutStatus> {
        match self.blocks.get(index) {
            Some((_, Reserved::Refused(status))) => Some(*status),
            _ => None,
        }
    }
}

impl Store {
    /// Reserves slots in memory for blocks that the caller fills in place.
    ///
    /// # Errors
    /// `InvalidArgument` for wrong options; `Unsupported` without T1; `Closed`.
    pub fn reserve(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        options: &PutOptions,
    ) -> Result<Reservation> {
        self.check_ns("reserve", ns)?;
        self.check_dram("reserve", "reservations")?;
        let items = self.put_items(ns, keys, options)?;
        let (op, done) = Op::new();
        let reply: Reply = Box::new(move |outcome, _| {
            let Outcome::Reserved(slots) = outcome else { unreachable!("it ends as one") };
            done(slots);
        });
        let call = Call::plain(reply);
        let (number, asked) = (ns.number, items.clone());
        self.begin(call, |op| Event::Reserve { op, ns: number, items: asked });
        // A reservation is decided within the step that takes it in, so this never waits.
        let slots = op.wait().into_iter().map(|slot| match slot {
            Ok(filling) => Reserved::Slots(filling),
            Err(status) => Reserved::Refused(status),
        });
        let blocks = items.into_iter().zip(slots).collect();
        let ttl = Duration::from_secs_f64(self.config.reservation_ttl_s);
        let expires = self.core.clock.now() + u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX / 2);
        Ok(Reservation { ns: number, blocks, expires })
    }

    /// Makes a reservation's blocks visible. Their checksums are computed on the calling thread.
    ///
    /// # Errors
    /// `InvalidArgument` where the reservation has expired: its slots are given back; `Closed`.
    pub fn publish(&self, reservation: Reservation) -> Result<PutReport> {
        self.check_open("publish")?;
        if self.core.clock.now() > reservation.expires {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "publish",
                "the reservation has expired: publish sooner, or raise `reservation_ttl_s`",
            ));
        }
        let n = reservation.blocks.len();
        let mut statuses = vec![PutStatus::Throttled; n];
        let mut filled = Vec::new();
        let mut places = Vec::new();
        for (at, (item, reserved)) in reservation.blocks.into_iter().enumerate() {
            match reserved {
                Reserved::Slots(filling) => {
                    places.push(at);
                    filled.push((item, filling.fill_in_place()));
                }
                Reserved::Refused(status) => statuses[at] = status,
            }
        }
        let (op, done) = Op::new();
        let reply: Reply = Box::new(move |outcome, _| done(outcome.into_put()));
        let call = Call::plain(reply);
        let ns = reservation.ns;
        self.begin(call, |op| Event::Publish { op, ns, items: filled });
        // Publishing is decided within the step that takes it in, so this never waits.
        for (at, status) in places.into_iter().zip(op.wait().statuses) {
            statuses[at] = status;
        }
        Ok(PutReport { statuses })
    }
}
