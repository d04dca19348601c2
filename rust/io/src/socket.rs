//! The Unix socket in a store's directory, through which other processes attach.
//!
//! Everything here is non-blocking; waiting is [`wait_ready`]'s and [`SocketStream::wait`]'s. A
//! forked child closes its copies when it begins, so that a connection ends with the process that
//! opened it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::fork::ParentOnly;

/// Name of the socket in the store's first directory.
pub const SOCKET_NAME: &str = "attach.sock";
/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Whether a process of user `peer` may attach to a store of user `own`, and the other way round:
/// the same user, or root.
pub fn is_trusted(own: u32, peer: u32) -> bool {
    peer == own || peer == 0
}

/// The user that this process acts as.
fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The socket's address by way of the directory's descriptor: a socket's path may have 107 bytes
/// only, a directory's any number.
fn address(dir: &OwnedFd, path: &Path) -> rustix::io::Result<SocketAddrUnix> {
    let short = format!("/proc/self/fd/{}", dir.as_raw_fd());
    if Path::new(&short).exists() {
        return SocketAddrUnix::new(format!("{short}/{SOCKET_NAME}"));
    }
    SocketAddrUnix::new(path.join(SOCKET_NAME))
}

fn open_dir(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// The socket that an owner listens on; dropping it removes it from the directory.
#[derive(Debug)]
pub struct SocketListener {
    fd: ParentOnly<OwnedFd>,
    dir: OwnedFd,
}

impl SocketListener {
    /// Listens in `dir` with mode 0600, in place of a socket that a crash left there. The caller
    /// holds the directory's lock.
    ///
    /// # Errors
    /// The operating system's refusal; `AlreadyExists` where the name is taken by something that is
    /// no socket.
    pub fn bind(dir: &Path) -> io::Result<Self> {
        let path = dir;
        let dir = open_dir(path)?;
        match rustix::fs::statat(&dir, SOCKET_NAME, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_socket() => {
                rustix::fs::unlinkat(&dir, SOCKET_NAME, AtFlags::empty())?;
            }
            Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(rustix::io::Errno::NOENT) => {}
            Err(err) => return Err(err.into()),
        }
        let fd = new_socket()?;
        // The kernel makes the name with the socket's own mode: nobody sees it with another.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&fd, &address(&dir, path)?)?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Self { fd: ParentOnly::new(fd), dir })
    }

    /// The next connection and its user, where one waits.
    ///
    /// # Errors
    /// The operating system's refusal, such as too many open files.
    pub fn accept(&self) -> io::Result<Option<SocketStream>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&*self.fd, flags) {
            Ok(fd) => Ok(Some(SocketStream { fd: ParentOnly::new(fd) })),
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED,
            ) => Ok(None),
            Err(err) => Err(err.into()),
        }
    }
}

impl Drop for SocketListener {
    fn drop(&mut self) {
        if !self.fd.is_forked() {
            // One that is gone already is as good as removed.
            let _ = rustix::fs::unlinkat(&self.dir, SOCKET_NAME, AtFlags::empty());
        }
    }
}

/// A connection between a store's owner and a process that is attached to it.
#[derive(Debug)]
pub struct SocketStream {
    fd: ParentOnly<OwnedFd>,
}

impl SocketStream {
    /// Connects to the owner that listens in `dir`, without waiting.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` where there is none; `WouldBlock` where it accepts nobody
    /// at present; the operating system's other refusals.
    pub fn connect(dir: &Path) -> io::Result<Self> {
        let path = dir;
        let dir = open_dir(path)?;
        let fd = new_socket()?;
        rustix::net::connect(&fd, &address(&dir, path)?)?;
        Ok(Self { fd: ParentOnly::new(fd) })
    }

    /// Whether the other side is of this process's user, or root. Of the owner the kernel tells who
    /// listened, of the attached process who connected.
    ///
    /// # Errors
    /// The operating system's refusal.
    pub fn is_trusted(&self) -> io::Result<bool> {
        let peer = sockopt::socket_peercred(&*self.fd)?.uid.as_raw();
        // A root process may attach to anybody's store.
        Ok(is_trusted(own_uid(), peer) || own_uid() == 0)
    }

    /// Bytes received into `buf`; 0 at the end of the connection.
    ///
    /// # Errors
    /// `WouldBlock` where there are none yet; the operating system's other refusals.
    pub fn receive(&self, buf: &mut [u8]) -> io::Result<usize> {
        let (received, _) = rustix::net::recv(&*self.fd, buf, RecvFlags::empty())?;
        Ok(received)
    }

    /// Bytes of `bytes` that were sent.
    ///
    /// # Errors
    /// `WouldBlock` where there is no room for any; the operating system's other refusals. A
    /// connection that has ended is an error, never a signal.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&*self.fd, bytes, SendFlags::NOSIGNAL)?)
    }

    /// Waits for at most `limit` until the connection can be read, or written to. It is ready where
    /// it has ended, too.
    ///
    /// # Errors
    /// The operating system's refusal.
    pub fn wait(&self, write: bool, limit: Duration) -> io::Result<bool> {
        let flags = if write { PollFlags::OUT } else { PollFlags::IN };
        let mut fds = [PollFd::new(&*self.fd, flags)];
        poll_for(&mut fds, Some(limit))?;
        Ok(!fds[0].revents().is_empty())
    }

    /// Whether the other side has gone.
    pub fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&*self.fd, PollFlags::RDHUP)];
        let polled = poll_for(&mut fds, Some(Duration::ZERO));
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        polled.is_err() || fds[0].revents().intersects(gone)
    }
}

/// Ends another thread's [`wait_ready`].
#[derive(Debug)]
pub struct Wake {
    fd: OwnedFd,
}

impl Wake {
    /// # Errors
    /// The operating system's refusal.
    pub fn new() -> io::Result<Self> {
        Ok(Self { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// Ends this wait and every later one.
    pub fn wake(&self) {
        // Fails only where the counter is full, and then it wakes all the same.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }
}

/// What [`wait_ready`] has found.
#[derive(Debug, Default)]
pub struct Ready {
    /// [`Wake::wake`] was called.
    pub woken: bool,
    /// A connection waits to be accepted.
    pub incoming: bool,
    /// For each stream, whether it is ready for what was asked, or has ended.
    pub streams: Vec<bool>,
}

/// Waits until something is ready, for at most `limit`; for ever without one. Each stream is
/// watched for reading, or for writing where its flag is set.
///
/// # Errors
/// The operating system's refusal.
pub fn wait_ready(
    wake: &Wake,
    listener: Option<&SocketListener>,
    streams: &[(&SocketStream, bool)],
    limit: Option<Duration>,
) -> io::Result<Ready> {
    let mut fds = Vec::with_capacity(streams.len() + 2);
    fds.push(PollFd::new(&wake.fd, PollFlags::IN));
    // Without a listener its place is taken by the wake: every stream keeps its index.
    let second: BorrowedFd<'_> = listener.map_or(wake.fd.as_fd(), |listener| listener.fd.as_fd());
    fds.push(PollFd::from_borrowed_fd(second, PollFlags::IN));
    for (stream, write) in streams {
        let flags = if *write { PollFlags::OUT } else { PollFlags::IN };
        fds.push(PollFd::new(&*stream.fd, flags));
    }
    poll_for(&mut fds, limit)?;
    let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
    let woken = ready.next().unwrap_or_default();
    let incoming = ready.next().unwrap_or_default() && listener.is_some();
    Ok(Ready { woken, incoming, streams: ready.collect() })
}

/// A signal ends the wait early, with nothing ready: the kernel then leaves the results empty.
fn poll_for(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.map(|limit| Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    match poll(fds, limit.as_ref()) {
        Err(rustix::io::Errno::INTR) => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_and_root_are_trusted() {
        for (own, peer, trusted) in
            [(1000, 1000, true), (1000, 0, true), (1000, 1001, false), (0, 1000, false)]
        {
            assert_eq!(is_trusted(own, peer), trusted, "{own} and {peer}");
        }
    }
}
