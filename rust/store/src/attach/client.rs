//! The attached process's side.

use super::hold::AttachedHold;
use super::link::Link;
use super::protocol::{MAX_KEYS, MAX_RELEASED};
use super::remote::Fault;
use crate::answers::{Health, Lookup, LookupMode};
use crate::hold::{GroupRule, hybrid_position};
use crate::machine::HoldId;
use crate::namespace::Namespace;
use crate::operator::{Question, Reply};
use crate::stats::Stats;
use crate::store::Store;
use std::path::{Path, PathBuf};
// Not parking_lot's locks: a child forked from this process could use none of its own then.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tiered_kv_io::Origin;
use tiered_kv_types::{BlockKey, Error, ErrorKind, NamespaceSpec, Result};

/// Releases that wait for the next call; of more, the owner hears when the connection ends.
const MAX_UNTOLD: usize = 64 << 10;

/// How a process attaches.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// How long a call waits for the owner, all its parts together.
    pub timeout: Duration,
}

impl Default for AttachOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_millis(300) }
    }
}

/// What has become of an attached store's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachCounters {
    /// Calls that the owner did not answer, or not in time; they were misses.
    pub unanswered: u64,
    /// Connections made, the first one included.
    pub connects: u64,
}

/// A store of another process, or of this one, by its directory: lookups, holds and statistics.
///
/// Where the owner is gone or does not answer in time, every key is a counted miss, and a later
/// call connects again. Threads may share one; their calls go one after the other.
#[derive(Debug)]
pub struct Attached {
    face: Arc<Face>,
}

impl Store {
    /// Attaches to the store that listens in `dir`, the first directory of its `nvme_paths`.
    ///
    /// # Errors
    /// `NotFound` where nobody listens there, `Io` where the owner does not answer, `Permission`
    /// for another user's, `InUse` where as many as may are attached, `Unsupported` for an owner of
    /// another version. Each names the directory and the remedy.
    pub fn attach(dir: impl AsRef<Path>) -> Result<Attached> {
        Attached::open(dir.as_ref(), AttachOptions::default())
    }
}

impl Attached {
    /// Like [`Store::attach`], with options.
    ///
    /// # Errors
    /// As [`Store::attach`]; `InvalidArgument` for a timeout of zero.
    pub fn open(dir: &Path, options: AttachOptions) -> Result<Self> {
        if options.timeout.is_zero() {
            let context = "`timeout` is 0: give the owner some time to answer";
            return Err(Error::new(ErrorKind::InvalidArgument, "attach", context));
        }
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
        let face = Face {
            dir,
            timeout: options.timeout,
            origin: Origin::here(),
            closed: AtomicBool::new(false),
            unanswered: AtomicU64::new(0),
            connects: AtomicU64::new(0),
            link: Mutex::new(Some(Link::default())),
            idle: Condvar::new(),
            untold: Mutex::new(Vec::new()),
        };
        let face = Arc::new(face);
        face.with_link(|_, _| Ok(())).map_err(|fault| fault.error(&face.dir))?;
        Ok(Self { face })
    }

    /// A namespace handle: keys, and the name of what is asked for. Nothing is made known to the
    /// owner.
    ///
    /// # Errors
    /// `InvalidArgument` for a field that is empty or too long; `Closed`.
    pub fn namespace(&self, spec: &NamespaceSpec) -> Result<Namespace> {
        self.check_open("namespace")?;
        Ok(Namespace { number: u32::MAX, core: 0, id: spec.id()?, layout: spec.layout.clone() })
    }

    /// Says where keys are; all absent where the owner does not say.
    pub fn lookup(&self, ns: &Namespace, keys: &[BlockKey], mode: LookupMode) -> Lookup {
        let prefix = mode == LookupMode::Prefix;
        let found = self.face.with_link(|link, until| {
            let mut found = Lookup::default();
            for keys in keys.chunks(MAX_KEYS) {
                let more = link.lookup(ns, keys, mode, until)?;
                let whole = more.hits == keys.len();
                let leading = found.hits == found.states.len();
                found.hits += if leading { more.hits } else { 0 };
                found.states.extend(more.states);
                found.infos.extend(more.infos);
                if prefix && !whole {
                    break;
                }
            }
            Ok(found)
        });
        found.unwrap_or_else(|_| Lookup::absent(keys.len(), mode))
    }

    /// Whether a `get` of one key would find it, as far as the owner says.
    pub fn contains(&self, ns: &Namespace, key: &BlockKey) -> bool {
        self.present(ns, &[*key]) == [true]
    }

    fn present(&self, ns: &Namespace, keys: &[BlockKey]) -> Vec<bool> {
        let there = self.face.with_link(|link, until| {
            let mut there = Vec::with_capacity(keys.len());
            for keys in keys.chunks(MAX_KEYS) {
                there.extend(link.present(ns, keys, until)?);
            }
            Ok(there)
        });
        there.unwrap_or_else(|_| vec![false; keys.len()])
    }

    /// As [`Store::lookup_hybrid`]; 0 where the owner does not say.
    ///
    /// # Errors
    /// `InvalidArgument` where the groups have different numbers of keys.
    pub fn lookup_hybrid(
        &self,
        ns: &Namespace,
        groups: &[(&[BlockKey], GroupRule)],
    ) -> Result<usize> {
        hybrid_position(groups, |keys| self.present(ns, keys))
    }

    /// Holds blocks on whatever tier they are, for at most `ttl` and a day; none where the owner
    /// does not say. The hold ends with the connection at the latest.
    ///
    /// # Errors
    /// `Closed`.
    pub fn hold(&self, ns: &Namespace, keys: &[BlockKey], ttl: Duration) -> Result<AttachedHold> {
        self.check_open("hold")?;
        let taken = self.face.with_link(|link, until| {
            let (mut holds, mut held) = (Vec::new(), Vec::with_capacity(keys.len()));
            for keys in keys.chunks(MAX_KEYS) {
                let (hold, more) = link.hold(ns, keys, ttl, until)?;
                holds.extend(hold);
                held.extend(more);
            }
            Ok((link.number, holds, held))
        });
        let none = |_| (0, Vec::new(), vec![false; keys.len()]);
        let (link, holds, held) = taken.unwrap_or_else(none);
        Ok(AttachedHold::new(self.face.clone(), link, holds, held))
    }

    /// The owner's counters and gauges.
    ///
    /// # Errors
    /// `Closed`; where the owner does not say, as [`Store::attach`].
    pub fn stats(&self) -> Result<Stats> {
        self.check_open("stats")?;
        self.face.with_link(Link::stats).map_err(|fault| fault.error(&self.face.dir))
    }

    /// State of the owner's parts.
    ///
    /// # Errors
    /// `Closed`; where the owner does not say, as [`Store::attach`].
    pub fn health(&self) -> Result<Health> {
        self.check_open("health")?;
        self.face.with_link(Link::health).map_err(|fault| fault.error(&self.face.dir))
    }

    pub(crate) fn operate(&self, question: &Question) -> Result<Reply> {
        self.check_open("operator")?;
        let asked = self.face.with_link(|link, until| link.operate(question, until));
        asked.map_err(|fault| fault.error(&self.face.dir))
    }

    /// Whether the owner was there a moment ago. One that is stopped is there.
    pub fn is_alive(&self) -> bool {
        !self.is_closed() && self.face.peek(Link::is_alive).unwrap_or(true)
    }

    /// Whether this takes no more calls; true in a forked child.
    pub fn is_closed(&self) -> bool {
        self.face.is_over()
    }

    /// Whether this process is a forked child of the one that attached.
    pub fn is_forked(&self) -> bool {
        self.face.origin.is_forked()
    }

    /// Identity of the store's first drive, as the owner said when it was last connected to.
    pub fn store_id(&self) -> String {
        self.face.peek(|link| link.store_id.clone()).unwrap_or_default()
    }

    /// The directory that was attached to.
    pub fn path(&self) -> &Path {
        &self.face.dir
    }

    /// What has become of the calls.
    pub fn counters(&self) -> AttachCounters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AttachCounters {
            unanswered: load(&self.face.unanswered),
            connects: load(&self.face.connects),
        }
    }

    /// Ends the connection and every hold. A second close does nothing, nor does one in a forked
    /// child.
    pub fn close(&self) {
        self.face.close();
    }

    /// Checks that calls are taken.
    ///
    /// # Errors
    /// `Closed`, also in a forked child of the process that attached.
    pub fn check_open(&self, op: &'static str) -> Result<()> {
        let remedy = if self.is_forked() {
            "the attached store belongs to the process that this one was forked from: attach here"
        } else if self.is_closed() {
            "the attached store is closed: attach again"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Closed, op, remedy))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.close();
    }
}

/// What an attached store and its holds share.
#[derive(Debug)]
pub(super) struct Face {
    dir: PathBuf,
    timeout: Duration,
    origin: Origin,
    closed: AtomicBool,
    unanswered: AtomicU64,
    connects: AtomicU64,
    /// Taken out by the call that uses it, so that no lock is held while it waits for the owner.
    link: Mutex<Option<Link>>,
    idle: Condvar,
    /// Holds that the owner is still to be told to release, with their connection's number.
    untold: Mutex<Vec<(u64, HoldId)>>,
}

/// Nothing is left half done where a thread has panicked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Face {
    fn is_over(&self) -> bool {
        self.origin.is_forked() || self.closed.load(Ordering::Acquire)
    }

    /// Runs `call` on the link, connected where it can be. A fault ends the connection.
    fn with_link<R>(
        &self,
        call: impl FnOnce(&mut Link, Instant) -> std::result::Result<R, Fault>,
    ) -> std::result::Result<R, Fault> {
        let now = Instant::now();
        let until = now.checked_add(self.timeout).unwrap_or(now + Duration::from_secs(86_400));
        let result = self.take_link(until).and_then(|mut link| {
            let result = link.reach(&self.dir, until).and_then(|connected| {
                self.connects.fetch_add(u64::from(connected), Ordering::Relaxed);
                self.tell(&mut link, until)?;
                call(&mut link, until)
            });
            if result.is_err() {
                link.part();
            }
            self.give_back(link);
            result
        });
        if result.is_err() {
            self.unanswered.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    fn take_link(&self, until: Instant) -> std::result::Result<Link, Fault> {
        if self.is_over() {
            return Err(Fault::Broken);
        }
        let mut slot = locked(&self.link);
        loop {
            if let Some(link) = slot.take() {
                return Ok(link);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::Silent);
            }
            let waited = self.idle.wait_timeout(slot, left);
            slot = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_back(&self, mut link: Link) {
        if self.closed.load(Ordering::Acquire) {
            link.part();
        }
        *locked(&self.link) = Some(link);
        self.idle.notify_one();
    }

    /// Looks at the link, unless a call is using it.
    fn peek<R>(&self, look: impl FnOnce(&Link) -> R) -> Option<R> {
        if self.origin.is_forked() {
            return None;
        }
        locked(&self.link).as_ref().map(look)
    }

    pub(super) fn is_link(&self, number: u64) -> bool {
        !self.is_over() && self.peek(|link| link.is(number)).unwrap_or(true)
    }

    /// Releases holds, or lets a later call do it where the owner does not answer now.
    pub(super) fn release(&self, link: u64, holds: &[HoldId]) {
        if self.is_over() {
            return;
        }
        let mut untold = locked(&self.untold);
        let room = MAX_UNTOLD.saturating_sub(untold.len());
        untold.extend(holds.iter().take(room).map(|hold| (link, *hold)));
        drop(untold);
        if self.peek(|now| now.is(link)).unwrap_or(true) {
            // The fault is counted; the owner has ended the holds with the connection.
            let _ = self.with_link(|_, _| Ok(()));
        }
    }

    /// Tells the owner of the holds that are to be released.
    fn tell(&self, link: &mut Link, until: Instant) -> std::result::Result<(), Fault> {
        let untold = std::mem::take(&mut *locked(&self.untold));
        // Those of an earlier connection have ended with it.
        let holds: Vec<HoldId> =
            untold.into_iter().filter(|(of, _)| *of == link.number).map(|(_, id)| id).collect();
        holds.chunks(MAX_RELEASED).try_for_each(|holds| link.release(holds, until))
    }

    fn close(&self) {
        if self.origin.is_forked() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // One that is in use parts when its call is over.
        if let Some(link) = locked(&self.link).as_mut() {
            link.part();
        }
    }
}
