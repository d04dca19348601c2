//! Calls dropped, cancelled or closed wherever they can wait: nobody touches the caller's memory
//! once it is the caller's again, and what is served afterwards is what was stored.

mod support;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use support::steps::{CANARY, Lent, Pen, REUSED, SteppedDisk, Steps, assert_pen};
use support::{BLOCK, blocks_of, bytes_of, chain, config, namespace, seams};
use tiered_kv::io_seams::MemDisk;
use tiered_kv::{
    AlignedBuf, BlockKey, Delete, GetOptions, IntoReport, Namespace, OnStall, Op, OpId, PutOptions,
    Region, Store,
};

const LONG: Duration = Duration::from_secs(60);
/// Over what is copied on the caller's own thread, so that copies wait too.
const BLOCKS: u32 = 6;
const GAP: usize = 4096;

/// How a caller turns away from a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Drop,
    Cancel,
    Close,
}

type Ended = Pin<Box<dyn Future<Output = ()>>>;

/// A store on a drive that has a chain of blocks, stopped after so many steps.
struct Bench {
    steps: Arc<Steps>,
    store: Arc<Store>,
    ns: Namespace,
    keys: Vec<BlockKey>,
    pen: Pen,
    region: Arc<Region>,
}

/// A call: its future, and its number where it is to be cancelled by that.
type Call = fn(&Bench, Way) -> (Ended, Option<OpId>);

/// A drive with a chain of blocks on it.
fn written() -> MemDisk {
    let disk = Arc::new(MemDisk::new());
    let config = config("/simulated".as_ref(), 4 << 20);
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let (ns, keys) = (namespace(&store), chain(&namespace(&store), 1, BLOCKS));
    let put = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), keys.len());
    store.close();
    disk.crash(|_| true)
}

impl Bench {
    fn new(disk: &MemDisk) -> Self {
        let steps = Steps::unlimited();
        let disk = SteppedDisk { inner: disk.crash(|_| true), steps: steps.clone() };
        let config = config("/simulated".as_ref(), 4 << 20);
        let store = Store::open_with(&config, &seams(Arc::new(disk))).expect("opens");
        let (ns, keys) = (namespace(&store), chain(&namespace(&store), 1, BLOCKS));
        let stride = BLOCK + GAP;
        let memory = AlignedBuf::new(keys.len() * stride).expect("memory");
        let region = store.register_strided(memory, BLOCK, stride).expect("valid");
        Self { steps, store, ns, keys, pen: Pen::default(), region }
    }

    /// Writes into every slot that the region gives back, as its caller would; says which those
    /// are.
    fn reuse_slots(&self) -> Vec<usize> {
        let reuse = |slot: &usize| self.region.write(*slot, |bytes| bytes.fill(REUSED)).is_ok();
        (0..self.keys.len()).filter(reuse).collect()
    }

    /// Lets everything go on, and waits until nothing of any call is left.
    fn settle(&self) {
        self.steps.open();
        let stats = || self.store.stats();
        wait_until(|| stats().calls == 0 && stats().loading_bytes == 0);
        // The result of a call that nobody waits for is dropped by the thread that ends it.
        wait_until(|| stats().leased_bytes == 0);
        wait_until(|| self.region.slots_used() == 0);
    }

    /// What is served is what was stored, `sure` blocks at least, and the books are right.
    fn check(&self, sure: usize, what: &str) {
        let fresh = chain(&self.ns, 2, BLOCKS);
        for (keys, sure) in [(&self.keys, sure), (&fresh, 0)] {
            let leases = self.store.get(&self.ns, keys, &GetOptions::default());
            for (at, item) in leases.expect("open").wait().items.iter().enumerate() {
                match item {
                    Ok(lease) => assert!(lease.as_slice() == bytes_of(&keys[at]), "{what}: {at}"),
                    Err(reason) => assert!(at >= sure, "{what}: {reason:?}"),
                }
            }
        }
        assert_eq!(self.store.audit().faults, Vec::<String>::new(), "{what}");
        assert_eq!(self.store.stats().leased_bytes, 0, "{what}");
    }
}

fn wait_until(holds: impl Fn() -> bool) {
    let until = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < until, "it never came");
        std::thread::yield_now();
    }
}

fn poll(ended: &mut Ended) -> Poll<()> {
    ended.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// The future of a call that tells its end by a function, and that function.
fn told<T: Send + 'static>(look: impl Fn(T) + 'static) -> (Ended, impl FnOnce(T) + Send + 'static) {
    let (sent, ended) = std::sync::mpsc::channel();
    let ended = poll_fn(move |_| match ended.try_recv() {
        Ok(value) => {
            look(value);
            Poll::Ready(())
        }
        Err(_) => Poll::Pending,
    });
    (Box::pin(ended), move |value| _ = sent.send(value))
}

fn awaited<T: 'static>(op: Op<T>, look: impl Fn(T) + 'static) -> Ended
where
    Op<T>: Future<Output = T>,
{
    Box::pin(async move { look(op.await) })
}

/// Stops one call after every number of steps that it takes, turns away from it there, uses the
/// memory again, and lets everything go on.
fn at_every_step(call: Call, n: usize, sure: usize) {
    let disk = written();
    for way in [Way::Drop, Way::Cancel, Way::Close] {
        let mut stopped = 0;
        for steps in 0.. {
            let bench = Bench::new(&disk);
            let what = format!("{way:?} after {steps} steps");
            bench.region_filled();
            bench.steps.allow(steps);
            let (mut ended, op) = call(&bench, way);
            let is_over = || bench.store.stats().calls == 0;
            wait_until(|| bench.steps.is_stuck() || is_over());
            let over = is_over();
            assert!(over || poll(&mut ended).is_pending(), "{what}");
            turn_away(&bench, way, ended, op);
            finish(bench, way, n, sure, &what);
            if over {
                break;
            }
            stopped += 1;
        }
        assert!(stopped > 2, "{way:?}: stopped at {stopped} places only");
    }
}

impl Bench {
    fn region_filled(&self) {
        for slot in 0..self.keys.len() {
            self.region.write(slot, |bytes| bytes.fill(CANARY)).expect("free");
        }
    }
}

fn turn_away(bench: &Bench, way: Way, mut ended: Ended, op: Option<OpId>) {
    match way {
        Way::Drop => drop(ended),
        Way::Cancel => {
            op.into_iter().for_each(|op| bench.store.cancel(op));
            bench.reuse_slots();
            bench.steps.open();
            while poll(&mut ended).is_pending() {
                std::thread::yield_now();
            }
        }
        Way::Close => {
            drop(ended);
            let closing = {
                let store = bench.store.clone();
                std::thread::spawn(move || store.close())
            };
            wait_until(|| bench.store.is_closed());
            bench.reuse_slots();
            bench.steps.open();
            closing.join().expect("it closes");
        }
    }
}

fn finish(bench: Bench, way: Way, n: usize, sure: usize, what: &str) {
    // What is free now is the caller's, whatever the device still does.
    let mut reused = bench.reuse_slots();
    bench.settle();
    for slot in 0..bench.keys.len() {
        if !reused.contains(&slot) {
            bench.region.write(slot, |bytes| bytes.fill(REUSED)).expect("it has come back");
            reused.push(slot);
        }
    }
    if way != Way::Close {
        bench.check(sure, what);
    }
    bench.store.close();
    assert_pen(&bench.pen, n, what);
    for slot in reused {
        let same = |bytes: &[u8]| bytes.iter().all(|byte| *byte == REUSED);
        assert!(bench.region.read(slot, same).expect("free"), "{what}: slot {slot} was written to");
    }
}

fn look_into(report: IntoReport<Lent>, keys: &[BlockKey]) {
    for ((item, buffer), key) in report.items.iter().zip(&report.buffers).zip(keys) {
        assert!(item.is_err() || buffer.content() == bytes_of(key), "filled with wrong bytes");
    }
}

#[test]
fn a_get_into_is_given_up_at_every_step() {
    let call: Call = |bench, way| {
        let Bench { steps, store, ns, keys, pen, .. } = bench;
        let (buffers, options) = (Lent::empty(keys.len(), pen, steps), GetOptions::default());
        let known = keys.clone();
        let look = move |report| look_into(report, &known);
        if way == Way::Drop {
            let op = store.get_into(ns, keys, buffers, &options).expect("open");
            return (awaited(op, look), None);
        }
        let (ended, done) = told(look);
        let op = store.get_into_with(ns, keys, buffers, &options, done).expect("open");
        (ended, Some(op))
    };
    at_every_step(call, BLOCKS as usize, BLOCKS as usize);
}

fn into_slots(bench: &Bench, way: Way, on_stall: OnStall) -> (Ended, Option<OpId>) {
    let Bench { store, ns, keys, region, .. } = bench;
    let slots = region.claim_all(&(0..keys.len()).collect::<Vec<_>>()).expect("free");
    let options = GetOptions { on_stall, ..GetOptions::default() };
    let known = keys.clone();
    let look = move |report: IntoReport<tiered_kv::RegionSlot>| {
        for ((item, slot), key) in report.items.iter().zip(&report.buffers).zip(&known) {
            assert!(item.is_err() || slot.as_slice() == bytes_of(key), "filled with wrong bytes");
        }
    };
    if way == Way::Drop {
        let op = store.get_into(ns, keys, slots, &options).expect("open");
        return (awaited(op, look), None);
    }
    let (ended, done) = told(look);
    (ended, Some(store.get_into_with(ns, keys, slots, &options, done).expect("open")))
}

#[test]
fn a_direct_read_is_given_up_at_every_step() {
    at_every_step(|bench, way| into_slots(bench, way, OnStall::Wait), 0, BLOCKS as usize);
}

#[test]
fn a_read_of_slots_through_memory_is_given_up_at_every_step() {
    at_every_step(|bench, way| into_slots(bench, way, OnStall::Bounce), 0, BLOCKS as usize);
}

#[test]
fn a_lease_is_given_up_at_every_step() {
    let call: Call = |bench, way| {
        let Bench { store, ns, keys, .. } = bench;
        let held = store.hold(ns, keys, LONG).expect("open");
        assert_eq!(held.hits(), keys.len());
        let options = GetOptions { hold: Some(held.id()), ..GetOptions::default() };
        let known = keys.clone();
        let look = move |leases: tiered_kv::Leases| {
            // The hold is the future's too, and goes with it.
            let _held = &held;
            for (item, key) in leases.items.iter().zip(&known) {
                let right = |lease: &tiered_kv::Lease| lease.as_slice() == bytes_of(key);
                assert!(item.as_ref().map_or(true, right), "a lease of wrong bytes");
            }
        };
        if way == Way::Drop {
            let op = store.get(ns, keys, &options).expect("open");
            return (awaited(op, look), None);
        }
        let (ended, done) = told(look);
        (ended, store.get_with(ns, keys, &options, done).expect("open"))
    };
    at_every_step(call, 0, BLOCKS as usize);
}

#[test]
fn a_put_is_given_up_at_every_step() {
    let call: Call = |bench, way| {
        let Bench { steps, store, ns, pen, .. } = bench;
        let keys = chain(ns, 2, BLOCKS);
        let source = Lent::full(&keys, pen, steps);
        let look = |report: tiered_kv::PutReport| assert_eq!(report.exists(), 0);
        let options = PutOptions::default();
        if way == Way::Drop {
            return (awaited(store.put(ns, &keys, source, &options).expect("open"), look), None);
        }
        let (ended, done) = told(look);
        let op = store.put_with(ns, &keys, Arc::new(source), &options, done).expect("open");
        (ended, Some(op))
    };
    at_every_step(call, BLOCKS as usize, BLOCKS as usize);
}

#[test]
fn a_delete_is_given_up_at_every_step_and_has_deleted() {
    let call: Call = |bench, way| {
        let Bench { store, ns, keys, .. } = bench;
        let what = Delete::Keys(keys[3..].to_vec());
        let gone = keys[3];
        let (store_too, ns_too) = (store.clone(), ns.clone());
        let look = move |_: tiered_kv::DeleteReport| assert!(!store_too.contains(&ns_too, &gone));
        if way == Way::Drop {
            return (awaited(store.delete(ns, &what).expect("open"), look), None);
        }
        let (ended, done) = told(look);
        (ended, Some(store.delete_with(ns, &what, None, done).expect("open")))
    };
    at_every_step(call, 0, 3);
}
