//! The store on the predictor: hits beside a replay's, what it learned over restarts, the recorder.

mod support;

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use support::{config, memory_only, namespace};
use tiered_kv::io_seams::{ManualClock, SeededEntropy};
use tiered_kv::{
    BlockKey, ErrorKind, EvictionPolicy, GetOptions, KvLayout, LookupMode, Namespace,
    NamespaceSpec, PutOptions, RequestContext, ReuseStats, Seams, Store, StoreConfig,
};
use tiered_kv_policy::{Beta, BetaOptions, Cache, Request, Rng};
use tiered_kv_replay::read_path;

const LEARNED: &str = "learned.tkv";
const SECOND: u64 = 1_000_000_000;

/// A turn of a session, or a scan: session and length in blocks.
type Turn = (u32, u32);

/// 80 % of the accesses of sessions go to a fifth of them; every sixth request is a scan.
fn mixed(requests: u32) -> Vec<Turn> {
    let mut rng = Rng::new(5);
    let mut turns = vec![0u32; 240];
    let mut next_scan = 1000;
    let mut turn = |_| {
        if rng.below(6) == 0 {
            next_scan += 1;
            return (next_scan, 16);
        }
        let session = if rng.below(5) < 4 { rng.below(48) } else { 48 + rng.below(192) };
        turns[session] += 1;
        (session as u32, 4 + turns[session].min(8))
    };
    (0..requests).map(&mut turn).collect()
}

struct Served {
    store: Arc<Store>,
    ns: Namespace,
    clock: Arc<ManualClock>,
    hits: usize,
    accesses: usize,
}

const BLOCK: usize = 4096;

impl Served {
    fn open(config: &StoreConfig) -> Self {
        let clock = Arc::new(ManualClock::new(0));
        let entropy = Arc::new(SeededEntropy::new(3));
        let seams = Seams { clock: clock.clone(), entropy, ..Seams::default() };
        let store = Store::open_with(config, &seams).expect("opens");
        let layout = KvLayout::uniform(4, BLOCK as u64).expect("valid");
        let ns = store.namespace(&NamespaceSpec::new("m", "w", "f", layout)).expect("valid");
        Self { store, ns, clock, hits: 0, accesses: 0 }
    }

    fn keys(&self, (session, blocks): Turn) -> Vec<BlockKey> {
        let tokens: Vec<u32> = (0..blocks * 4).map(|at| session * 1000 + at).collect();
        self.ns.keys_from_tokens(&tokens, None)
    }

    /// As an engine does: look up, load, compute and store the rest, end the request.
    fn serve(&mut self, turn: Turn) {
        self.clock.advance(SECOND / 2);
        let (store, ns, keys) = (&self.store, &self.ns, self.keys(turn));
        let session = turn.0.to_string();
        let request = store.begin_request(RequestContext { session, ..Default::default() });
        request.observe(ns, &keys, 0);
        let hits = store.lookup(ns, &keys, LookupMode::Prefix).hits;
        let options = GetOptions { in_request: true, ..GetOptions::default() };
        let leases = store.get(ns, &keys[..hits], &options).expect("open").wait();
        assert_eq!(leases.hits(), hits);
        let parent = hits.checked_sub(1).map(|last| keys[last]);
        let options = PutOptions { parent, ..PutOptions::default() };
        let blocks = vec![vec![0u8; BLOCK]; keys.len() - hits];
        store.put(ns, &keys[hits..], blocks, &options).expect("open").wait();
        drop(leases);
        request.finish(0, 0);
        self.hits += hits;
        self.accesses += keys.len();
        self.store.learn();
    }
}

fn percent(hits: usize, accesses: usize) -> f64 {
    100.0 * hits as f64 / accesses as f64
}

/// What was recorded, replayed: hits and accesses.
fn replayed(path: &Path, cache: &mut dyn Cache) -> (usize, usize) {
    let trace = read_path(path).expect("a trace");
    assert_eq!(trace.unchained, 0, "ids stand for prefixes");
    let (mut hits, mut accesses, mut blocks) = (0, 0, Vec::new());
    for entry in trace.entries() {
        trace.blocks(entry, false, &mut blocks);
        accesses += blocks.len();
        hits += cache.request(&Request {
            now: entry.now,
            session: entry.session.map(u64::from),
            kind: entry.kind,
            blocks: &blocks,
            prompt: entry.prompt as usize,
            types: &[],
            input_tokens: entry.input_tokens,
            output_tokens: entry.output_tokens,
            block_tokens: trace.block_tokens,
        });
    }
    (hits, accesses)
}

#[test]
fn a_mixed_workload_hits_what_a_replay_of_its_record_hits() {
    let dir = tempfile::tempdir().expect("a directory");
    let record = dir.path().join("requests.jsonl");
    let config = StoreConfig { record: Some(record.clone()), ..memory_only(4 << 20) };
    let mut served = Served::open(&config);
    mixed(6000).into_iter().for_each(|turn| served.serve(turn));
    served.store.learn();
    let slots = served.store.stats().dram.capacity_bytes as usize / BLOCK;
    let mut beta = Beta::new(slots, BetaOptions::DEFAULT, 1);
    let (hits, accesses) = replayed(&record, &mut beta);
    assert_eq!(accesses, served.accesses, "every access is in the record");
    let (replay, store) = (percent(hits, accesses), percent(served.hits, accesses));
    assert!((replay - store).abs() <= 1.0, "the store hits {store} %, its replay {replay} %");
    let lru = StoreConfig { policy: EvictionPolicy::Lru, ..memory_only(4 << 20) };
    let mut other = Served::open(&lru);
    mixed(6000).into_iter().for_each(|turn| other.serve(turn));
    let lru = percent(other.hits, other.accesses);
    assert!(store > lru + 1.0, "{store} %, in the order of use {lru} %");
    assert_eq!(served.store.audit().faults, Vec::<String>::new());
    let seen = served.store.stats();
    let sums = |rows: &[ReuseStats]| {
        let predicted: f64 = rows.iter().map(|row| row.predicted).sum();
        (predicted, rows.iter().map(|row| row.reuses).sum::<u64>())
    };
    let (predicted, reuses) = sums(&seen.reuses_by_pair);
    assert!(reuses > 30, "{seen:?}");
    assert!((predicted / reuses as f64 - 1.0).abs() < 0.5, "{predicted} predicted, {reuses} came");
    assert_eq!(sums(&seen.reuses_by_chance).1, reuses);
    assert_eq!(other.store.stats().reuses_by_pair, [], "nothing is predicted");
}

#[test]
fn a_record_is_private_bounded_and_without_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let record = dir.path().join("requests.jsonl");
    let config =
        StoreConfig { record: Some(record.clone()), record_bytes: 20_000, ..memory_only(1 << 20) };
    let served = Served::open(&config);
    let keys = served.keys((1, 4));
    for number in 0..500 {
        served.clock.advance(SECOND);
        let session = "secret".to_owned();
        let context = RequestContext { session, kind: "agent".to_owned(), ..Default::default() };
        let request = served.store.begin_request(context);
        request.observe(&served.ns, &keys, 0);
        request.finish(number, 0);
        served.store.learn();
    }
    let text = fs::read_to_string(&record).expect("text");
    assert!(text.len() <= 20_000 && text.len() > 19_000, "{} bytes", text.len());
    assert!(!text.contains("secret") && text.ends_with('\n'));
    let mode = fs::metadata(&record).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let trace = read_path(&record).expect("what is in it is whole");
    assert_eq!((trace.sessions(), trace.unique_blocks, trace.block_tokens), (1, 4, 4));
    let first = trace.entries()[1];
    assert_eq!((first.input_tokens, first.output_tokens), (16, 1));
    drop(served);
    let again = Served::open(&config);
    assert_eq!(fs::metadata(&record).expect("there").len(), text.len() as u64, "full stays full");
    drop(again);
    let nowhere = StoreConfig { record: Some(dir.path().join("no/file")), ..memory_only(1 << 20) };
    let err = Store::open(&nowhere).expect_err("no directory");
    assert!(err.kind() == ErrorKind::Config && err.to_string().contains("`record`"), "{err}");
}

/// A store of `dir` that a session used 40 times, closed: requests and reuses learned.
fn teach(config: &StoreConfig) -> (u64, f64) {
    let store = Store::open(config).expect("opens");
    let ns = namespace(&store);
    let keys = support::chain(&ns, 1, 4);
    for _ in 0..40 {
        let session = "one".to_owned();
        let request = store.begin_request(RequestContext { session, ..Default::default() });
        request.observe(&ns, &keys, 0);
        request.finish(7, 0);
    }
    let found = learned(&store);
    store.close();
    found
}

fn learned(store: &Store) -> (u64, f64) {
    let learned = store.predictor().expect("open").expect("it predicts");
    assert_eq!((learned.pairs.len(), learned.ages.len()), (16, 56));
    (learned.requests, learned.pairs.iter().map(|pair| pair.reuses).sum())
}

fn damaged(store: &Store) -> u64 {
    let counters = store.stats().counters;
    counters.iter().find(|(name, _)| *name == "learned_damaged").expect("there").1
}

#[test]
fn what_was_learned_outlives_the_store() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(dir.path(), 4 << 20);
    let (requests, reuses) = teach(&config);
    assert!(requests == 40 && reuses > 30.0, "{requests} {reuses}");
    let path = dir.path().join(LEARNED);
    let meta = fs::metadata(&path).expect("a file");
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    assert!(meta.len() <= 8 << 10, "{} bytes", meta.len());
    let store = Store::open(&config).expect("opens");
    let (again, kept) = learned(&store);
    assert!(again == 40 && (kept - reuses).abs() < 1e-3, "{kept} of {reuses}");
    assert_eq!(damaged(&store), 0);
    store.close();
    // Another policy leaves it alone.
    let lru = StoreConfig { policy: EvictionPolicy::Lru, ..config.clone() };
    let store = Store::open(&lru).expect("opens");
    assert!(store.predictor().expect("open").is_none());
    store.close();
    assert_eq!(fs::metadata(&path).expect("still there").len(), meta.len());
}

#[test]
fn a_damaged_file_is_a_fresh_start_and_no_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = config(dir.path(), 4 << 20);
    teach(&config);
    let path = dir.path().join(LEARNED);
    let sound = fs::read(&path).expect("a file");
    // A byte of every region: magic, version, checksum, length, counts; and the last one.
    let mut places: Vec<usize> = (0..40).step_by(3).collect();
    places.extend((40..sound.len()).step_by(sound.len() / 12));
    places.push(sound.len() - 1);
    for at in places {
        fs::write(&path, &sound).expect("written");
        let mut file = fs::OpenOptions::new().write(true).open(&path).expect("opens");
        file.seek(SeekFrom::Start(at as u64)).expect("seeks");
        file.write_all(&[sound[at] ^ 0x10]).expect("written");
        drop(file);
        let store = Store::open(&config).expect("a damaged file is no error");
        assert_eq!((learned(&store).0, damaged(&store)), (0, 1), "byte {at}");
        // Nothing was learned, which is no reason to keep what is damaged.
        store.close();
        let bent = Some(sound[at] ^ 0x10);
        assert_ne!(fs::read(&path).expect("a file").get(at).copied(), bent, "byte {at}");
    }
    for bytes in [vec![], sound[..20].to_vec(), vec![7; 1 << 20]] {
        fs::write(&path, &bytes).expect("written");
        let store = Store::open(&config).expect("opens");
        assert_eq!((learned(&store).0, damaged(&store)), (0, 1), "{} bytes", bytes.len());
    }
    fs::remove_file(&path).expect("removed");
    let store = Store::open(&config).expect("opens");
    assert_eq!((learned(&store).0, damaged(&store)), (0, 0), "nothing is not damage");
}

#[test]
fn metadata_is_in_the_statistics_and_its_bound_is_checked() {
    let config = StoreConfig { metadata_bytes: Some(4 << 20), ..memory_only(1 << 20) };
    let served = Served::open(&config);
    for session in 0..400 {
        let keys = served.keys((session, 64));
        let request = served.store.begin_request(RequestContext::default());
        request.observe(&served.ns, &keys, 0);
        request.finish(0, 0);
        served.store.learn();
        let bytes = served.store.stats().metadata_bytes;
        assert!(bytes > 500 << 10 && bytes <= 4 << 20, "{bytes} bytes");
    }
    let learned = served.store.predictor().expect("open").expect("it predicts");
    assert!((1000..20_000).contains(&learned.ghosts), "{} are remembered", learned.ghosts);
    let less = StoreConfig { metadata_bytes: Some(1 << 20), ..config };
    let err = less.check().expect_err("too little");
    assert!(err.to_string().contains("`metadata_bytes`"), "{err}");
    let unknown = StoreConfig::from_toml("dram_capacity = 1048576\npolicy = \"mru\"", []);
    let err = unknown.expect_err("no such policy").to_string();
    assert!(err.contains("policy") && err.contains("beta-spec"), "{err}");
    let spec = StoreConfig { policy: EvictionPolicy::BetaSpec, ..memory_only(1 << 20) };
    let store = Store::open(&spec).expect("opens");
    assert_eq!(store.predictor().expect("open").expect("it predicts").policy, "beta-spec");
}

#[test]
fn a_record_whose_disk_does_not_answer_stops_nobody() {
    let dir = tempfile::tempdir().expect("a directory");
    let record = dir.path().join("requests.jsonl");
    assert!(Command::new("mkfifo").arg(&record).status().expect("runs").success());
    // A pipe that nobody reads takes 64 KiB, and then does not answer.
    let reader = fs::OpenOptions::new().read(true).write(true).open(&record).expect("opens");
    let store = Store::open(&StoreConfig { record: Some(record), ..memory_only(1 << 20) });
    let store = store.expect("opens");
    let ns = namespace(&store);
    let keys = support::chain(&ns, 1, 64);
    let (done, ended) = mpsc::channel();
    let asking = store.clone();
    std::thread::spawn(move || {
        for _ in 0..200 {
            let request = asking.begin_request(RequestContext::default());
            request.observe(&ns, &keys, 0);
            request.finish(0, 0);
            asking.predictor().expect("open");
        }
        let _ = done.send(learned(&asking).0);
    });
    let requests = ended.recv_timeout(Duration::from_secs(60)).expect("the store goes on");
    assert_eq!(requests, 200);
    std::thread::spawn(move || std::io::copy(&mut &reader, &mut std::io::sink()));
    store.close();
}

#[test]
fn a_request_claims_what_is_before_it_though_no_request_named_that() {
    let store = Store::open(&memory_only(1 << 20)).expect("opens");
    let ns = namespace(&store);
    let keys = support::chain(&ns, 1, 4);
    let put = store.put(&ns, &keys, support::blocks_of(&keys), &PutOptions::default());
    assert_eq!(put.expect("open").wait().stored(), 4);
    for used in [&keys[2..], &keys[..]] {
        let session = "one".to_owned();
        let request = store.begin_request(RequestContext { session, ..Default::default() });
        request.observe(&ns, used, 0);
        request.finish(0, 0);
    }
    let (requests, reuses) = learned(&store);
    // A second chain would be four new blocks.
    assert!(requests == 2 && reuses > 0.5, "{reuses} reuses");
}

fn record_one(config: &StoreConfig, clock: u64, block: u32) {
    let clock = Arc::new(ManualClock::new(clock));
    let seams = Seams { clock, ..Seams::default() };
    let store = Store::open_with(config, &seams).expect("opens");
    let layout = KvLayout::uniform(block, BLOCK as u64).expect("valid");
    let ns = store.namespace(&NamespaceSpec::new("m", "w", "f", layout)).expect("valid");
    let keys = ns.keys_from_tokens(&(0..16).collect::<Vec<u32>>(), None);
    let request = store.begin_request(RequestContext::default());
    request.observe(&ns, &keys, 0);
    request.finish(0, 0);
    store.close();
}

#[test]
fn a_record_is_continued_so_that_a_replay_takes_all_of_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let record = dir.path().join("requests.jsonl");
    let config = StoreConfig { record: Some(record.clone()), ..memory_only(1 << 20) };
    record_one(&config, 1_000 * SECOND, 4);
    let whole = fs::read_to_string(&record).expect("text");
    // A process was killed in the midst of a line, the clock was set back, another block size.
    for left in ["{\"timest", &whole[..whole.len() / 2]] {
        let before = fs::read_to_string(&record).expect("text");
        fs::write(&record, format!("{before}{left}")).expect("written");
        fs::set_permissions(&record, fs::Permissions::from_mode(0o644)).expect("set");
        record_one(&config, SECOND, 8);
        let after = fs::read_to_string(&record).expect("text");
        assert!(after.starts_with(&before) && after.len() > before.len(), "{after}");
        let mode = fs::metadata(&record).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    let trace = read_path(&record).expect("all of it is one trace");
    assert_eq!((trace.entries().len(), trace.block_tokens), (3, 4));
    fs::write(&record, &whole[..20]).expect("written");
    record_one(&config, SECOND, 4);
    assert_eq!(read_path(&record).expect("a trace").entries().len(), 1, "half a line alone");
    let held = Store::open(&config).expect("opens");
    let err = Store::open(&config).expect_err("one store a file").to_string();
    assert!(err.contains("`record`") && err.contains("another store's"), "{err}");
    drop(held);
    for foreign in ["notes\n", "no newline", "\n", "{\"timestamp\":x}\n"] {
        fs::write(&record, foreign).expect("written");
        let err = Store::open(&config).expect_err("not a record").to_string();
        assert!(err.contains("`record`"), "{err}");
        assert_eq!(fs::read_to_string(&record).expect("text"), foreign, "it is left alone");
    }
}

#[test]
fn the_newest_of_what_drives_have_learned_counts() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    let both = StoreConfig { nvme_paths: paths.to_vec(), ..config(dir.path(), 4 << 20) };
    let (old, _) = teach(&both);
    let path = |at: usize| paths[at].join(LEARNED);
    assert!(path(0).exists() && !path(1).exists());
    let earlier = fs::read(path(0)).expect("a file");
    assert_eq!(teach(&both).0, 2 * old);
    // The first drive was away meanwhile: what the second has is newer.
    fs::rename(path(0), path(1)).expect("moved");
    fs::write(path(0), &earlier).expect("written");
    let store = Store::open(&both).expect("opens");
    assert_eq!((learned(&store).0, damaged(&store)), (2 * old, 0));
    store.close();
    assert!(path(0).exists() && !path(1).exists(), "one is left");
    // What another policy learned is no damage.
    let spec = StoreConfig { policy: EvictionPolicy::BetaSpec, ..both };
    let store = Store::open(&spec).expect("opens");
    assert_eq!((learned(&store).0, damaged(&store)), (0, 0));
}
