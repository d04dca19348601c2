//! The owner's side: one thread, which waits for peers and nothing else.
//!
//! A peer has a turn a round, of one request; what it has not taken of its answers stops it from
//! asking more. One that owes the rest of a frame, or does not take its answers, for longer than
//! [`Limits::stall`] is disconnected, as is one that does not keep to the protocol.

use super::protocol::{
    Answer, Ask, Frames, Greeting, MAX_RELEASED, Refusal, Request, Response, VERSION, Welcome,
    frame, parse, unpack,
};
use crate::answers::{Attachable, LookupMode};
use crate::driver::Core;
use crate::machine::{Event, HoldId};
use crate::owner::Owner;
use crate::seams::Seams;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tiered_kv_io::{SOCKET_NAME, SocketListener, SocketStream, Wake, wait_ready};
use tiered_kv_types::NamespaceId;

/// Bytes that a peer may send in its turn.
const TURN_BYTES: usize = 64 << 10;
/// How long nobody is accepted after an accept has failed, as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// What peers are allowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Connections at once.
    pub(super) peers: usize,
    /// How long a peer may owe its greeting, the rest of a frame, or the reading of its answers.
    pub(super) stall: Duration,
    /// Holds in force of one connection.
    pub(super) holds: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { peers: 64, stall: Duration::from_secs(5), holds: 1024 }
    }
}

/// What the thread shares with the owner.
struct Shared {
    wake: Wake,
    ending: AtomicBool,
    connections: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
    dropped: AtomicU64,
}

/// An owner that listens. Its thread ends with [`Listening::end`].
pub(crate) struct Listening {
    shared: Arc<Shared>,
    place: String,
    /// Guards the thread until it is joined.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Listening {
    /// Listens in `dir`; `Err` says why that cannot be had.
    pub(crate) fn begin(
        owner: &Arc<Owner>,
        dir: &Path,
        seams: &Seams,
    ) -> std::result::Result<Self, String> {
        Self::begin_with(owner, dir, seams, Limits::default())
    }

    pub(super) fn begin_with(
        owner: &Arc<Owner>,
        dir: &Path,
        seams: &Seams,
        limits: Limits,
    ) -> std::result::Result<Self, String> {
        let place = dir.join(SOCKET_NAME).display().to_string();
        let refused = |err: io::Error| format!("{place} cannot be listened on: {err}");
        let listener = SocketListener::bind(dir).map_err(refused)?;
        let counter = AtomicU64::default;
        let shared = Arc::new(Shared {
            wake: Wake::new().map_err(refused)?,
            ending: AtomicBool::new(false),
            connections: counter(),
            accepted: counter(),
            refused: counter(),
            dropped: counter(),
        });
        let server = Server {
            owner: Arc::downgrade(owner),
            core: owner.core.clone(),
            shared: shared.clone(),
            limits,
            listener,
            peers: Vec::new(),
            accept_after: None,
        };
        let thread = seams.threads.spawn("tkv-attach".into(), Box::new(move || server.run()));
        let thread = Mutex::new(Some(thread.map_err(|err| err.to_string())?));
        Ok(Self { shared, place, thread })
    }

    /// Disconnects everybody, ends their holds and removes the socket.
    pub(crate) fn end(&self) {
        self.shared.ending.store(true, Ordering::Release);
        self.shared.wake.wake();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that answers attached processes has panicked");
        }
    }

    pub(crate) fn report(&self) -> Attachable {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let listening = !self.shared.ending.load(Ordering::Acquire);
        Attachable {
            listening,
            reason: if listening { self.place.clone() } else { "the store is closed".to_owned() },
            connections: load(&self.shared.connections),
            accepted: load(&self.shared.accepted),
            refused: load(&self.shared.refused),
            dropped: load(&self.shared.dropped),
        }
    }
}

struct Server {
    owner: Weak<Owner>,
    core: Arc<Core>,
    shared: Arc<Shared>,
    limits: Limits,
    listener: SocketListener,
    peers: Vec<Peer>,
    /// Nobody is accepted before.
    accept_after: Option<Instant>,
}

/// One connection.
struct Peer {
    stream: SocketStream,
    received: Frames,
    to_send: Vec<u8>,
    sent: usize,
    greeted: bool,
    /// Since when it has owed something.
    owes_since: Option<Instant>,
    /// Its holds, and when each is over by itself.
    holds: HashMap<HoldId, Instant>,
}

/// How a peer's turn, or the peer, ended.
enum Gone {
    /// It has closed the connection.
    Left,
    /// It broke the protocol, or stalled.
    Broke,
    /// It was refused.
    Refused,
}

impl Server {
    fn run(mut self) {
        while !self.shared.ending.load(Ordering::Acquire) {
            if let Err(err) = self.round() {
                tracing::error!(%err, "attached processes are not answered any more");
                break;
            }
        }
        // The socket goes first, so that nobody comes back before the next owner is there.
        let Self { peers, listener, core, shared, .. } = self;
        drop(listener);
        let holds = peers.iter().flat_map(|peer| peer.holds.keys());
        core.drive(holds.map(|hold| Event::Release { hold: *hold }));
        shared.connections.store(0, Ordering::Relaxed);
    }

    fn round(&mut self) -> io::Result<()> {
        let now = Instant::now();
        self.accept_after = self.accept_after.filter(|after| *after > now);
        let streams: Vec<_> =
            self.peers.iter().map(|peer| (&peer.stream, peer.is_sending())).collect();
        let listener = self.accept_after.is_none().then_some(&self.listener);
        let ready = wait_ready(&self.shared.wake, listener, &streams, self.patience(now))?;
        let mut turns = ready.streams.into_iter();
        self.retain(|owner, peer, limits| {
            let ready = turns.next().unwrap_or_default();
            if ready || (!peer.is_sending() && peer.received.is_whole()) {
                return peer.turn(owner, limits, ready);
            }
            Ok(())
        });
        if ready.incoming {
            self.accept();
        }
        let now = Instant::now();
        self.retain(|_, peer, limits| peer.check(now, limits));
        Ok(())
    }

    /// How long to wait for somebody to become ready.
    fn patience(&self, now: Instant) -> Option<Duration> {
        if self.peers.iter().any(|peer| !peer.is_sending() && peer.received.is_whole()) {
            return Some(Duration::ZERO);
        }
        let owed = self.peers.iter().filter_map(|peer| peer.owes_since);
        let stalls = owed.map(|since| since + self.limits.stall);
        let next = stalls.chain(self.accept_after).min();
        next.map(|at| at.saturating_duration_since(now))
    }

    /// Keeps the peers that `turn` is content with, and ends the holds of the others.
    fn retain(&mut self, mut turn: impl FnMut(&Owner, &mut Peer, &Limits) -> Result<(), Gone>) {
        let Some(owner) = self.owner.upgrade() else { return };
        let mut released = Vec::new();
        self.peers.retain_mut(|peer| {
            let turn = AssertUnwindSafe(|| turn(&owner, peer, &self.limits));
            let gone = match catch_unwind(turn) {
                Ok(Ok(())) => return true,
                Ok(Err(gone)) => gone,
                // A defect, which is logged by its hook, costs the peer that met it.
                Err(_) => Gone::Broke,
            };
            match gone {
                Gone::Left => {}
                Gone::Broke => _ = self.shared.dropped.fetch_add(1, Ordering::Relaxed),
                Gone::Refused => _ = self.shared.refused.fetch_add(1, Ordering::Relaxed),
            }
            released.extend(peer.holds.drain().map(|(hold, _)| hold));
            false
        });
        let connections = self.peers.len() as u64;
        self.shared.connections.store(connections, Ordering::Relaxed);
        if !released.is_empty() {
            owner.release_for(released);
        }
    }

    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(Some(stream)) => {
                self.shared.accepted.fetch_add(1, Ordering::Relaxed);
                let full = self.peers.len() >= self.limits.peers;
                let refusal = match stream.is_trusted() {
                    Ok(true) if full => {
                        Some(Refusal::Full(u32::try_from(self.limits.peers).unwrap_or(u32::MAX)))
                    }
                    Ok(true) => None,
                    _ => Some(Refusal::User),
                };
                if let Some(refusal) = refusal {
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                    // As much as the new connection takes at once, which is all of it.
                    let welcome = frame(&Welcome::new(Some(refusal), String::new()));
                    let _ = stream.send(&welcome.expect("a refusal is short"));
                    return;
                }
                self.peers.push(Peer::new(stream));
                self.shared.connections.store(self.peers.len() as u64, Ordering::Relaxed);
            }
            Ok(None) => {}
            Err(err) => {
                tracing::warn!(%err, "a process could not attach");
                self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }
}

impl Peer {
    fn new(stream: SocketStream) -> Self {
        Self {
            stream,
            received: Frames::default(),
            to_send: Vec::new(),
            sent: 0,
            greeted: false,
            owes_since: Some(Instant::now()),
            holds: HashMap::new(),
        }
    }

    fn is_sending(&self) -> bool {
        self.sent < self.to_send.len()
    }

    /// Sends what is left to send, else receives where there is something, and answers one request.
    fn turn(&mut self, owner: &Owner, limits: &Limits, ready: bool) -> Result<(), Gone> {
        if self.is_sending() {
            return self.send();
        }
        if ready && !self.received.is_whole() {
            self.receive()?;
        }
        match self.received.take() {
            Ok(Some(frame)) => {
                self.answer(owner, limits, &frame)?;
                self.owes_since = None;
                self.send()
            }
            Ok(None) => Ok(()),
            Err(_) => Err(Gone::Broke),
        }
    }

    fn receive(&mut self) -> Result<(), Gone> {
        let mut buf = [0; TURN_BYTES];
        match self.stream.receive(&mut buf) {
            Ok(0) => Err(if self.received.len() == 0 { Gone::Left } else { Gone::Broke }),
            Ok(n) => {
                self.received.push(&buf[..n]);
                Ok(())
            }
            Err(err) if is_passing(&err) => Ok(()),
            Err(_) => Err(Gone::Left),
        }
    }

    fn send(&mut self) -> Result<(), Gone> {
        match self.stream.send(&self.to_send[self.sent..]) {
            Ok(n) => self.sent += n,
            Err(err) if is_passing(&err) => {}
            Err(_) => return Err(Gone::Left),
        }
        if !self.is_sending() {
            self.to_send.clear();
            self.sent = 0;
        }
        Ok(())
    }

    /// Notes since when the peer owes something, and ends one that has for too long. What it owes
    /// is due as a whole: sending byte by byte gains no time.
    fn check(&mut self, now: Instant, limits: &Limits) -> Result<(), Gone> {
        let owes = !self.greeted
            || self.is_sending()
            || (self.received.len() > 0 && !self.received.is_whole());
        if !owes {
            self.owes_since = None;
            return Ok(());
        }
        let since = *self.owes_since.get_or_insert(now);
        if now.duration_since(since) < limits.stall { Ok(()) } else { Err(Gone::Broke) }
    }

    fn answer(&mut self, owner: &Owner, limits: &Limits, bytes: &[u8]) -> Result<(), Gone> {
        if !self.greeted {
            return self.welcome(owner, bytes);
        }
        let Some(Request { id, ask }) = parse(bytes) else { return Err(Gone::Broke) };
        let answer = self.reply(owner, limits, ask).ok_or(Gone::Broke)?;
        self.to_send = frame(&Response { id, answer }).ok_or(Gone::Broke)?;
        Ok(())
    }

    fn welcome(&mut self, owner: &Owner, bytes: &[u8]) -> Result<(), Gone> {
        let greeting: Option<Greeting> = parse(bytes).filter(Greeting::is_sound);
        let version = greeting.ok_or(Gone::Broke)?.version;
        let refusal = (version != VERSION).then_some(Refusal::Version);
        let welcome = Welcome::new(refusal, owner.store_id());
        self.to_send = frame(&welcome).ok_or(Gone::Broke)?;
        if refusal.is_some() {
            self.send()?;
            return Err(Gone::Refused);
        }
        self.greeted = true;
        Ok(())
    }

    /// `None` for a request beyond its bounds.
    fn reply(&mut self, owner: &Owner, limits: &Limits, ask: Ask<'_>) -> Option<Answer> {
        Some(match ask {
            Ask::Lookup { ns, prefix, keys } => {
                let mode = if prefix { LookupMode::Prefix } else { LookupMode::Each };
                let keys = unpack(keys)?;
                Answer::Lookup(owner.lookup_for(&NamespaceId(ns), &keys, mode).into())
            }
            Ask::Present { ns, keys } => {
                Answer::Present(owner.present_for(&NamespaceId(ns), &unpack(keys)?))
            }
            Ask::Hold { ns, ttl_ns, keys } => {
                let keys = unpack(keys)?;
                let now = Instant::now();
                if self.holds.len() >= limits.holds {
                    self.holds.retain(|_, over| *over > now);
                }
                if self.holds.len() >= limits.holds {
                    return Some(Answer::Held { hold: None, held: vec![false; keys.len()] });
                }
                let ttl = Duration::from_nanos(ttl_ns).min(super::MAX_TTL);
                let (hold, held) = owner.hold_for(&NamespaceId(ns), keys, ttl);
                self.holds.extend(hold.map(|hold| (hold, now + ttl)));
                Answer::Held { hold: hold.map(|hold| hold.0), held }
            }
            Ask::Release { holds } => {
                if holds.len() > MAX_RELEASED {
                    return None;
                }
                // Those of others are none of its business.
                let own = |id: u64| Some(HoldId(id)).filter(|id| self.holds.remove(id).is_some());
                let own: Vec<HoldId> = holds.into_iter().filter_map(own).collect();
                owner.release_for(own);
                Answer::Released
            }
            Ask::Stats => Answer::Stats(Box::new(owner.stats())),
            Ask::Health => Answer::Health(Box::new(owner.health())),
            Ask::Operate(question) => Answer::Operate(Box::new(owner.answer(&question)?)),
        })
    }
}

/// Nothing could be had just now.
fn is_passing(err: &io::Error) -> bool {
    matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
