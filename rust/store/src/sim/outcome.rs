//! What the calls came back with, told to the oracle.

use super::checks::Held;
use super::memory::{Buffer, CANARY};
use super::oracle::Promised;
use super::world::{Call, World, version_of};
use crate::index::FullKey;
use crate::machine::{OpId, Outcome, PutStatus};
use crate::resident::Resident;
use std::sync::Arc;
use tiered_kv_types::{BlockKey, MissReason};

/// What a put was made with.
pub(super) struct PutCall {
    pub(super) keys: Vec<BlockKey>,
    pub(super) versions: Vec<u64>,
    pub(super) ns: u32,
    /// It waits where it is throttled.
    pub(super) waits: bool,
    pub(super) asked: u64,
    /// The log's number when it was called.
    pub(super) log: u64,
    /// Everything in its namespace was deleted since.
    pub(super) outdated: bool,
}

impl World {
    pub(super) fn completed(&mut self, op: OpId, outcome: Outcome) {
        let call = self.calls.remove(&op).expect("a call completes once");
        match (call, outcome) {
            (Call::Put(put), Outcome::Put(statuses)) => self.put_ended(put, statuses),
            (Call::Get { keys, ns, asked, choosy, .. }, Outcome::Get(items)) => {
                for (key, item) in keys.into_iter().zip(items) {
                    match item.result {
                        Ok(resident) => self.leased(ns, key, resident, asked),
                        Err(reason) => self.get_missed(key, reason, asked, choosy),
                    }
                }
            }
            (Call::Get { keys, ns, buffers, asked, choosy }, Outcome::Into(items)) => {
                for ((key, item), mut buffer) in keys.into_iter().zip(items).zip(buffers) {
                    // Panics where the memory is still out: the call must not have ended then.
                    let bytes = buffer.bytes();
                    match item {
                        Ok(_) => {
                            let version = version_of(&self.layouts[ns as usize], &key, bytes);
                            self.oracle.returned(key, version, asked);
                        }
                        Err(reason) => self.get_missed(key, reason, asked, choosy),
                    }
                    if let Buffer::Slot(mut slot) = buffer {
                        slot.as_mut_slice().fill(CANARY);
                        self.idle[ns as usize].push(slot);
                    }
                }
            }
            (Call::Flush { keys, asked }, Outcome::Flush(report)) => {
                if report.all_durable() {
                    self.all_durable(keys, asked);
                }
            }
            (Call::Delete { ns, doomed, asked }, Outcome::Deleted(report)) => {
                if report.durable {
                    self.check_buried(ns, &doomed);
                    self.oracle.deleted(ns, &doomed, asked);
                }
            }
            (Call::Hold { keys, expires }, Outcome::Held(id, held)) => {
                let keys = keys.into_iter().zip(held).filter_map(|(key, held)| held.then_some(key));
                self.holds.push(Held { id, keys: keys.collect(), expires });
            }
            (Call::Scrub, Outcome::Scrubbed(_)) => {}
            (_, outcome) => panic!("another kind of outcome: {outcome:?}"),
        }
    }

    fn put_ended(&mut self, put: PutCall, statuses: Vec<PutStatus>) {
        let PutCall { keys, versions, waits, asked, log, outdated, .. } = put;
        let at = self.now.mono;
        // When exactly it became visible is not known.
        let some_time = waits || (self.staging && keys.len() > 1);
        for ((key, version), status) in keys.into_iter().zip(versions).zip(statuses) {
            self.oracle.ended(key);
            match status {
                PutStatus::Stored => {
                    let alone = self.oracle.is_alone(&key, version, asked);
                    let late = outdated && !some_time && !self.staging;
                    assert!(!late, "{key:?}: begun before a delete of everything, stored after it");
                    if some_time {
                        self.oracle.stored_some_time(key, version, at);
                    } else {
                        self.oracle.stored(key, version, self.logged_before, at);
                    }
                    if self.staging && (alone || !some_time) {
                        self.oracle.stored_durably(key, log);
                    }
                }
                PutStatus::Ended | PutStatus::Failed if self.staging => {
                    self.oracle.unsure(key, at);
                }
                _ => {}
            }
        }
    }

    fn all_durable(&mut self, keys: Vec<Promised>, asked: u64) {
        self.figure("flushed_blocks", keys.len() as u64);
        self.oracle.durable(keys, asked);
    }

    fn get_missed(&mut self, key: BlockKey, reason: MissReason, asked: u64, choosy: bool) {
        let recompute = reason == MissReason::Recompute;
        assert!(!recompute || choosy, "{key:?}: its caller has not said what computing costs");
        self.figure("recomputed", u64::from(recompute));
        self.oracle.missed(key, reason, &self.log, asked);
    }

    fn leased(&mut self, ns: u32, key: BlockKey, resident: Arc<Resident>, asked: u64) {
        let bytes = bytes_of(&resident);
        let version = version_of(&self.layouts[ns as usize], &key, &bytes);
        self.oracle.returned(key, version, asked);
        if self.draw(3) == 0 {
            self.leases.push((key, version, resident));
        }
        // A lease is never invalidated: what it showed it still shows.
        for (key, version, lease) in &self.leases {
            let layout = &self.layouts[usize::from(key.0[9])];
            assert_eq!(version_of(layout, key, &bytes_of(lease)), *version);
        }
    }

    /// Blocks in memory as the read index gives them out, past the machine.
    pub(super) fn lookup(&mut self) {
        if self.staging {
            // What is in memory there only passes through.
            return;
        }
        let (ns, chain) = self.chain();
        // Everything that has ended did so before.
        let asked = self.now.mono + 1;
        for (key, _, _) in chain {
            if let Some(resident) = self.index.pin(&FullKey { ns, key }) {
                self.figure("looked_up", 1);
                self.leased(ns, key, resident, asked);
            }
        }
    }
}

fn bytes_of(resident: &Resident) -> Vec<u8> {
    (0..resident.slabs()).flat_map(|slab| resident.slab(slab).to_vec()).collect()
}
