//! Which policy a store runs on, and the file in which the predictor keeps what it learned.

use crate::directory::Drive;
use crate::driver::Core;
use crate::machine::Machine;
use crate::store::Store;
use std::time::Duration;
use tiered_kv_io::Disk;
use tiered_kv_policy::beta::{PairPosterior, ages};
use tiered_kv_policy::{BetaOptions, Lru, Policy, Predictor};
use tiered_kv_types::learned::{self, LEARNED_HEAD_BYTES};
use tiered_kv_types::{EvictionPolicy, Result, StoreConfig};

/// The file's name.
pub(crate) const LEARNED: &str = "learned.tkv";
/// Bytes of the file: a 4096th of the capacity within these bounds.
const MIN_BYTES: u64 = 8 << 10;
const MAX_BYTES: u64 = 512 << 10;
/// Memory of the policy where the configuration names none: at least this, and a part of the bytes
/// of all tiers.
const DEFAULT_METADATA_BYTES: u64 = 64 << 20;
const METADATA_PART: u64 = 100;
/// How long a caller waits for the record's disk.
const RECORD_LIMIT: Duration = Duration::from_secs(5);

/// Most bytes of the file on a drive of `capacity` bytes.
pub(crate) fn file_bytes(capacity: u64) -> u64 {
    (capacity / 4096).clamp(MIN_BYTES, MAX_BYTES)
}

/// The policy that the configuration asks for, over tiers of so many bytes.
pub(crate) fn of_config(config: &StoreConfig, tiers_bytes: u64, seed: u64) -> Box<dyn Policy> {
    let options = match config.policy {
        EvictionPolicy::Beta => BetaOptions::DEFAULT,
        EvictionPolicy::BetaSpec => BetaOptions::SPEC,
        EvictionPolicy::Lru => return Box::new(Lru::new()),
    };
    let default = DEFAULT_METADATA_BYTES.max(tiers_bytes / METADATA_PART);
    let bytes = config.metadata_bytes.unwrap_or(default);
    Box::new(Predictor::new(options, bytes, seed))
}

/// Takes in what an earlier process learned: from the first drive that has it. What is damaged is
/// counted, and the predictor begins anew.
pub(crate) fn load(drives: &[Drive], machine: &mut Machine) {
    for drive in drives {
        match load_from(drive.disk.as_ref(), machine) {
            Some(true) => return,
            Some(false) => {
                tracing::warn!(dir = %drive.path.display(), "what was learned is damaged");
                machine.counters.learned_damaged += 1;
            }
            None => {}
        }
    }
}

/// Whether there was a file, and whether it was sound.
fn load_from(disk: &dyn Disk, machine: &mut Machine) -> Option<bool> {
    let predictor = machine.policy().predictor()?;
    let bytes = match disk.read_file(LEARNED, MAX_BYTES) {
        Ok(bytes) => bytes?,
        Err(err) => {
            tracing::warn!(%err, "what was learned cannot be read");
            return Some(false);
        }
    };
    Some(learned::decode(&bytes).valid().is_some_and(|payload| predictor.load(payload)))
}

/// Writes what was learned to the first drive that takes it.
pub(crate) fn save(drives: &[Drive], core: &Core) {
    for drive in drives {
        let most = usize::try_from(file_bytes(drive.slot_bytes())).unwrap_or(usize::MAX);
        let save = |predictor: &mut Predictor| predictor.save(most - LEARNED_HEAD_BYTES);
        let payload = core.with_machine(|m| m.policy().predictor().map(save));
        let Some(payload) = payload.filter(|payload| !payload.is_empty()) else { return };
        match drive.disk.write_file(LEARNED, &learned::encode(&payload)) {
            Ok(()) => return,
            Err(err) => tracing::warn!(%err, "what was learned was not written"),
        }
    }
}

/// What the predictor has learned.
#[derive(Clone, Debug)]
pub struct Learned {
    /// The policy's name.
    pub policy: &'static str,
    /// Requests that it has learned from, those of earlier processes included.
    pub requests: u64,
    /// Blocks that are remembered after they left.
    pub ghosts: u64,
    /// Where each age bucket of a hazard starts, in seconds; the last one is open.
    pub ages: Vec<f64>,
    /// The 16 pairs of a block type and a transition.
    pub pairs: Vec<PairPosterior>,
}

impl Store {
    /// Lets the policy take in what requests have told up to now, on this thread. One of the
    /// store's does so within some 10 ms anyway. Where requests are recorded it waits until these
    /// are in the file, for 5 s at most.
    pub fn learn(&self) {
        if !self.is_closed() {
            self.core.learn();
            self.core.wait_recorded(RECORD_LIMIT);
        }
    }

    /// What the predictor has learned up to this call; `None` where the store runs on another
    /// policy.
    ///
    /// # Errors
    /// `Closed`.
    pub fn predictor(&self) -> Result<Option<Learned>> {
        self.check_open("predictor")?;
        self.core.learn();
        // The quantiles take milliseconds, which no call shall wait for.
        let found = self.core.with_machine(|machine| {
            let policy = machine.policy();
            let name = policy.name();
            let of = |p: &mut Predictor| (name, p.requests(), p.ghosts() as u64, p.evidence());
            policy.predictor().map(of)
        });
        Ok(found.map(|(policy, requests, ghosts, evidence)| {
            let pairs = evidence.posterior().to_vec();
            Learned { policy, requests, ghosts, ages: ages().to_vec(), pairs }
        }))
    }
}
