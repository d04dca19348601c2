//! The records of a segment as recovery found them.

use std::ops::Range;
use std::sync::Arc;
use tiered_kv_types::{BlockInfo, BlockKey, CheckpointRows, RecordHeader};

/// Records, each with the slot that it was found in.
#[derive(Debug)]
pub(crate) enum Records {
    /// From the segment's table.
    Table(Vec<(u32, RecordHeader)>),
    /// Some of a checkpoint's, of pieces that are sound: they are decoded when they are asked for,
    /// since memory for a million of them costs more than that.
    Rows(Arc<CheckpointRows>, Range<usize>),
}

impl Default for Records {
    fn default() -> Self {
        Self::Table(Vec::new())
    }
}

impl Records {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Table(records) => records.len(),
            Self::Rows(_, run) => run.len(),
        }
    }

    /// A record and the slot that it was found in.
    pub(crate) fn get(&self, at: usize) -> (u32, RecordHeader) {
        match self {
            Self::Table(records) => records[at],
            Self::Rows(rows, run) => {
                let record = rows.record(run.start + at);
                let record = record.expect("its piece of the checkpoint is sound");
                (record.slot, record)
            }
        }
    }

    /// What the read index wants to know of a record.
    pub(super) fn brief(&self, at: usize) -> (BlockKey, BlockInfo) {
        match self {
            Self::Table(records) => (records[at].1.key, records[at].1.info),
            Self::Rows(rows, run) => rows.brief(run.start + at),
        }
    }
}
