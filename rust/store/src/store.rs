//! The request path, top down: open, look up, get, put, flush, close.

use crate::answers::{GetOptions, Leases, Lookup, LookupMode, OnStall};
use crate::call::{
    BlockSource, Call, CloseReport, IntoReport, PutReport, Reply, WriteBuf, WriteBufs,
};
use crate::driver::{Core, in_caller};
use crate::index::{KEYS_A_TURN, Residency};
use crate::machine::{Event, FlushReport, GetTarget, OpId, Outcome, PutItem, Told};
use crate::namespace::{Namespace, PutOptions};
use crate::op::Op;
use crate::owner::{Handle, Owner};
use crate::request::{Request, RequestContext};
use crate::seams::Seams;
use crate::stats::FastCounters;
use std::any::TypeId;
use std::sync::Arc;
use std::time::Duration;
use tiered_kv_io::{Nanos, RegionSlot};
use tiered_kv_types::{BlockKey, Error, ErrorKind, MissReason, Result, StoreConfig};

/// What a forked child is told.
pub(crate) const FORKED: &str =
    "the store belongs to the process that this one was forked from: open another here";

/// A store of KV blocks over memory and NVMe: a handle on a core.
///
/// A second open of the same directories in a process is a second handle on the same core, which
/// closes with the last of them. Cheap to share behind an [`Arc`]; every method takes `&self` and
/// none of them blocks on I/O except [`Op::wait`], [`Store::close`], and dropping a handle, which
/// closes it.
pub struct Store {
    pub(crate) core: Arc<Core>,
    /// This handle's own deadlines; all else is the same in every handle.
    pub(crate) config: StoreConfig,
    pub(crate) owner: Arc<Owner>,
    pub(crate) handle: Arc<Handle>,
}

impl Store {
    /// Opens a store, finding again what a directory holds. Where this process has the same
    /// directories open, however they are spelled, it is one more handle on that store. An open
    /// waits for another open or close of them, for at most `close_timeout_s`.
    ///
    /// # Errors
    /// `Config` where a field is wrong, or contradicts the store that is open on the directories;
    /// `InUse` where another process has them, or that wait was in vain; `NotFound`, `Permission`,
    /// `FormatMismatch`, `NoSpace`. Each names the field and the remedy.
    pub fn open(config: &StoreConfig) -> Result<Arc<Self>> {
        Self::open_with(config, &Seams::default())
    }

    /// Opens a store on other seams than the operating system's.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_with(config: &StoreConfig, seams: &Seams) -> Result<Arc<Self>> {
        let owner = Owner::open(config, seams)?;
        let handle = Arc::new(Handle::new(owner.clone(), config));
        let core = owner.core.clone();
        Ok(Arc::new(Self { core, config: config.clone(), owner, handle }))
    }

    /// Begins a call of this handle.
    pub(crate) fn begin(&self, mut call: Call, event: impl FnOnce(OpId) -> Event) -> OpId {
        call.in_flight = Some(self.handle.calls.enter());
        let op = self.core.submit(call, event);
        if self.handle.calls.is_closed() {
            // Closed since it was checked: whoever closes may have looked before this call began.
            self.cancel(op);
        }
        op
    }

    /// Says where keys are. Takes no lock across keys, waits for nothing, and has no effect on what
    /// is evicted: engines repeat it every step. For a closed store, and in a forked child, every
    /// key is absent.
    pub fn lookup(&self, ns: &Namespace, keys: &[BlockKey], mode: LookupMode) -> Lookup {
        if self.is_closed() || ns.core != self.core.number {
            return Lookup::absent(keys.len(), mode);
        }
        self.core.lookup(ns.number, keys, mode)
    }

    /// Whether a `get` of one key would find it; never for a closed store or in a forked child.
    pub fn contains(&self, ns: &Namespace, key: &BlockKey) -> bool {
        let asked = !self.is_closed() && ns.core == self.core.number;
        asked && self.core.index.residency(&ns.full(*key)).0.is_hit()
    }

    /// Leases blocks, loading what is on the drive. A fault is a miss with a reason, never an
    /// error.
    ///
    /// # Errors
    /// `Unsupported` where `dram_capacity` is 0; `Closed`.
    pub fn get(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        options: &GetOptions,
    ) -> Result<Op<Leases>> {
        let (op, done) = Op::new();
        self.get_with(ns, keys, options, done)?;
        Ok(op)
    }

    /// Like [`Store::get`]; `done` runs on one of the core's threads, or before this returns where
    /// nothing has to be waited for. Returns the call's number where it is still in progress.
    ///
    /// # Errors
    /// `Closed`.
    pub fn get_with(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        options: &GetOptions,
        done: impl FnOnce(Leases) + Send + 'static,
    ) -> Result<Option<OpId>> {
        self.check_get(ns)?;
        if let Some(leases) = self.get_resident(ns, keys, options) {
            done(leases);
            return Ok(None);
        }
        FastCounters::add(&self.core.fast.requested, keys.len() as u64);
        let budget = self.core.budget.clone();
        let core = Arc::downgrade(&self.core);
        let reply: Reply = Box::new(move |outcome, _| {
            let Outcome::Get(found) = outcome else { unreachable!("a get ends as a get") };
            let mut leases = Leases { items: Vec::new(), sources: Vec::new() };
            for item in found {
                leases.sources.push(item.source);
                let lease = item
                    .result
                    .and_then(|resident| budget.lease(resident).ok_or(MissReason::LeaseCap));
                if let Some(core) = core.upgrade() {
                    core.fast.leased(item.source, lease.as_ref().map(|l| l.bytes()));
                }
                leases.items.push(lease);
            }
            done(leases);
        });
        let call = Call::plain(reply);
        Ok(Some(self.begin_get(ns, keys, options, call, GetTarget::Leases)))
    }

    fn begin_get(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        options: &GetOptions,
        call: Call,
        target: GetTarget,
    ) -> OpId {
        let deadline = self.deadline(options.timeout, self.config.load_timeout_s);
        if !options.in_request {
            self.core.count_access(ns.number, keys.into(), Told::BARE);
        }
        let recompute = self.recompute(ns, options);
        let (ns, keys, hold) = (ns.number, keys.to_vec(), options.hold);
        self.begin(call, |op| Event::Get { op, ns, keys, deadline, target, hold, recompute })
    }

    /// Nanoseconds in which the caller would compute one block.
    fn recompute(&self, ns: &Namespace, options: &GetOptions) -> Option<Nanos> {
        let by_rate = |rate: f64| f64::from(ns.layout().tokens_per_block()) / rate;
        let told = options.recompute.map(|time| time.as_secs_f64());
        let seconds = told.or_else(|| self.config.recompute_tokens_per_s.map(by_rate))?;
        Some((seconds * 1e9) as Nanos)
    }

    /// Brings blocks into the caller's buffers, verified. The buffers come back when neither the
    /// core nor the kernel touches them, whatever happened.
    ///
    /// Slots of a [`tiered_kv_io::Region`] are read into from a drive without a copy, as
    /// [`GetOptions::on_stall`] says; other buffers are filled by a copy.
    ///
    /// # Errors
    /// `InvalidArgument` for a wrong number or length of buffers; `Closed`.
    pub fn get_into<B: AsMut<[u8]> + Send + 'static>(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        buffers: Vec<B>,
        options: &GetOptions,
    ) -> Result<Op<IntoReport<B>>> {
        let (op, done) = Op::new();
        self.get_into_with(ns, keys, buffers, options, done)?;
        Ok(op)
    }

    /// Like [`Store::get_into`], with a function instead of an operation.
    ///
    /// # Errors
    /// As [`Store::get_into`].
    pub fn get_into_with<B: AsMut<[u8]> + Send + 'static>(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        mut buffers: Vec<B>,
        options: &GetOptions,
        done: impl FnOnce(IntoReport<B>) + Send + 'static,
    ) -> Result<OpId> {
        self.check_ns("get_into", ns)?;
        ns.check_count("get_into", "buffers", keys.len(), buffers.len())?;
        for (index, buffer) in buffers.iter_mut().enumerate() {
            ns.check_len("get_into", index, buffer.as_mut().len())?;
        }
        FastCounters::add(&self.core.fast.requested, keys.len() as u64);
        let slot = TypeId::of::<RegionSlot>();
        let buffers: WriteBufs =
            buffers.into_iter().map(|b| Some(Box::new(b) as Box<dyn WriteBuf>)).collect();
        let reply: Reply = Box::new(move |outcome, buffers| {
            let Outcome::Into(items) = outcome else { unreachable!("a get_into ends as one") };
            let back = |buffer: Option<Box<dyn WriteBuf>>| {
                let any = buffer.expect("every buffer has come back").into_any();
                *any.downcast::<B>().expect("the buffer that went in")
            };
            done(IntoReport { items, buffers: buffers.into_iter().map(back).collect() });
        });
        let call = Call { buffers, ..Call::plain(reply) };
        let direct = options.on_stall == OnStall::Wait && TypeId::of::<B>() == slot;
        let target = if direct { GetTarget::Slots } else { GetTarget::Buffers };
        Ok(self.begin_get(ns, keys, options, call, target))
    }

    /// Stores blocks. They become visible together, when all of them are complete; a block whose
    /// key is stored already is a counted no-op. Resolves when the bytes are captured: what is
    /// durable, `flush` says. Where `dram_capacity` is 0 it resolves when the blocks are durable,
    /// and one that could not be written is [`crate::PutStatus::Failed`].
    ///
    /// # Errors
    /// `InvalidArgument` for a wrong number or length of blocks or options; `Closed`.
    pub fn put(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        source: impl BlockSource,
        options: &PutOptions,
    ) -> Result<Op<PutReport>> {
        let (op, done) = Op::new();
        self.put_with(ns, keys, Arc::new(source), options, done)?;
        Ok(op)
    }

    /// Like [`Store::put`], with a function instead of an operation.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn put_with(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        source: Arc<dyn BlockSource>,
        options: &PutOptions,
        done: impl FnOnce(PutReport) + Send + 'static,
    ) -> Result<OpId> {
        self.check_ns("put", ns)?;
        ns.check_count("put", "blocks", keys.len(), source.blocks())?;
        for index in 0..keys.len() {
            ns.check_len("put", index, source.block(index).len())?;
        }
        let items = self.put_items(ns, keys, options)?;
        let deadline = self.deadline(options.timeout, self.config.put_timeout_s);
        let reply: Reply = Box::new(move |outcome, _| done(outcome.into_put()));
        let call = Call { source: Some(source), ..Call::plain(reply) };
        let wait = options.wait.map_or(0, |wait| self.deadline(Some(wait), 0.0));
        let ns = ns.number;
        let event = |op| Event::Put { op, ns, items, deadline, wait_until: wait };
        Ok(self.begin(call, event))
    }

    pub(crate) fn put_items(
        &self,
        ns: &Namespace,
        keys: &[BlockKey],
        options: &PutOptions,
    ) -> Result<Vec<PutItem>> {
        let parent = options.parent.map(|key| (key, self.core.index.residency(&ns.full(key))));
        // A parent that is stored tells its depth; one that is not is at least a root.
        let below =
            parent.map(
                |(_, (state, info))| {
                    if state == Residency::Absent { 1 } else { info.depth.saturating_add(1) }
                },
            );
        ns.put_items(keys, options, options.depth.max(below.unwrap_or(0)))
    }

    /// Waits until everything stored before this call is durable.
    ///
    /// # Errors
    /// `Closed`.
    pub fn flush(&self, timeout: Option<Duration>) -> Result<Op<FlushReport>> {
        let (op, done) = Op::new();
        self.flush_with(timeout, done)?;
        Ok(op)
    }

    /// Like [`Store::flush`], with a function instead of an operation.
    ///
    /// # Errors
    /// `Closed`.
    pub fn flush_with(
        &self,
        timeout: Option<Duration>,
        done: impl FnOnce(FlushReport) + Send + 'static,
    ) -> Result<OpId> {
        self.check_open("flush")?;
        let deadline = self.deadline(timeout, self.config.close_timeout_s);
        let reply: Reply = Box::new(move |outcome, _| done(outcome.into_flush()));
        let call = Call::plain(reply);
        Ok(self.begin(call, |op| Event::Flush { op, deadline }))
    }

    /// Cancels a call. It still ends through its own result, when the core no longer touches its
    /// memory.
    pub fn cancel(&self, op: OpId) {
        if !self.core.is_forked() {
            self.core.drive([Event::Cancel { op }]);
        }
    }

    /// Opens a request: its accesses are counted once, when it finishes.
    pub fn begin_request(&self, context: RequestContext) -> Request {
        Request::new(self.core.clone(), context)
    }

    /// Closes this handle: its calls in progress end, and later ones are refused. The last handle
    /// closes the store: it writes what is not durable yet until the deadline, and waits until
    /// nothing is in flight. Leases stay valid. A second close waits for the first and does nothing
    /// more; one in a forked child does nothing.
    ///
    /// From a function that the core calls, it returns at once and the close goes on elsewhere.
    pub fn close(&self) -> CloseReport {
        if self.core.is_forked() {
            return CloseReport::default();
        }
        if in_caller() {
            // The core waits for this thread: it would wait for itself.
            self.handle.close_elsewhere();
            return CloseReport::default();
        }
        self.handle.close()
    }

    /// Checks that the store takes calls.
    ///
    /// # Errors
    /// `Closed`, also in a forked child of the process that opened the store.
    pub fn check_open(&self, op: &'static str) -> Result<()> {
        let remedy = if self.core.is_forked() {
            FORKED
        } else if self.is_closed() {
            "the store is closed: open it again"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Closed, op, remedy))
    }

    /// Checks that there is a T1, for calls that cannot do without.
    pub(crate) fn check_dram(&self, op: &'static str, what: &str) -> Result<()> {
        if !self.owner.config.has_no_dram() {
            return Ok(());
        }
        let remedy = format!(
            "`dram_capacity` is 0 and {what} live in T1: use get_into and put, or give it bytes"
        );
        Err(Error::new(ErrorKind::Unsupported, op, remedy))
    }

    /// Checks that the store takes calls, and that the namespace was opened in it.
    pub(crate) fn check_ns(&self, op: &'static str, ns: &Namespace) -> Result<()> {
        self.check_open(op)?;
        if ns.core == self.core.number {
            return Ok(());
        }
        let context = "`ns` belongs to another store: open it in this one with namespace(spec)";
        Err(Error::new(ErrorKind::InvalidArgument, op, context))
    }

    pub(crate) fn deadline(&self, timeout: Option<Duration>, default_s: f64) -> Nanos {
        let wait = timeout.unwrap_or_else(|| Duration::from_secs_f64(default_s));
        let nanos = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        self.core.clock.now().saturating_add(nanos)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.core.is_forked() {
            // Dropping the core would wait for threads that are not here.
            std::mem::forget(self.handle.clone());
            return;
        }
        if !self.handle.calls.is_closed() {
            self.close();
        }
    }
}

impl Core {
    pub(crate) fn lookup(&self, ns: u32, keys: &[BlockKey], mode: LookupMode) -> Lookup {
        FastCounters::add(&self.fast.lookups, keys.len() as u64);
        let mut found = Lookup::default();
        let mut leading = true;
        for turn in keys.chunks(KEYS_A_TURN) {
            let tables = self.index.read();
            for key in turn {
                let (state, info) = tables.residency(ns, key);
                leading &= state.is_hit();
                if mode == LookupMode::Prefix && !leading {
                    return found;
                }
                found.hits += usize::from(leading);
                found.states.push(state);
                found.infos.push(info);
            }
        }
        found
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("config", &self.config).finish_non_exhaustive()
    }
}
