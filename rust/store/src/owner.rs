//! Who owns a core: one owner for each set of directories in a process, shared by its handles.

use crate::answers::Attachable;
use crate::attach::Listening;
use crate::call::{Call, CloseReport, Reply};
use crate::directory::Drive;
use crate::driver::Core;
use crate::machine::{Event, Outcome};
use crate::names::Names;
use crate::op::Op;
use crate::open::{OpenTimes, Opened};
use crate::operator::Jobs;
use crate::policy;
use crate::region::Regions;
use crate::registry;
use crate::seams::Seams;
use parking_lot::{Condvar, Mutex};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tiered_kv_io::{Arena, Nanos, Running, on_processors};
use tiered_kv_types::{Error, Result, StoreConfig};

/// A core and all that was opened with it.
pub(crate) struct Owner {
    pub(crate) core: Arc<Core>,
    pub(crate) drives: Vec<Drive>,
    pub(crate) lost: Vec<(PathBuf, Error)>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) times: OpenTimes,
    pub(crate) regions: Regions,
    /// What its namespaces stand for.
    pub(crate) names: Names,
    /// Deletes that operators began.
    pub(crate) jobs: Arc<Jobs>,
    /// The configuration of the handle that opened it.
    pub(crate) config: StoreConfig,
    /// Who listens for other processes, or why nobody does.
    attach: OnceLock<std::result::Result<Listening, String>>,
    /// Its number in the registry, where it has directories.
    claim: Option<u64>,
}

impl Owner {
    /// The owner of the configuration's directories: the one that has them open, or a new one.
    pub(crate) fn open(config: &StoreConfig, seams: &Seams) -> Result<Arc<Self>> {
        config.check()?;
        crate::open::check_origin()?;
        if config.nvme_paths.is_empty() || !seams.lock_directory {
            return Self::make(config, seams, None);
        }
        // A child forked meanwhile could not tell what the registry's lock guards.
        let _running = Running::begin();
        match registry::claim(config)? {
            registry::Claimed::Shared(owner) => Ok(owner),
            registry::Claimed::New(claim) => {
                let owner = Self::make(config, seams, Some(claim.number()))?;
                claim.opened(&owner);
                Ok(owner)
            }
        }
    }

    /// Makes a new one on the processors that the configuration names.
    fn make(config: &StoreConfig, seams: &Seams, claim: Option<u64>) -> Result<Arc<Self>> {
        match &config.cpus {
            None => Self::make_here(config, seams, claim),
            Some(cpus) => {
                let seams = seams.placed(cpus);
                on_processors(cpus, || Self::make_here(config, &seams, claim))?
            }
        }
    }

    fn make_here(config: &StoreConfig, seams: &Seams, claim: Option<u64>) -> Result<Arc<Self>> {
        let Opened { core, drives, lost, arena, times } = crate::open::open(config, seams)?;
        // A simulation has no directory to keep names in.
        let kept = drives.iter().filter(|_| seams.lock_directory);
        let (disks, ids) = kept.map(|drive| (drive.disk.clone(), drive.store_id())).unzip();
        let names = Names::load(disks, ids, config.nvme_capacity, seams);
        let (config, attach) = (config.clone(), OnceLock::new());
        let owner = Arc::new(Self {
            core,
            drives,
            lost,
            arena,
            times,
            regions: Regions::default(),
            names,
            jobs: Arc::default(),
            config,
            attach,
            claim,
        });
        let listening = match owner.drives.first() {
            Some(drive) if claim.is_some() => Listening::begin(&owner, &drive.path, seams),
            Some(_) => Err("the store's files are not in a directory".to_owned()),
            None => Err("a store without a directory has no place for a socket".to_owned()),
        };
        if let (Err(reason), true) = (&listening, claim.is_some()) {
            tracing::warn!(reason, "other processes cannot attach");
        }
        // Set once: nobody else has the owner yet.
        let _ = owner.attach.set(listening);
        Ok(owner)
    }

    /// Bytes of T1 in use, also where the configuration left them to the default.
    pub(crate) fn dram_bytes(&self) -> u64 {
        self.config.dram_capacity.unwrap_or_else(|| self.arena.capacity_bytes())
    }

    /// The first drive's identity, empty without one.
    pub(crate) fn store_id(&self) -> String {
        self.drives.first().map(Drive::store_id).unwrap_or_default()
    }

    /// Whether other processes can attach, and how many are.
    pub(crate) fn attachable(&self) -> Attachable {
        match self.attach.get() {
            Some(Ok(listening)) => listening.report(),
            Some(Err(reason)) => Attachable { reason: reason.clone(), ..Attachable::default() },
            None => Attachable::default(),
        }
    }

    /// Closes the core: ends calls in progress, writes what is not durable yet until the deadline,
    /// and waits until nothing is in flight.
    fn close(&self, deadline: Nanos) -> CloseReport {
        // Not before the directories are free for the next owner, whatever happens.
        let _left = self.claim.map(registry::Leaving::new);
        if let Some(Ok(listening)) = self.attach.get() {
            listening.end();
        }
        self.core.refuse_calls();
        // Before the close: each step after it would begin what closed drives refuse.
        self.core.learn();
        let (op, done) = Op::new();
        let reply: Reply = Box::new(move |outcome, _| {
            let Outcome::Closed(dropped) = outcome else { unreachable!("a close ends as one") };
            done(CloseReport { dropped });
        });
        self.core.submit(Call::plain(reply), |op| Event::Close { op, deadline });
        let report = op.wait();
        self.core.stop();
        self.core.end_failed();
        let left = deadline.saturating_sub(self.core.clock.now());
        self.core.end_recording(Duration::from_nanos(left));
        // Of a core that has failed nobody knows what it holds: the next open reads the tables.
        if self.core.failure().is_none() {
            policy::save(&self.drives, &self.core);
            self.write_checkpoints();
        }
        self.names.finish();
        for drive in &self.drives {
            drive.unlock();
        }
        report
    }

    /// Notes what each drive holds, so that the next open need not read every table. Where that
    /// fails, the next open reads them.
    fn write_checkpoints(&self) {
        let conditions = self.core.with_machine(|m| m.drive_conditions());
        for ((number, drive), condition) in (0..).zip(&self.drives).zip(conditions) {
            if !condition.is_well() {
                continue;
            }
            let checkpoint = self.core.with_machine(|m| m.checkpoint(number));
            if let Err(err) = drive.write_checkpoint(&checkpoint) {
                tracing::warn!(dir = %drive.path.display(), %err, "no checkpoint was written");
            }
        }
    }
}

/// One handle's part of an owner: whether it is closed, and what it has in progress.
pub(crate) struct Handle {
    pub(crate) owner: Arc<Owner>,
    pub(crate) calls: Arc<Calls>,
    close_timeout: Duration,
    /// Held by whoever closes the handle.
    closing: Mutex<()>,
}

impl Handle {
    pub(crate) fn new(owner: Arc<Owner>, config: &StoreConfig) -> Self {
        let close_timeout = Duration::from_secs_f64(config.close_timeout_s);
        Self { owner, calls: Arc::default(), close_timeout, closing: Mutex::new(()) }
    }

    /// Ends the handle, and the core with the last one. A second close waits for the first.
    pub(crate) fn close(&self) -> CloseReport {
        let _closing = self.closing.lock();
        if self.calls.closed.swap(true, Ordering::SeqCst) {
            return CloseReport::default();
        }
        // The registry's lock is in use meanwhile: see `Owner::open`.
        let _running = Running::begin();
        let core = &self.owner.core;
        if self.owner.claim.is_none_or(registry::leave) {
            let nanos = u64::try_from(self.close_timeout.as_nanos()).unwrap_or(u64::MAX);
            return self.owner.close(core.clock.now().saturating_add(nanos));
        }
        core.cancel_calls(&self.calls);
        self.calls.wait_none(self.close_timeout);
        CloseReport::default()
    }

    /// Like [`Handle::close`], on a thread of its own: for threads that the core waits for.
    pub(crate) fn close_elsewhere(self: &Arc<Self>) {
        let handle = self.clone();
        let body = move || {
            handle.close();
        };
        if let Err(err) = std::thread::Builder::new().name("tkv-close".into()).spawn(body) {
            tracing::error!(%err, "no thread could be had to close a store: it stays open");
        }
    }
}

/// The calls that one handle has in progress.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    closed: AtomicBool,
    running: AtomicUsize,
    /// Guards nothing but the wait for the last call.
    idle: Mutex<()>,
    ended: Condvar,
}

impl Calls {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    pub(crate) fn enter(self: &Arc<Self>) -> InFlight {
        self.running.fetch_add(1, Ordering::SeqCst);
        InFlight(self.clone())
    }

    fn wait_none(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut idle = self.idle.lock();
        while self.running.load(Ordering::SeqCst) > 0 {
            if self.ended.wait_until(&mut idle, until).timed_out() {
                tracing::warn!("calls of a closed handle are still in progress");
                return;
            }
        }
    }
}

/// A call of a handle, until its caller has been told of its end.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Calls>);

impl InFlight {
    pub(crate) fn is_of(&self, calls: &Arc<Calls>) -> bool {
        Arc::ptr_eq(&self.0, calls)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.is_closed() {
            // Under the lock, so that whoever waits is either before its check or already waiting.
            let _idle = self.0.idle.lock();
            self.0.ended.notify_all();
        }
    }
}
