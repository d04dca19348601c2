//! One owner a directory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, OFlags};
use tiered_kv_types::{Error, ErrorKind, Result};

use crate::directory::{directory_error, ensure_directory};
use crate::fork::ParentOnly;

const OP: &str = "lock directory";
/// The longest text that is read from, or written to, a lock file.
const TEXT_BYTES: usize = 512;

/// The lock of a store directory, held until dropped or until the process ends, however it ends.
#[derive(Debug)]
pub struct DirLock {
    /// Closing the last copy unlocks.
    _file: ParentOnly<File>,
}

impl DirLock {
    /// Locks `dir`, made with mode 0700 where it is absent, through its file `LOCK`.
    ///
    /// # Errors
    /// `InUse`, naming the owner, where it is locked already, in this process too; `Unsupported`
    /// where the file system has no locks; otherwise as [`crate::PosixDisk::open`].
    pub fn acquire(dir: &Path) -> Result<Self> {
        ensure_directory(OP, dir)?;
        let failed = |err: io::Error| directory_error(OP, dir, err);
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(flags.bits() as i32)
            .open(dir.join("LOCK"))
            .map_err(failed)?;
        match lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Err(in_use(dir, &file)),
            Err(err) => {
                let context = format!(
                    "nvme_paths: {} cannot be locked: name a directory on a local file system",
                    dir.display()
                );
                return Err(Error::new(ErrorKind::Unsupported, OP, context).with_source(err));
            }
        }
        let text = describe_owner();
        let written = file.write_all_at(text.as_bytes(), 0);
        written.and_then(|()| file.set_len(text.len() as u64)).map_err(failed)?;
        Ok(Self { _file: ParentOnly::new(file) })
    }

    /// Keeps owners out of a directory for as long as it is read; others may read it too. Writes
    /// nothing. `None` where there is no lock file, as in a directory that never had an owner.
    ///
    /// # Errors
    /// `InUse`, naming the owner, where it has one; otherwise the operating system's.
    pub fn observe(dir: &Path) -> Result<Option<Self>> {
        let failed = |err: io::Error| directory_error(OP, dir, err);
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let path = dir.join("LOCK");
        let open = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
        let file = match open {
            Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(failed)?,
        };
        match lock(&file, FlockOperation::NonBlockingLockShared) {
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Err(in_use(dir, &file)),
            other => other.map(|()| Some(Self { _file: ParentOnly::new(file) })).map_err(failed),
        }
    }
}

fn lock(file: &File, how: FlockOperation) -> io::Result<()> {
    loop {
        match rustix::fs::flock(file, how) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

fn in_use(dir: &Path, file: &File) -> Error {
    let mut text = String::new();
    // The owner may be writing it just now; then it has no name yet.
    let _ = file.take(TEXT_BYTES as u64).read_to_string(&mut text);
    let text: String = text.trim().chars().filter(|char| !char.is_control()).collect();
    let own = format!("pid {},", std::process::id());
    // Whoever only reads the directory leaves the name of an earlier owner in it.
    let pid = text.strip_prefix("pid ").and_then(|rest| rest.split(',').next());
    let gone = pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists());
    let owner = match text.as_str() {
        _ if gone => "a process that reads it, as `tiered-kv verify` does".to_owned(),
        "" => "another process".to_owned(),
        text if text.starts_with(&own) => format!("this process ({text})"),
        text => format!("another process ({text})"),
    };
    let context = format!(
        "nvme_paths: {} is in use by {owner}: close that store, or name another directory",
        dir.display()
    );
    Error::new(ErrorKind::InUse, OP, context)
}

/// "pid N, command, since": what another process is told.
fn describe_owner() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    format!("pid {}, {}, since {}\n", std::process::id(), command(), utc(since))
}

/// The first words of the command; later ones may be nobody else's business.
fn command() -> String {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let words: Vec<_> =
        line.split(|&byte| byte == 0).take(3).map(String::from_utf8_lossy).collect();
    let command: String =
        words.join(" ").trim().chars().filter(|char| !char.is_control()).take(120).collect();
    if command.is_empty() { "unknown command".to_owned() } else { command }
}

/// Seconds since the Unix epoch as a date and time.
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Civil date from a day count; years begin in March, so that the leap day comes last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_234_567_890, "2009-02-13T23:31:30Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
