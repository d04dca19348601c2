//! Peers that misbehave harm themselves only.

use super::protocol::{Answer, Ask, Frames, MAX_FRAME_BYTES, MAX_KEYS, Refusal, VERSION};
use super::remote::{Fault, Remote};
use super::server::{Limits, Listening};
use crate::seams::Seams;
use crate::store::Store;
use crate::{KvLayout, Namespace, NamespaceSpec, StoreConfig};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiered_kv_io::SOCKET_NAME;
use tiered_kv_types::BlockKey;

const LONG: Duration = Duration::from_secs(60);

struct Setup {
    dir: tempfile::TempDir,
    store: Arc<Store>,
    listening: Listening,
    ns: Namespace,
    keys: Vec<BlockKey>,
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.listening.end();
    }
}

/// A store of four blocks, and a socket with limits of the test's own.
fn setup(limits: Limits) -> Setup {
    let dir = tempfile::tempdir().expect("a directory");
    let config =
        StoreConfig { dram_capacity: Some(1 << 20), huge_pages: false, ..StoreConfig::default() };
    let store = Store::open(&config).expect("opens");
    let layout = KvLayout::uniform(4, 4096).expect("valid");
    let ns = store.namespace(&NamespaceSpec::new("m", "w", "f", layout)).expect("valid");
    let keys = ns.keys_from_tokens(&(0..16).collect::<Vec<u32>>(), None);
    let blocks = vec![vec![7u8; 4096]; 4];
    let put = store.put(&ns, &keys, blocks, &crate::PutOptions::default()).expect("open");
    assert_eq!(put.wait().stored(), 4);
    let seams = Seams::default();
    let listening = Listening::begin_with(&store.owner, dir.path(), &seams, limits);
    Setup { store, listening: listening.expect("listens"), dir, ns, keys }
}

fn hasty() -> Limits {
    Limits { stall: Duration::from_millis(100), ..Limits::default() }
}

impl Setup {
    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(self.dir.path().join(SOCKET_NAME)).expect("listens");
        stream.set_read_timeout(Some(LONG)).expect("a limit");
        stream.set_write_timeout(Some(LONG)).expect("a limit");
        stream
    }

    fn remote(&self) -> Remote {
        Remote::connect(self.dir.path(), Instant::now() + LONG).expect("listens").0
    }

    fn lookup(&self, remote: &mut Remote) -> usize {
        let keys = BlockKey::pack(&self.keys);
        let ask = Ask::Present { ns: self.ns.id().0, keys: &keys };
        match remote.ask(ask, Instant::now() + LONG) {
            Ok(Answer::Present(there)) => there.iter().filter(|there| **there).count(),
            other => panic!("{other:?}"),
        }
    }

    fn hold(&self, remote: &mut Remote) -> (Option<u64>, Vec<bool>) {
        let keys = BlockKey::pack(&self.keys);
        let ask = Ask::Hold { ns: self.ns.id().0, ttl_ns: u64::MAX, keys: &keys };
        match remote.ask(ask, Instant::now() + LONG) {
            Ok(Answer::Held { hold, held }) => (hold, held),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the owner says so; a test that fails waits for a minute.
    fn until(&self, what: &str, met: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LONG;
        while !met(self) {
            assert!(Instant::now() < end, "never: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A greeting as it is on the wire, so that a change of the protocol is noticed here.
fn greeting() -> Vec<u8> {
    vec![5, 0, 0, 0, b'T', b'K', b'V', b'A', u8::try_from(VERSION).expect("small")]
}

/// Whether the other side closes; what it sends before that is dropped.
fn is_closed(stream: &mut UnixStream) -> bool {
    let mut buf = [0; 4096];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(err) => return matches!(err.kind(), ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn garbage_disconnects_its_sender_and_nobody_else() {
    let setup = setup(Limits::default());
    let mut good = setup.remote();
    let long = u32::try_from(MAX_FRAME_BYTES + 1).expect("small").to_le_bytes();
    let unknown = [&greeting()[..], &[3, 0, 0, 0, 1, 99, 0]].concat();
    let stranger = [5, 0, 0, 0, b'H', b'T', b'T', b'P', 1];
    let trailing = [&greeting()[..], &[3, 0, 0, 0, 1, 4, 0]].concat();
    for (at, garbage) in
        [&b"\xff\xff\xff\xff"[..], &long, &stranger, &unknown, &trailing].into_iter().enumerate()
    {
        let mut bad = setup.raw();
        bad.write_all(garbage).expect("there is room");
        assert!(is_closed(&mut bad), "garbage {at}");
        assert_eq!(setup.lookup(&mut good), 4);
        setup.until("counted", |s| s.listening.report().dropped == at as u64 + 1);
    }
    assert_eq!(setup.listening.report().connections, 1);
}

#[test]
fn too_many_keys_disconnect_their_sender() {
    let setup = setup(Limits::default());
    let keys = vec![0; (MAX_KEYS + 1) * 32];
    for keys in [&keys[..], &keys[..33]] {
        let mut bad = setup.remote();
        let ask = Ask::Present { ns: [0; 32], keys };
        assert!(matches!(bad.ask(ask, Instant::now() + LONG), Err(Fault::Broken)));
    }
    assert_eq!(setup.lookup(&mut setup.remote()), 4);
}

#[test]
fn half_a_frame_and_no_greeting_are_waited_for_only_so_long() {
    let setup = setup(hasty());
    let mut good = setup.remote();
    let mut silent = setup.raw();
    let mut half = setup.raw();
    half.write_all(&[&greeting()[..], &[100, 0, 0, 0, 1]].concat()).expect("there is room");
    assert!(is_closed(&mut silent) && is_closed(&mut half));
    let mut trickle = setup.raw();
    trickle.write_all(&[&greeting()[..], &[255, 255, 0, 0]].concat()).expect("there is room");
    // Each byte in time, all of them not.
    while trickle.write_all(&[0]).is_ok() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(setup.lookup(&mut good), 4, "one that owes nothing may be idle");
    setup.until("counted", |s| s.listening.report().dropped == 3);
}

#[test]
fn a_flood_without_reading_stops_at_what_the_socket_takes() {
    let setup = setup(hasty());
    let mut good = setup.remote();
    let mut flood = setup.raw();
    flood.write_all(&greeting()).expect("there is room");
    // Request 1 asks for statistics: six bytes for some hundreds.
    let asks = [2, 0, 0, 0, 1, 4].repeat(10_000);
    while flood.write_all(&asks).is_ok() {
        assert_eq!(setup.lookup(&mut good), 4, "others are answered meanwhile");
    }
    setup.until("counted", |s| s.listening.report().dropped == 1);
    assert_eq!(setup.lookup(&mut good), 4);
}

#[test]
fn one_connection_too_many_is_told_so() {
    let setup = setup(Limits { peers: 2, ..Limits::default() });
    let (mut one, two) = (setup.remote(), setup.remote());
    let refused = Remote::connect(setup.dir.path(), Instant::now() + LONG).expect_err("a third");
    assert!(matches!(refused, Fault::Refused(Some(Refusal::Full(2)), _)), "{refused:?}");
    let error = refused.error(setup.dir.path());
    assert_eq!(error.kind(), crate::ErrorKind::InUse, "{error}");
    assert_eq!(setup.lookup(&mut one), 4);
    drop(two);
    setup.until("free", |s| s.listening.report().connections == 1);
    assert_eq!(setup.lookup(&mut setup.remote()), 4);
    assert_eq!(setup.listening.report().refused, 1);
}

#[test]
fn another_version_is_told_so() {
    let setup = setup(Limits::default());
    let until = Instant::now() + LONG;
    let refused = Remote::connect_as(VERSION + 1, setup.dir.path(), until).expect_err("another");
    assert!(matches!(refused, Fault::Refused(Some(Refusal::Version), VERSION)), "{refused:?}");
    let error = refused.error(setup.dir.path());
    assert_eq!(error.kind(), crate::ErrorKind::Unsupported, "{error}");
    setup.until("counted", |s| s.listening.report().refused == 1);
}

#[test]
fn holds_belong_to_their_connection_and_are_bounded() {
    let setup = setup(Limits { holds: 2, ..Limits::default() });
    let (mut one, mut two) = (setup.remote(), setup.remote());
    let (hold, held) = setup.hold(&mut one);
    assert_eq!(held, [true; 4]);
    setup.hold(&mut one);
    assert_eq!(setup.hold(&mut one), (None, vec![false; 4]), "beyond the bound nothing is held");
    let holds = vec![hold.expect("held")];
    two.ask(Ask::Release { holds: holds.clone() }, Instant::now() + LONG).expect("answered");
    assert_eq!(setup.store.stats().holds, 2, "those of others stay");
    one.ask(Ask::Release { holds }, Instant::now() + LONG).expect("answered");
    assert_eq!(setup.store.stats().holds, 1);
    drop(one);
    setup.until("released", |s| s.store.stats().holds == 0 && s.store.stats().held_bytes == 0);
    let ask = Ask::Hold { ns: [9; 32], ttl_ns: 1, keys: &BlockKey::pack(&setup.keys) };
    let answer = two.ask(ask, Instant::now() + LONG).expect("answered");
    assert!(matches!(answer, Answer::Held { hold: None, held } if held == [false; 4]), "unknown");
}

#[test]
fn frames_take_no_memory_for_a_length_that_is_only_said() {
    let mut frames = Frames::default();
    frames.push(&u32::try_from(MAX_FRAME_BYTES).expect("small").to_le_bytes());
    assert_eq!((frames.take(), frames.len()), (Ok(None), 4));
}
