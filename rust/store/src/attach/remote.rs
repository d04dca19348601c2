//! One connection to an owner in another process.

use super::protocol::{
    Answer, Ask, Frames, Greeting, Refusal, Request, Response, VERSION, Welcome, frame, parse,
};
use std::io;
use std::path::Path;
use std::time::Instant;
use tiered_kv_io::{SOCKET_NAME, SocketStream};
use tiered_kv_types::{Error, ErrorKind};

const OP: &str = "attach";

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Fault {
    /// Nobody listens.
    Absent(io::Error),
    /// The deadline has passed.
    Silent,
    /// The connection has ended, or the other side does not keep to the protocol.
    Broken,
    /// The owner takes no more to do with this process; `None` where this one does not trust it.
    Refused(Option<Refusal>, u32),
}

impl Fault {
    /// The error of a call that must say why it failed; `dir` is the store's directory.
    pub(super) fn error(self, dir: &Path) -> Error {
        let dir = dir.display();
        match self {
            Self::Absent(err) => {
                let remedy = match err.kind() {
                    io::ErrorKind::PermissionDenied => "attach as the user who opened the store",
                    _ => {
                        "open a store on it in another process, name the first directory of its \
                         `nvme_paths`, or see `attach` in its health"
                    }
                };
                let context = format!("`path`: no store listens in {dir}: {remedy}");
                match err.kind() {
                    io::ErrorKind::PermissionDenied => Error::from_io(OP, context, err),
                    _ => Error::new(ErrorKind::NotFound, OP, context).with_source(err),
                }
            }
            Self::Silent => Error::new(
                ErrorKind::Io,
                OP,
                format!(
                    "the owner of {dir} does not answer in time: see whether it is stopped, or \
                     give a longer `timeout`"
                ),
            ),
            Self::Broken => {
                let context = format!(
                    "{dir}/{SOCKET_NAME} has ended the connection, or speaks something else: see \
                     whether the store's owner is still there, and try again"
                );
                Error::new(ErrorKind::Io, OP, context)
            }
            Self::Refused(why, version) => refused(why, version, &dir.to_string()),
        }
    }
}

fn refused(why: Option<Refusal>, version: u32, dir: &str) -> Error {
    let (kind, context) = match why {
        Some(Refusal::Version) => (
            ErrorKind::Unsupported,
            format!(
                "the owner of {dir} speaks version {version} of the protocol, this program \
                 {VERSION}: use the same release in both processes"
            ),
        ),
        Some(Refusal::Full(most)) => (
            ErrorKind::InUse,
            format!(
                "the owner of {dir} has {most} processes attached, which is all it takes: close \
                 one, or share an attached store among threads"
            ),
        ),
        Some(Refusal::User) => (
            ErrorKind::Permission,
            format!("the owner of {dir} is another user's process: attach as that user"),
        ),
        None => (
            ErrorKind::Permission,
            format!(
                "{dir}/{SOCKET_NAME} is another user's, neither this one's nor root's: attach to a \
                 store of your own"
            ),
        ),
    };
    Error::new(kind, OP, context)
}

/// A connection that has been greeted.
#[derive(Debug)]
pub(super) struct Remote {
    stream: SocketStream,
    received: Frames,
    next_id: u64,
}

impl Remote {
    /// Connects, and says which store it is.
    pub(super) fn connect(dir: &Path, until: Instant) -> Result<(Self, String), Fault> {
        Self::connect_as(VERSION, dir, until)
    }

    pub(super) fn connect_as(
        version: u32,
        dir: &Path,
        until: Instant,
    ) -> Result<(Self, String), Fault> {
        let stream = SocketStream::connect(dir).map_err(|err| match err.kind() {
            // Its queue of connections is full: it does not accept.
            io::ErrorKind::WouldBlock => Fault::Silent,
            _ => Fault::Absent(err),
        })?;
        if !stream.is_trusted().map_err(|_| Fault::Broken)? {
            return Err(Fault::Refused(None, 0));
        }
        let mut remote = Self { stream, received: Frames::default(), next_id: 1 };
        let greeting = frame(&Greeting::new(version)).expect("a greeting is short");
        // An owner that refuses at once does not read it, and says why all the same.
        let sent = remote.send(&greeting, until);
        let bytes = match remote.receive(until) {
            Err(Fault::Broken) => return Err(sent.err().unwrap_or(Fault::Broken)),
            other => other?,
        };
        let welcome: Welcome = parse(&bytes).filter(Welcome::is_sound).ok_or(Fault::Broken)?;
        match welcome.refusal {
            Some(why) => Err(Fault::Refused(Some(why), welcome.version)),
            None => Ok((remote, welcome.store_id)),
        }
    }

    /// Whether the other side is still there.
    pub(super) fn is_alive(&self) -> bool {
        !self.stream.is_hung_up()
    }

    /// Asks, and waits for the answer. After a fault the connection is of no more use: the answer
    /// may come yet.
    pub(super) fn ask(&mut self, ask: Ask<'_>, until: Instant) -> Result<Answer, Fault> {
        let id = self.next_id;
        self.next_id += 1;
        let request = frame(&Request { id, ask }).ok_or(Fault::Broken)?;
        self.send(&request, until)?;
        let bytes = self.receive(until)?;
        let Response { id: answered, answer } = parse(&bytes).ok_or(Fault::Broken)?;
        if answered == id { Ok(answer) } else { Err(Fault::Broken) }
    }

    fn send(&self, mut bytes: &[u8], until: Instant) -> Result<(), Fault> {
        while !bytes.is_empty() {
            match self.stream.send(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(err) => self.wait(&err, true, until)?,
            }
        }
        Ok(())
    }

    fn receive(&mut self, until: Instant) -> Result<Vec<u8>, Fault> {
        let mut buf = [0; 16 << 10];
        loop {
            if let Some(frame) = self.received.take().map_err(|_| Fault::Broken)? {
                return Ok(frame);
            }
            match self.stream.receive(&mut buf) {
                Ok(0) => return Err(Fault::Broken),
                Ok(n) => self.received.push(&buf[..n]),
                Err(err) => self.wait(&err, false, until)?,
            }
        }
    }

    /// Waits for what could not be had just now.
    fn wait(&self, err: &io::Error, write: bool, until: Instant) -> Result<(), Fault> {
        if !matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
            return Err(Fault::Broken);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Fault::Silent);
        }
        self.stream.wait(write, left).map_err(|_| Fault::Broken)?;
        Ok(())
    }
}
