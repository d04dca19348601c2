//! The seams through which time, randomness and threads enter the store.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tiered_kv_types::{Error, Result};

/// Nanoseconds of a monotonic clock with an arbitrary start.
pub type Nanos = u64;

/// Where the store reads the time.
pub trait Clock: Send + Sync + 'static {
    /// Monotonic nanoseconds since an arbitrary start.
    fn now(&self) -> Nanos;

    /// Nanoseconds since the Unix epoch; may step when the system's clock is set.
    fn unix_nanos(&self) -> u64;
}

/// The operating system's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Nanos {
        // One start for the whole process, so that all instances agree.
        static START: OnceLock<Instant> = OnceLock::new();
        saturating_nanos(START.get_or_init(Instant::now).elapsed().as_nanos())
    }

    fn unix_nanos(&self) -> u64 {
        // A clock before 1970 is a clock that was never set; zero says so.
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| saturating_nanos(since.as_nanos()))
    }
}

fn saturating_nanos(nanos: u128) -> u64 {
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

/// A clock that moves only when told to, for tests and simulation.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: AtomicU64,
    unix_start: u64,
}

impl ManualClock {
    /// A clock at monotonic zero, when the wall clock shows `unix_start_nanos`.
    pub fn new(unix_start_nanos: u64) -> Self {
        Self { now: AtomicU64::new(0), unix_start: unix_start_nanos }
    }

    /// Moves the clock to `now`; a time in the past is ignored, since the clock is monotonic.
    pub fn set(&self, now: Nanos) {
        self.now.fetch_max(now, Ordering::SeqCst);
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Nanos) {
        self.now.fetch_add(by, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Nanos {
        self.now.load(Ordering::SeqCst)
    }

    fn unix_nanos(&self) -> u64 {
        self.unix_start.saturating_add(self.now())
    }
}

/// Where the store draws random bytes.
pub trait Entropy: Send + Sync + 'static {
    /// Fills `out`.
    fn fill(&self, out: &mut [u8]);

    /// Draws eight bytes as an integer.
    fn next_u64(&self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}

/// The operating system's random source.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsEntropy;

impl Entropy for OsEntropy {
    /// # Panics
    /// If the operating system has no random source: identities drawn without one could collide.
    fn fill(&self, out: &mut [u8]) {
        getrandom::fill(out).expect("the operating system has a random source");
    }
}

/// A reproducible sequence (splitmix64) for tests and simulation; not for secrets.
#[derive(Debug)]
pub struct SeededEntropy {
    state: AtomicU64,
}

impl SeededEntropy {
    /// The sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: AtomicU64::new(seed) }
    }
}

impl Entropy for SeededEntropy {
    fn fill(&self, out: &mut [u8]) {
        for piece in out.chunks_mut(8) {
            piece.copy_from_slice(&self.next_u64().to_le_bytes()[..piece.len()]);
        }
    }

    fn next_u64(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.state.fetch_add(STEP, Ordering::SeqCst).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Where the store gets its threads.
pub trait Threads: Send + Sync + 'static {
    /// Starts a thread called `name` that runs `body`.
    ///
    /// # Errors
    /// The operating system's refusal; `body` is then dropped without having run.
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> Result<JoinHandle<()>>;
}

/// Threads of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsThreads;

impl Threads for OsThreads {
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> Result<JoinHandle<()>> {
        let context =
            format!("thread {name} did not start: raise the limit of processes (ulimit -u)");
        std::thread::Builder::new()
            .name(name)
            .spawn(body)
            .map_err(|err| Error::from_io("start thread", context, err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_clock_never_goes_back() {
        let clock = ManualClock::new(1_000);
        clock.advance(5);
        clock.set(3);
        assert_eq!((clock.now(), clock.unix_nanos()), (5, 1_005));
        clock.set(9);
        assert_eq!(clock.now(), 9);
    }

    #[test]
    fn system_clock_is_monotonic_across_instances() {
        let first = SystemClock.now();
        assert!(SystemClock.now() >= first);
        assert!(SystemClock.unix_nanos() > 1_600_000_000_000_000_000);
    }

    #[test]
    fn seeded_entropy_is_splitmix64() {
        // The first values of the published generator from seed 0.
        let entropy = SeededEntropy::new(0);
        assert_eq!(entropy.next_u64(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(entropy.next_u64(), 0x6e78_9e6a_a1b9_65f4);
        let mut bytes = [0; 11];
        SeededEntropy::new(0).fill(&mut bytes);
        assert_eq!(bytes[..8], 0xe220_a839_7b1d_cdaf_u64.to_le_bytes());
        assert_ne!(bytes[8..], [0; 3]);
    }

    #[test]
    fn os_entropy_fills_everything() {
        let mut bytes = [0_u8; 64];
        OsEntropy.fill(&mut bytes);
        assert_ne!(bytes[..32], [0; 32]);
        assert_ne!(bytes[32..], [0; 32]);
        assert_ne!(OsEntropy.next_u64(), OsEntropy.next_u64());
    }
}
