//! Drives that stall or fail again and again: nobody waits for them, and they are tried again.

mod support;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::{GatedDisk, blocks_of, bytes_of, chain, config, namespace, seams};
use tiered_kv::io_seams::{DiskOp, MemDisk};
use tiered_kv::{
    BlockKey, DriveState, GetOptions, LookupMode, MissReason, PutOptions, Residency, Store,
    StoreConfig,
};

const LONG: Duration = Duration::from_secs(600);

fn put(store: &Store, keys: &[BlockKey]) {
    let ns = namespace(store);
    let put = store.put(&ns, keys, blocks_of(keys), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), keys.len());
}

fn fetch(store: &Store, keys: &[BlockKey]) -> Vec<Result<(), MissReason>> {
    let ns = namespace(store);
    let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
    let leases = store.get(&ns, keys, &options).expect("open").wait();
    let check = |(key, item): (&BlockKey, &Result<tiered_kv::Lease, MissReason>)| {
        item.as_ref().map_err(|reason| *reason).map(|lease| {
            assert_eq!(lease.as_slice(), bytes_of(key), "the bytes that were stored");
        })
    };
    keys.iter().zip(&leases.items).map(check).collect()
}

fn state(store: &Store) -> DriveState {
    store.health().drives[0].state
}

fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never came: {what}");
}

fn counter(store: &Store, name: &str) -> u64 {
    store.stats().counters.iter().find(|(n, _)| *n == name).expect(name).1
}

fn impatient() -> StoreConfig {
    StoreConfig {
        drive_stall_s: 0.05,
        drive_retry_s: 0.05,
        ..config("/simulated".as_ref(), 4 << 20)
    }
}

#[test]
fn case_15_the_circuit_of_a_stalled_drive_opens_and_closes_when_it_answers() {
    let disk = GatedDisk::new();
    let open = || Store::open_with(&impatient(), &seams(disk.clone())).expect("opens");
    let store = open();
    let ns = namespace(&store);
    let keys = chain(&ns, 1, 8);
    put(&store, &keys);
    store.close();
    drop((ns, store));
    let store = open();
    let ns = namespace(&store);
    disk.reads.store(0, Ordering::SeqCst);
    disk.shut_reads(true);
    // The call would wait ten minutes; it ends when the circuit opens.
    let got = fetch(&store, &keys[..4]);
    assert_eq!(got, vec![Err(MissReason::CircuitOpen); 4]);
    assert_eq!(state(&store), DriveState::CircuitOpen);
    let health = store.health();
    assert!(health.drive_paused, "writing pauses too");
    assert!(health.drives[0].fault.contains("no read was answered"), "{health:?}");
    let found = store.lookup(&ns, &keys, LookupMode::Each);
    assert_eq!(found.states, vec![Residency::Shut; 8], "case 33: nobody is told to come again");
    assert_eq!(found.hits, 0);
    // A probe or two at most has been added to the reads that stalled; other calls add none.
    let reads = disk.reads.load(Ordering::SeqCst);
    for _ in 0..8 {
        assert_eq!(fetch(&store, &keys), vec![Err(MissReason::CircuitOpen); 8]);
    }
    assert!(disk.reads.load(Ordering::SeqCst) <= reads.max(2), "two threads stall, no more");
    let more = chain(&ns, 2, 2);
    put(&store, &more);
    assert!(fetch(&store, &more).iter().all(Result::is_ok), "memory serves");
    let flushed = store.flush(Some(LONG)).expect("open").wait();
    assert!(!flushed.all_durable() && flushed.pending == 0, "{flushed:?}");
    disk.shut_reads(false);
    until("the drive is asked again", || state(&store) == DriveState::Working);
    assert!(fetch(&store, &keys).iter().all(Result::is_ok), "nothing was lost");
    put(&store, &chain(&ns, 3, 2));
    assert!(store.flush(Some(LONG)).expect("open").wait().all_durable(), "writing goes on");
    assert_eq!(counter(&store, "circuits_opened"), 1);
    assert_eq!(counter(&store, "circuits_closed"), 1);
    assert_eq!(store.audit().faults, Vec::<String>::new());
    assert_eq!(store.stats().loading_bytes, 0);
}

#[test]
fn case_33_reads_that_fail_open_the_circuit_and_a_probe_closes_it() {
    let disk = Arc::new(MemDisk::new());
    let open = || Store::open_with(&impatient(), &seams(disk.clone())).expect("opens");
    let store = open();
    let keys = chain(&namespace(&store), 1, 8);
    put(&store, &keys);
    store.close();
    drop(store);
    let store = open();
    let ns = namespace(&store);
    let reads = Arc::new(AtomicUsize::new(0));
    let seen = reads.clone();
    disk.set_fault(Some(Box::new(move |op| {
        let read = matches!(op, DiskOp::ReadAt { .. });
        seen.fetch_add(usize::from(read), Ordering::SeqCst);
        read.then(|| io::Error::other("planted"))
    })));
    for key in &keys[..3] {
        assert_eq!(fetch(&store, std::slice::from_ref(key)), [Err(MissReason::IoError)]);
    }
    assert_eq!(state(&store), DriveState::CircuitOpen);
    let fault = store.health().drives[0].fault.clone();
    assert!(fault.contains("3 reads in a row failed") && fault.contains("planted"), "{fault}");
    for key in &keys[3..] {
        assert_eq!(fetch(&store, std::slice::from_ref(key)), [Err(MissReason::CircuitOpen)]);
    }
    until("probes fail too", || counter(&store, "probes") >= 2);
    assert_eq!(state(&store), DriveState::CircuitOpen);
    disk.set_fault(None);
    until("a probe finds the drive well", || state(&store) == DriveState::Working);
    let ended: Vec<_> = fetch(&store, &keys);
    assert!(ended[..3].iter().all(|r| *r == Err(MissReason::Absent)), "until they are stored");
    assert!(ended[3..].iter().all(Result::is_ok), "what was not asked for was not dropped");
    assert_eq!(store.lookup(&ns, &keys, LookupMode::Prefix).hits, 0);
    put(&store, &keys[..3]);
    assert!(fetch(&store, &keys).iter().all(Result::is_ok), "the next store heals");
    assert_eq!(store.audit().faults, Vec::<String>::new());
}

#[test]
fn case_8_a_buffer_whose_read_failed_is_not_reported_filled_and_not_touched() {
    let disk = Arc::new(MemDisk::new());
    let open = || Store::open_with(&impatient(), &seams(disk.clone())).expect("opens");
    let store = open();
    let keys = chain(&namespace(&store), 1, 8);
    put(&store, &keys);
    store.close();
    drop(store);
    let store = open();
    // By place, not by count: how many of the reads are joined into one call depends on the moment,
    // as does the order in which they end; so two of them, where three in a row open the circuit.
    disk.set_fault(Some(Box::new(|op| match op {
        DiskOp::ReadAt { offset, len, .. } => {
            (offset / len as u64 % 4 == 1).then(|| io::Error::other("planted"))
        }
        _ => None,
    })));
    let canary = vec![vec![0xa5; support::BLOCK]; 8];
    let options = GetOptions { timeout: Some(LONG), ..GetOptions::default() };
    let ns = namespace(&store);
    let report = store.get_into(&ns, &keys, canary, &options).expect("open").wait();
    let mut failed = 0;
    for ((item, buffer), key) in report.items.iter().zip(&report.buffers).zip(&keys) {
        let whole = match item {
            Ok(_) => bytes_of(key),
            Err(reason) => {
                assert_eq!(*reason, MissReason::IoError);
                failed += 1;
                vec![0xa5; support::BLOCK]
            }
        };
        assert!(*buffer == whole, "{item:?}");
    }
    assert_eq!(failed, 2, "every fourth read");
    let stats = store.stats();
    let missed: u64 = stats.misses.iter().map(|(_, n)| n).sum();
    assert_eq!((stats.nvme.hits, missed, stats.requested), (6, 2, 8));
}

#[test]
fn a_cancelled_load_and_a_corrupt_block_open_no_circuit() {
    let disk = Arc::new(MemDisk::new());
    let open = || Store::open_with(&impatient(), &seams(disk.clone())).expect("opens");
    let store = open();
    let keys = chain(&namespace(&store), 1, 6);
    put(&store, &keys);
    store.close();
    drop(store);
    let store = open();
    disk.set_fault(Some(Box::new(|op| {
        let read = matches!(op, DiskOp::ReadAt { .. });
        read.then(|| io::ErrorKind::UnexpectedEof.into())
    })));
    let got = fetch(&store, &keys);
    assert_eq!(got, vec![Err(MissReason::Corrupt); 6], "the file is too short, the drive is well");
    assert_eq!((state(&store), counter(&store, "circuits_opened")), (DriveState::Working, 0));
}

/// A disk that takes everything and gives back something else.
struct Liar(MemDisk);

impl tiered_kv::io_seams::Disk for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }
    fn alignment(&self) -> tiered_kv::io_seams::Alignment {
        self.0.alignment()
    }
    fn is_direct(&self) -> bool {
        true
    }
    fn direct_reason(&self) -> String {
        String::new()
    }
    fn list(&self) -> tiered_kv::Result<Vec<(String, u64)>> {
        self.0.list()
    }
    fn read_file(&self, name: &str, max_bytes: u64) -> tiered_kv::Result<Option<Vec<u8>>> {
        self.0.read_file(name, max_bytes)
    }
    fn write_file(&self, name: &str, bytes: &[u8]) -> tiered_kv::Result<()> {
        self.0.write_file(name, bytes)
    }
    fn remove(&self, name: &str) -> tiered_kv::Result<()> {
        self.0.remove(name)
    }
    fn create(&self, name: &str, bytes: u64) -> tiered_kv::Result<tiered_kv::io_seams::FileId> {
        self.0.create(name, bytes)
    }
    fn open(&self, name: &str) -> tiered_kv::Result<(tiered_kv::io_seams::FileId, u64)> {
        self.0.open(name)
    }
    fn read_at(
        &self,
        file: tiered_kv::io_seams::FileId,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<()> {
        self.0.read_at(file, offset, buf)?;
        buf[77] ^= 1;
        Ok(())
    }
    fn write_at(
        &self,
        file: tiered_kv::io_seams::FileId,
        offset: u64,
        buf: &[u8],
    ) -> io::Result<()> {
        self.0.write_at(file, offset, buf)
    }
    fn sync(&self, file: tiered_kv::io_seams::FileId) -> io::Result<()> {
        self.0.sync(file)
    }
}

#[test]
fn case_20_a_drive_that_gives_back_something_else_is_refused_at_open() {
    let disk = Arc::new(Liar(MemDisk::new()));
    let config = config("/simulated".as_ref(), 4 << 20);
    let refused = Store::open_with(&config, &seams(disk.clone())).expect_err("the self-test fails");
    assert!(refused.to_string().contains("gave back something else"), "{refused}");
    let left = tiered_kv::io_seams::Disk::list(&*disk).expect("lists");
    assert!(left.iter().all(|(name, _)| !name.contains("selftest")), "{left:?}");
}

#[test]
fn case_20_a_tier_that_never_gets_anything_is_said_to() {
    let disk = Arc::new(MemDisk::new());
    let config = config("/simulated".as_ref(), 4 << 20);
    let store = Store::open_with(&config, &seams(disk.clone())).expect("opens");
    let ns = namespace(&store);
    assert_eq!(store.health().warnings, Vec::<String>::new());
    disk.set_fault(Some(Box::new(|op| {
        matches!(op, DiskOp::Create { .. }).then(|| io::ErrorKind::StorageFull.into())
    })));
    put(&store, &chain(&ns, 1, 4));
    store.flush(None).expect("open").wait();
    let warnings = store.health().warnings;
    assert!(warnings[0].contains("none became durable"), "{warnings:?}");
    for path in 100..124 {
        store.lookup(&ns, &chain(&ns, path, 200), LookupMode::Each);
    }
    let warnings = store.health().warnings;
    assert!(warnings[1].contains("compare the namespaces"), "{warnings:?}");
    assert!(fetch(&store, &chain(&ns, 1, 4)).iter().all(Result::is_ok));
    assert_eq!(store.health().warnings.len(), 1, "one hit, and it is in order");
}
