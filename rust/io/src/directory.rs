//! Making sure that a store directory exists and is one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use tiered_kv_types::{Error, ErrorKind, Result};

/// Creates `dir` with mode 0700 where it is absent; its parent must exist.
pub(crate) fn ensure_directory(op: &'static str, dir: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => {
            sync_parent(dir);
            Ok(())
        }
        Err(_) if dir.is_dir() => Ok(()),
        Err(err)
            if fs::symlink_metadata(dir).is_ok() || err.kind() == io::ErrorKind::NotADirectory =>
        {
            let context =
                format!("nvme_paths: {} is not a directory: name a directory", dir.display());
            Err(Error::new(ErrorKind::Config, op, context).with_source(err))
        }
        Err(err) => Err(directory_error(op, dir, err)),
    }
}

/// The error of a directory that cannot be used, with the remedy that fits.
pub(crate) fn directory_error(op: &'static str, dir: &Path, err: io::Error) -> Error {
    let remedy = match err.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidFilename => "correct the path",
        io::ErrorKind::NotFound => "create its parent directory or correct the path",
        io::ErrorKind::PermissionDenied => "make it writable for this user or name another",
        io::ErrorKind::ReadOnlyFilesystem => "name a directory on a writable file system",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space on its device",
        _ => "check its device",
    };
    Error::from_io(op, format!("nvme_paths: {}: {remedy}", dir.display()), err)
}

/// Makes a new directory survive a power cut. Best effort: a lost empty directory is made again.
fn sync_parent(dir: &Path) {
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    let synced = fs::File::open(parent.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all());
    if let Err(err) = synced {
        tracing::debug!(%err, "parent directory not synced");
    }
}

/// Opens a file for appending, made with mode 0600 where it is absent. A link is not followed.
///
/// # Errors
/// The operating system's.
pub fn open_for_append(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32;
    OpenOptions::new()
        .read(true)
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(path)
}
