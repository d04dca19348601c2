//! Reading every payload of a closed store and checking it.

use super::{ClosedStore, Operator, Way};
use crate::found::read_segment;
use crate::machine::{DriveId, Records, SlabPlace};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use tiered_kv_io::{AlignedBuf, crc32c};
use tiered_kv_types::{Error, ErrorKind, RecordHeader, Result, round_up_to_page};

/// A slab that is not what was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadSlab {
    /// Digest of its namespace.
    pub namespace: [u8; 32],
    /// Key of its block.
    pub key: [u8; 32],
    /// The directory it is in.
    pub path: PathBuf,
    /// Its segment.
    pub segment: u32,
    /// Its slot.
    pub slot: u32,
    /// `corrupt`, `io_error`, or `header` where the checkpoint and the table differ.
    pub what: &'static str,
}

/// What one step has checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Slabs.
    pub slabs: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Record headers that are neither empty nor sound, in tables that this step was first to read.
    pub damaged_headers: u64,
    /// What is bad.
    pub bad: Vec<BadSlab>,
}

/// A check of a whole store, in steps.
#[derive(Debug)]
pub struct Verify {
    store: Arc<ClosedStore>,
    /// In the order in which they lie on the drives.
    plan: Vec<SlabPlace>,
    at: usize,
    /// The table of the segment that is being checked, where the plan is a checkpoint's.
    table: Option<((DriveId, u32), HashMap<u32, RecordHeader>)>,
}

impl Operator {
    /// Begins to check every payload of a closed store that is read.
    ///
    /// # Errors
    /// `Unsupported` where it is none.
    pub fn verify(&self) -> Result<Verify> {
        let Way::Closed(store) = &self.way else {
            let context = "a store that is open cannot be verified: close it first, or rely on the \
                           checks of every load";
            return Err(Error::new(ErrorKind::Unsupported, "verify", context));
        };
        let mut plan = store.machine.lock().slabs_on_drives();
        plan.sort_unstable_by_key(|slab| (slab.drive, slab.slot));
        Ok(Verify { store: store.clone(), plan, at: 0, table: None })
    }
}

impl Verify {
    /// Slabs to be checked, and their payload bytes.
    pub fn total(&self) -> (u64, u64) {
        (self.plan.len() as u64, self.plan.iter().map(|slab| slab.bytes).sum())
    }

    /// Checks some more, about so many bytes; `None` when all is checked.
    ///
    /// # Errors
    /// `NoSpace` without memory for a slab.
    pub fn step(&mut self, max_bytes: u64) -> Result<Option<Verified>> {
        if self.at == self.plan.len() {
            return Ok(None);
        }
        let mut done = Verified::default();
        while self.at < self.plan.len() && (done.slabs == 0 || done.bytes < max_bytes) {
            let slab = self.plan[self.at];
            self.at += 1;
            self.read_table(&slab, &mut done);
            let fault = if self.differs(&slab) { Some("header") } else { self.check(&slab)? };
            done.slabs += 1;
            done.bytes += slab.bytes;
            if let Some(what) = fault {
                done.bad.push(self.bad(&slab, what));
            }
        }
        Ok(Some(done))
    }

    fn check(&self, slab: &SlabPlace) -> Result<Option<&'static str>> {
        let len = usize::try_from(round_up_to_page(slab.bytes)).expect("a slab fits in memory");
        let mut buf = AlignedBuf::new(len)?;
        let disk = &self.store.disks[usize::from(slab.drive)];
        if disk.read_at(slab.file, slab.offset, buf.as_mut_slice()).is_err() {
            return Ok(Some("io_error"));
        }
        let payload = &buf.as_slice()[..usize::try_from(slab.bytes).expect("less than above")];
        Ok((crc32c(payload) != slab.crc32c).then_some("corrupt"))
    }

    /// Reads the table of a segment that a checkpoint vouches for.
    fn read_table(&mut self, slab: &SlabPlace, done: &mut Verified) {
        let drive = &self.store.drives[usize::from(slab.drive)];
        let place = (slab.drive, slab.slot.segment);
        let known = self.table.as_ref().is_some_and(|(of, _)| *of == place);
        if known || drive.checkpoint != super::CheckpointState::Sound {
            return;
        }
        let disk = self.store.disks[usize::from(slab.drive)].as_ref();
        let found = read_segment(disk, &drive.geometry, slab.slot.segment, slab.file);
        done.damaged_headers += found.damaged;
        let records = match found.records {
            Records::Table(records) => records.into_iter().collect(),
            Records::Rows(..) => unreachable!("a table was read"),
        };
        self.table = Some((place, records));
    }

    fn differs(&self, slab: &SlabPlace) -> bool {
        let drive = &self.store.drives[usize::from(slab.drive)];
        if drive.checkpoint != super::CheckpointState::Sound {
            return false;
        }
        let Some((_, table)) = &self.table else { return true };
        let same = |record: &RecordHeader| {
            let said = (record.payload_bytes, record.checksum, record.generation);
            said == (slab.bytes, slab.crc32c, slab.generation)
        };
        !table.get(&slab.slot.index).is_some_and(same)
    }

    fn bad(&self, slab: &SlabPlace, what: &'static str) -> BadSlab {
        let (namespace, key) = self.store.machine.lock().name_of(slab.block);
        BadSlab {
            namespace: namespace.0,
            key: key.0,
            path: self.store.drives[usize::from(slab.drive)].path.clone(),
            segment: slab.slot.segment,
            slot: slab.slot.index,
            what,
        }
    }
}
