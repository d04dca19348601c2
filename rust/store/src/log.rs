//! The bounded event log: what happened to which key, for tests and for `explain`.

use crate::index::FullKey;
use crate::machine::Now;
use std::collections::VecDeque;
use tiered_kv_types::{BlockKey, MissReason, Tier};

/// What happened to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogKind {
    /// It left a tier to make room.
    Evicted,
    /// A put of it was refused for want of room or of write bandwidth.
    Throttled,
    /// A read or a write of it failed.
    Fault(MissReason),
    /// A caller deleted it.
    Deleted,
    /// It could not be made durable: it is in memory only.
    Undurable,
    /// A load of it did not end by the caller's deadline.
    Slow,
    /// A load of it was not begun: its caller computes it faster.
    Recompute,
}

impl LogKind {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Throttled => "throttled",
            Self::Fault(_) => "fault",
            Self::Undurable => "undurable",
            Self::Deleted => "deleted",
            Self::Slow => "slow",
            Self::Recompute => "recompute",
        }
    }
}

/// One entry of the event log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Its number; numbers never repeat, so a gap shows what the bound dropped.
    pub seq: u64,
    /// Nanoseconds since 1970.
    pub unix_ns: u64,
    /// What happened.
    pub kind: LogKind,
    /// Number of the namespace in this store.
    pub ns: u32,
    /// The key.
    pub key: BlockKey,
    /// The tier concerned.
    pub tier: Option<Tier>,
}

#[derive(Debug)]
pub(crate) struct EventLog {
    entries: VecDeque<LogEntry>,
    cap: usize,
    next: u64,
    /// When the store was opened.
    pub(crate) begun_unix_ns: u64,
}

impl EventLog {
    pub(crate) fn new(cap: usize) -> Self {
        Self { entries: VecDeque::new(), cap, next: 0, begun_unix_ns: 0 }
    }

    pub(crate) fn push(&mut self, now: Now, kind: LogKind, key: &FullKey, tier: Option<Tier>) {
        let seq = self.next;
        self.next += 1;
        if self.cap == 0 {
            return;
        }
        if self.entries.len() == self.cap {
            self.entries.pop_front();
        }
        let unix_ns = now.unix_ns;
        self.entries.push_back(LogEntry { seq, unix_ns, kind, ns: key.ns, key: key.key, tier });
    }

    /// The entries, the newest first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = &LogEntry> {
        self.entries.iter().rev()
    }

    /// Whether every event since the store was opened is still there.
    pub(crate) fn is_complete(&self) -> bool {
        self.next == self.entries.len() as u64
    }

    /// From when on every event is there.
    pub(crate) fn since_unix_ns(&self) -> u64 {
        let first = self.entries.front().filter(|_| !self.is_complete());
        first.map_or(self.begun_unix_ns, |entry| entry.unix_ns)
    }

    /// The entries from number `from` on.
    pub(crate) fn since(&self, from: u64) -> Vec<LogEntry> {
        let skip = self.entries.partition_point(|e| e.seq < from);
        self.entries.range(skip..).copied().collect()
    }
}
