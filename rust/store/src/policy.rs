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
use tiered_kv_types::record::Decoded;
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

/// What a drive has of what was learned.
enum Found {
    Absent,
    /// Another policy's.
    Other,
    Damaged,
    /// When it was saved, and what.
    Sound(u64, Vec<u8>),
}

fn read(disk: &dyn Disk, predictor: &Predictor) -> Found {
    let bytes = match disk.read_file(LEARNED, MAX_BYTES) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Found::Absent,
        Err(err) => {
            tracing::warn!(%err, "what was learned cannot be read");
            return Found::Damaged;
        }
    };
    match learned::decode(&bytes) {
        Decoded::Valid((_, payload)) if predictor.is_of_another(payload) => Found::Other,
        Decoded::Valid((saved, payload)) => Found::Sound(saved, payload.to_vec()),
        _ => Found::Damaged,
    }
}

/// Takes in what an earlier process learned: the newest of what the drives have. What is damaged is
/// counted; where nothing is sound the predictor begins anew.
pub(crate) fn load(drives: &[Drive], machine: &mut Machine) {
    let Some(predictor) = machine.policy().predictor() else { return };
    let (mut sound, mut damaged) = (Vec::new(), 0);
    for drive in drives {
        match read(drive.disk.as_ref(), predictor) {
            Found::Sound(saved, payload) => sound.push((saved, payload)),
            Found::Damaged => {
                tracing::warn!(dir = %drive.path.display(), "what was learned is damaged");
                damaged += 1;
            }
            Found::Other => {
                tracing::info!(dir = %drive.path.display(), "another policy has learned here");
            }
            Found::Absent => {}
        }
    }
    sound.sort_by_key(|(saved, _)| std::cmp::Reverse(*saved));
    let refused = sound.iter().take_while(|(_, payload)| !predictor.load(payload)).count();
    machine.counters.learned_damaged += damaged + refused as u64;
}

/// Writes what was learned to the first drive that takes it, and removes what others have.
pub(crate) fn save(drives: &[Drive], core: &Core) {
    // Later than what is there, though the clock may have been set back.
    let saved = |drive: &Drive| {
        let bytes = drive.disk.read_file(LEARNED, MAX_BYTES).ok().flatten()?;
        learned::decode(&bytes).valid().map(|(saved, _)| saved)
    };
    let newest = drives.iter().filter_map(saved).max().unwrap_or(0);
    let now = core.clock.unix_nanos().max(newest.saturating_add(1));
    for (number, drive) in drives.iter().enumerate() {
        let most = usize::try_from(file_bytes(drive.slot_bytes())).unwrap_or(usize::MAX);
        let save = |predictor: &mut Predictor| predictor.save(most - LEARNED_HEAD_BYTES);
        let payload = core.with_machine(|m| m.policy().predictor().map(save));
        let Some(payload) = payload.filter(|payload| !payload.is_empty()) else { return };
        if let Err(err) = drive.disk.write_file(LEARNED, &learned::encode(&payload, now)) {
            tracing::warn!(%err, "what was learned was not written");
            continue;
        }
        for (_, other) in drives.iter().enumerate().filter(|(other, _)| *other != number) {
            if let Ok(Some(_)) = other.disk.read_file(LEARNED, MAX_BYTES)
                && let Err(err) = other.disk.remove(LEARNED)
            {
                tracing::warn!(%err, "what was learned earlier was not removed");
            }
        }
        return;
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
