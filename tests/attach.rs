//! Attaching from another process: a child of the test's own, killed, stopped and restarted.

mod support;

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use support::{BLOCK, blocks_of, chain, config, namespace, spec};
use tiered_kv::{
    AttachOptions, Attached, BlockKey, ErrorKind, GroupRule, LookupMode, Namespace, PutOptions,
    Residency, Store, Tier,
};

const LONG: Duration = Duration::from_secs(60);
const CHILD: &str = "TIERED_KV_TEST_CHILD";

/// The directory that this process is a child for, where it is one.
fn child_path() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

/// A child process that runs `test` of this file and has said that it is ready.
struct Other {
    child: Child,
    /// Read to its end, or the child could not write any more.
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(test: &str, dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let ready = output.by_ref().lines().any(|line| line.expect("text").ends_with("ready"));
        assert!(ready, "the child is not ready");
        Self { child, output }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Stops every thread of the child.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.expect("a thread").path().join("stat"));
            stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|s| s.starts_with(" T")))
        };
        until("all is stopped", || std::fs::read_dir(&tasks).expect("it runs").all(is_stopped));
    }

    fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was killed");
    }

    /// Lets the child end by itself.
    fn end(mut self) {
        drop(self.child.stdin.take());
        std::io::copy(&mut self.output, &mut std::io::sink()).expect("it ends");
        assert!(self.child.wait().expect("it ends").success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says that the child is ready, and waits until the parent lets it end.
fn ready() {
    std::io::stdout().write_all(b"ready\n").expect("the parent reads");
    let _ = std::io::stdin().read(&mut [0]);
}

fn put(store: &Store, path: u32, n: u32) -> Vec<BlockKey> {
    let ns = namespace(store);
    let keys = chain(&ns, path, n);
    let report = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default());
    assert_eq!(report.expect("open").wait().stored(), keys.len());
    keys
}

fn until(what: &str, met: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !met() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn patient(dir: &Path) -> Attached {
    Attached::open(dir, AttachOptions { timeout: LONG }).expect("somebody listens")
}

fn hits(attached: &Attached, ns: &Namespace, n: u32) -> usize {
    attached.lookup(ns, &chain(ns, 1, n), LookupMode::Prefix).hits
}

#[test]
fn the_holds_of_a_process_that_is_killed_end() {
    let test = "the_holds_of_a_process_that_is_killed_end";
    if let Some(dir) = child_path() {
        let attached = patient(&dir);
        let ns = attached.namespace(&spec()).expect("valid");
        let hold = attached.hold(&ns, &chain(&ns, 1, 6), LONG).expect("open");
        assert_eq!(hold.held(), [true, true, true, true, false, false], "what is stored");
        let second = attached.hold(&ns, &chain(&ns, 1, 2), LONG).expect("open");
        drop(second);
        assert!(hold.is_in_force());
        ready();
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    put(&store, 1, 4);
    let other = Other::start(test, &path);
    let stats = store.stats();
    assert_eq!((stats.holds, stats.held_bytes), (1, 4 * BLOCK as u64), "one was released");
    assert_eq!(store.health().attach.connections, 1);
    other.kill();
    until("the holds end", || store.stats().held_bytes == 0 && store.stats().holds == 0);
    // Nothing keeps them from being evicted, from either tier.
    for path in 100..400 {
        let ns = namespace(&store);
        let keys = chain(&ns, path, 4);
        let _ = store.put(&ns, &keys, blocks_of(&keys), &PutOptions::default()).map(|op| op.wait());
        if path % 8 == 0 {
            store.flush(None).expect("open").wait();
        }
    }
    let ns = namespace(&store);
    assert_eq!(store.lookup(&ns, &chain(&ns, 1, 4), LookupMode::Prefix).hits, 0);
    assert_eq!(store.audit().faults, Vec::<String>::new());
    let health = store.health().attach;
    assert_eq!((health.connections, health.accepted, health.refused), (0, 1, 0));
}

/// A child that owns the store, with four blocks of chain 1.
fn own(dir: &Path) {
    let store = Store::open(&config(dir, 4 << 20)).expect("opens");
    let ns = namespace(&store);
    if store.lookup(&ns, &chain(&ns, 1, 4), LookupMode::Prefix).hits == 0 {
        put(&store, 1, 4);
        store.flush(None).expect("open").wait();
    }
    ready();
}

#[test]
fn an_owner_that_is_gone_is_misses_until_there_is_one_again() {
    let test = "an_owner_that_is_gone_is_misses_until_there_is_one_again";
    if let Some(dir) = child_path() {
        return own(&dir);
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let owner = Other::start(test, &path);
    let attached = patient(&path);
    let ns = attached.namespace(&spec()).expect("valid");
    assert_eq!(hits(&attached, &ns, 6), 4);
    assert!(attached.is_alive());
    let hold = attached.hold(&ns, &chain(&ns, 1, 4), LONG).expect("open");
    assert_eq!(attached.stats().expect("answers").holds, 1);
    owner.end();
    until("it is noticed", || !attached.is_alive());
    assert_eq!(hits(&attached, &ns, 4), 0);
    let each = attached.lookup(&ns, &chain(&ns, 1, 4), LookupMode::Each);
    assert_eq!(each.states, [Residency::Absent; 4]);
    assert!(!attached.contains(&ns, &chain(&ns, 1, 1)[0]));
    assert_eq!(attached.hold(&ns, &chain(&ns, 1, 4), LONG).expect("open").held(), [false; 4]);
    assert!(!hold.is_in_force());
    assert!(attached.counters().unanswered >= 4);
    let gone = attached.stats().expect_err("nobody to ask");
    assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
    assert!(gone.to_string().contains(&path.display().to_string()), "{gone}");

    let killed = Other::start(test, &path);
    until("it is found again", || hits(&attached, &ns, 4) == 4);
    assert_eq!(attached.counters().connects, 2);
    drop(hold);
    assert_eq!(attached.stats().expect("answers").holds, 0);
    killed.kill();
    until("the next is gone too", || hits(&attached, &ns, 4) == 0);
    assert!(path.join("attach.sock").exists(), "left behind by the kill");
    let refused = Store::attach(&path).expect_err("nobody listens");
    assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    let last = Other::start(test, &path);
    until("and the one after it is found", || hits(&attached, &ns, 4) == 4);
    last.end();
    assert!(!path.join("attach.sock").exists(), "removed by a close");
}

#[test]
fn an_owner_that_is_stopped_is_misses_not_a_hang() {
    let test = "an_owner_that_is_stopped_is_misses_not_a_hang";
    if let Some(dir) = child_path() {
        return own(&dir);
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let owner = Other::start(test, &path);
    let options = AttachOptions { timeout: Duration::from_millis(200) };
    let attached = Attached::open(&path, options.clone()).expect("listens");
    let ns = attached.namespace(&spec()).expect("valid");
    until("it answers", || hits(&attached, &ns, 4) == 4);
    owner.stop();
    assert_eq!(hits(&attached, &ns, 4), 0, "a miss, after the deadline");
    let silent = Attached::open(&path, options).expect_err("it does not answer");
    assert_eq!(silent.kind(), ErrorKind::Io, "{silent}");
    assert!(silent.to_string().contains("timeout"), "{silent}");
    owner.signal(Signal::CONT);
    until("it answers again", || hits(&attached, &ns, 4) == 4);
    owner.end();
}

#[test]
fn everything_that_the_owner_can_look_up_can_be_looked_up_from_outside() {
    let test = "everything_that_the_owner_can_look_up_can_be_looked_up_from_outside";
    if let Some(dir) = child_path() {
        let attached = patient(&dir);
        let ns = attached.namespace(&spec()).expect("valid");
        let (keys, others) = (chain(&ns, 1, 6), chain(&ns, 2, 6));
        let found = attached.lookup(&ns, &keys, LookupMode::Each);
        assert_eq!(found.hits, 4);
        assert_eq!(found.states[3..5], [Residency::In(Tier::Dram), Residency::Absent]);
        assert_eq!((found.infos[3].depth, found.infos[3].tokens), (3, 4));
        let prefix = attached.lookup(&ns, &keys, LookupMode::Prefix);
        assert_eq!((prefix.hits, prefix.states.len()), (4, 4));
        assert!(attached.contains(&ns, &keys[3]) && !attached.contains(&ns, &keys[4]));
        let groups = [(&keys[..], GroupRule::All), (&others[..], GroupRule::Last)];
        assert_eq!(attached.lookup_hybrid(&ns, &groups).expect("equal"), 2);
        assert!(attached.lookup_hybrid(&ns, &[groups[0], (&keys[..1], GroupRule::All)]).is_err());
        // More than go into one request.
        let many: Vec<BlockKey> = keys.iter().copied().cycle().take(20_000).collect();
        assert_eq!(attached.lookup(&ns, &many, LookupMode::Each).states.len(), 20_000);
        assert_eq!(attached.lookup(&ns, &[keys[0]; 9000], LookupMode::Prefix).hits, 9000);
        let stats = attached.stats().expect("answers");
        assert_eq!((stats.dram.blocks, stats.blocks), (6, 6));
        let count = |name| stats.counters.iter().find(|(n, _)| *n == name).map(|(_, n)| *n);
        assert_eq!(count("put_stored"), Some(6));
        assert!(count("lookups").is_some_and(|n| n > 20_000));
        let health = attached.health().expect("answers");
        assert!(health.open && health.attach.connections == 1);
        assert_eq!((attached.store_id(), health.drives.len()), (health.store_id, 1));
        let other = NamespaceOf::other(&attached);
        assert_eq!(attached.lookup(&other, &keys, LookupMode::Prefix).hits, 0);
        assert_eq!(attached.hold(&other, &keys, LONG).expect("open").hits(), 0);
        attached.close();
        attached.close();
        assert_eq!(hits(&attached, &ns, 4), 0);
        assert_eq!(attached.stats().expect_err("closed").kind(), ErrorKind::Closed);
        ready();
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    // Longer than a socket's path may be.
    let path = dir.path().join("d".repeat(120)).join("e".repeat(120));
    std::fs::create_dir_all(&path).expect("made");
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    put(&store, 1, 4);
    put(&store, 2, 2);
    Other::start(test, &path).end();
    assert_eq!(store.audit().faults, Vec::<String>::new());
    until("nobody is left", || store.health().attach.connections == 0);
}

struct NamespaceOf;

impl NamespaceOf {
    fn other(attached: &Attached) -> Namespace {
        let mut other = spec();
        other.salt = "another tenant".into();
        attached.namespace(&other).expect("valid")
    }
}

#[test]
fn within_the_owners_process_the_core_is_asked_directly() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let missing = Store::attach(&path).expect_err("no directory yet");
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    put(&store, 1, 4);
    let attached = Store::attach(path.join(".")).expect("the same process");
    let ns = attached.namespace(&spec()).expect("valid");
    assert_eq!(hits(&attached, &ns, 6), 4);
    let (one, two) = (
        attached.hold(&ns, &chain(&ns, 1, 2), LONG).expect("open"),
        attached.hold(&ns, &chain(&ns, 1, 4), LONG).expect("open"),
    );
    assert_eq!((store.stats().holds, store.health().attach.accepted), (2, 0));
    drop(one);
    assert_eq!(store.stats().holds, 1);
    drop(attached);
    assert_eq!(store.stats().holds, 0, "they end with it");
    drop(two);
    let attached = Store::attach(&path).expect("the same process");
    store.close();
    assert!(!attached.is_alive());
    assert_eq!(hits(&attached, &ns, 4), 0, "it does not keep the store open");
    let again = Store::open(&config(&path, 4 << 20)).expect("opens");
    until("found again", || hits(&attached, &ns, 4) == 4);
    drop(again);
}

#[test]
fn the_socket_is_private_and_one_left_behind_is_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    let socket = path.join("attach.sock");
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    let meta = std::fs::metadata(&socket).expect("it listens");
    assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
    let reason = store.health().attach.reason;
    assert_eq!(reason, socket.display().to_string());
    drop(store);
    drop(std::os::unix::net::UnixListener::bind(&socket).expect("left behind"));
    assert_eq!(Store::attach(&path).expect_err("stale").kind(), ErrorKind::NotFound);
    let store = Store::open(&config(&path, 4 << 20)).expect("opens");
    assert!(store.health().attach.listening);
    drop(store);
    assert!(!socket.exists());
}

#[test]
fn a_store_that_cannot_listen_opens_and_says_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv");
    drop(Store::open(&config(&path, 4 << 20)).expect("opens"));
    std::fs::create_dir(path.join("attach.sock")).expect("in its place");
    let store = Store::open(&config(&path, 4 << 20)).expect("opens all the same");
    let attach = store.health().attach;
    assert!(!attach.listening && attach.reason.contains("attach.sock"), "{attach:?}");
    put(&store, 1, 4);
    let memory = Store::open(&support::memory_only(1 << 20)).expect("opens");
    assert!(memory.health().attach.reason.contains("without a directory"));
}
