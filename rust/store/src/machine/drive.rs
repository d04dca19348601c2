//! The drives of T3: slots, files, whether writing to one is paused after faults, and whether one
//! is asked at all.

use super::circuit::{Circuit, Fault};
use super::wear::WriteBudget;
use super::worth::Pace;
use super::{DriveParts, Limits, SlotAllocator, SlotId};
use std::collections::BTreeSet;
use tiered_kv_io::{FileId, Nanos};
use tiered_kv_types::SegmentHeader;
use tiered_kv_types::record::SEGMENT_HEADER_BYTES;

/// Failed groups in a row after which writing pauses.
const BREAKER_FAULTS: u32 = 3;

/// Number of a drive in the configuration.
pub(crate) type DriveId = u16;

/// How a drive does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriveCondition {
    /// Writing to it is paused after faults.
    pub(crate) paused: bool,
    /// Why it is not asked.
    pub(crate) fault: Option<Fault>,
    /// Bytes a second at which it has read of late.
    pub(crate) load_bytes_per_s: Option<u64>,
}

impl DriveCondition {
    /// It takes reads and writes.
    pub(crate) fn is_well(&self) -> bool {
        !self.paused && self.fault.is_none()
    }
}

#[derive(Debug)]
pub(super) struct Drive {
    pub(super) store: [u8; 16],
    pub(super) slots: SlotAllocator,
    pub(super) files: Vec<Option<FileId>>,
    /// Headers of free slots, to be zeroed with the next group.
    pub(super) clears: BTreeSet<SlotId>,
    pub(super) preparing: u32,
    faults: u32,
    paused_until: Option<Nanos>,
    retry: Nanos,
    pub(super) circuit: Circuit,
    pub(super) pace: Pace,
    /// Bytes being read that nobody had asked for.
    pub(super) ahead_bytes: u64,
    pub(super) budget: WriteBudget,
}

impl Drive {
    pub(super) fn new(parts: DriveParts, limits: &Limits) -> Self {
        let segments = parts.geometry.segments as usize;
        Self {
            store: parts.store,
            slots: SlotAllocator::new(parts.geometry, true),
            files: vec![None; segments],
            clears: BTreeSet::new(),
            preparing: 0,
            faults: 0,
            paused_until: None,
            retry: limits.retry,
            circuit: Circuit::new(limits.stall, limits.retry),
            pace: Pace::default(),
            ahead_bytes: 0,
            budget: WriteBudget::new(limits.write_bytes_per_s),
        }
    }

    pub(super) fn place(&self, slot: SlotId) -> (FileId, u64) {
        let file = self.files[slot.segment as usize].expect("a used slot's file is open");
        (file, self.slots.offset(slot))
    }

    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.paused_until
    }

    pub(super) fn is_writable(&self) -> bool {
        self.paused_until.is_none() && self.circuit.is_closed()
    }

    pub(super) fn condition(&self) -> DriveCondition {
        DriveCondition {
            paused: self.paused_until.is_some(),
            fault: self.circuit.fault(),
            load_bytes_per_s: self.pace.bytes_per_s().map(|rate| rate as u64),
        }
    }

    /// Ends a pause that is over, and gives segments that could not be prepared another chance.
    pub(super) fn resume(&mut self, now: Nanos) {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.paused_until = None;
            self.slots.mend();
        }
    }

    pub(super) fn fault(&mut self, now: Nanos) {
        self.faults += 1;
        if self.faults >= BREAKER_FAULTS {
            self.pause(now);
        }
    }

    pub(super) fn pause(&mut self, now: Nanos) {
        self.paused_until = Some(now + self.retry);
    }

    pub(super) fn healthy(&mut self) {
        self.faults = 0;
    }

    pub(super) fn segment_header(&self, segment: u32) -> SegmentHeader {
        let geometry = self.slots.geometry();
        let (slots, data_offset) = self.slots.shape(segment);
        SegmentHeader {
            store: self.store,
            segment,
            class_epoch: self.slots.class_epoch(segment),
            slot_bytes: self.slots.slot_bytes(segment),
            slots,
            header_stride: geometry.header_stride,
            segment_bytes: geometry.segment_bytes,
            data_offset,
        }
    }

    /// The header page of a segment and its empty table.
    pub(super) fn segment_image(&self, segment: u32) -> Vec<u8> {
        let header = self.segment_header(segment);
        let mut image =
            vec![0; usize::try_from(header.data_offset).expect("a table fits in memory")];
        image[..SEGMENT_HEADER_BYTES].copy_from_slice(&header.encode());
        image
    }
}
