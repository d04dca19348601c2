//! The files of a store directory through the operating system's calls.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags};
use tiered_kv_types::{Error, Result};

use crate::PAGE_BYTES;
use crate::access::{Access, probe};
use crate::buf::AlignedBuf;
use crate::directory::{directory_error, ensure_directory};
use crate::disk::{
    Alignment, DataFile, Descriptors, Disk, FileId, check_name, check_range, not_open, too_large,
    usable,
};
use crate::vectored;
use crate::whole::read_file_whole;

/// Files that are not yet, or no longer, part of the store.
pub(crate) const SCRATCH_PREFIX: &str = ".tmp-";
/// The piece in which unaligned memory is copied.
const BOUNCE_BYTES: usize = 1 << 20;

/// A store directory on a file system, with direct I/O where that is to be had.
pub struct PosixDisk {
    path: PathBuf,
    dir: File,
    access: Access,
    files: RwLock<Files>,
    /// Serialises changes of the directory, so that two of them never share a scratch file.
    changes: Mutex<()>,
}

#[derive(Default)]
struct Files {
    open: HashMap<u32, OpenFile>,
    next: u32,
}

struct OpenFile {
    name: String,
    data: Arc<DataFile>,
}

impl PosixDisk {
    /// Opens the directory, made with mode 0700 where it is absent, and probes what its file system
    /// can do. Hold the [`crate::DirLock`] first: scratch files that a crash has left are deleted.
    ///
    /// # Errors
    /// `NotFound` without a parent directory, `Config` for something else than a directory,
    /// `Permission` where nothing can be written; all name `nvme_paths`.
    pub fn open(dir: &Path) -> Result<Self> {
        const OP: &str = "open directory";
        ensure_directory(OP, dir)?;
        let failed = |err: io::Error| directory_error(OP, dir, err);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir, flags, Mode::empty()).map_err(|err| failed(err.into()))?;
        let handle = File::from(fd);
        remove_scratch(&handle).map_err(failed)?;
        let access = probe(&handle).map_err(failed)?;
        if !access.direct {
            tracing::warn!(dir = %dir.display(), reason = access.reason, "no direct I/O");
        }
        let files = RwLock::new(Files::default());
        Ok(Self { path: dir.into(), dir: handle, access, files, changes: Mutex::new(()) })
    }

    fn error(&self, op: &'static str, name: &str, err: io::Error) -> Error {
        let path = self.path.join(name);
        let remedy = match err.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ": lower nvme_capacity or free space on its device"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                ": make the directory of nvme_paths writable for this user"
            }
            io::ErrorKind::NotFound => ": the file was deleted by somebody else",
            _ => "",
        };
        Error::from_io(op, format!("{}{remedy}", path.display()), err)
    }

    /// A file of the directory that does not exist yet.
    fn create_new(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat(&self.dir, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    fn open_existing(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // A pipe of that name must not block the caller.
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file: File = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?.into();
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        // On some file systems an io_uring would take it for a wish to fail instead of waiting.
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
        Ok(file)
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.dir, name, AtFlags::empty())?)
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let scratch = format!("{SCRATCH_PREFIX}{name}");
        let written = self.create_new(&scratch, OFlags::WRONLY).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()?;
            rustix::fs::renameat(&self.dir, &scratch, &self.dir, name)?;
            self.dir.sync_all()
        });
        if written.is_err() {
            // After the rename there is no scratch file, and nothing to undo.
            let _ = self.unlink(&scratch);
        }
        written
    }

    fn data_flags(&self) -> OFlags {
        let direct = if self.access.direct { OFlags::DIRECT } else { OFlags::empty() };
        OFlags::RDWR | direct
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        // Asking first keeps a request that cannot fit from filling the device on its way.
        let space = rustix::fs::fstatvfs(&self.dir)?;
        if space.f_bavail.saturating_mul(space.f_frsize) < bytes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        allocate(file, bytes)?;
        file.sync_all()?;
        self.dir.sync_all()
    }

    fn register(&self, name: &str, file: File, bytes: u64) -> FileId {
        let mut files = self.files.write();
        let id = files.next;
        files.next = id.checked_add(1).expect("a store opens fewer than 2^32 files");
        let data = Arc::new(DataFile::new(file, bytes));
        files.open.insert(id, OpenFile { name: name.to_owned(), data });
        FileId(id)
    }

    /// Closes a file that has lost its name, once the operations on it have ended.
    fn forget(&self, name: &str) {
        self.files.write().open.retain(|_, open| open.name != name);
    }

    fn file(&self, id: FileId) -> io::Result<Arc<DataFile>> {
        let files = self.files.read();
        files.open.get(&id.0).map(|open| Arc::clone(&open.data)).ok_or_else(|| not_open(id))
    }

    /// The bytes of `bufs`, all of which must be on the alignment: there is no copy here.
    fn check_all<'a>(
        &self,
        offset: u64,
        bufs: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        let mut bytes = 0;
        for buf in bufs {
            check_range(self.access.alignment, offset, buf.len())?;
            if self.needs_bounce(buf.as_ptr()) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "memory off the alignment",
                ));
            }
            bytes += buf.len();
        }
        Ok(bytes)
    }

    fn needs_bounce(&self, address: *const u8) -> bool {
        !(address as usize).is_multiple_of(self.access.alignment.memory as usize)
    }
}

impl Disk for PosixDisk {
    fn name(&self) -> &'static str {
        "posix"
    }

    fn alignment(&self) -> Alignment {
        self.access.alignment
    }

    fn is_direct(&self) -> bool {
        self.access.direct
    }

    fn direct_reason(&self) -> String {
        self.access.reason.clone()
    }

    fn list(&self) -> Result<Vec<(String, u64)>> {
        list(&self.dir).map_err(|err| directory_error("list directory", &self.path, err))
    }

    fn read_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        const OP: &str = "read file";
        check_name(OP, name)?;
        let file = match self.open_existing(name, OFlags::RDONLY) {
            Ok(file) => file,
            Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(err) => return Err(self.error(OP, name, err)),
        };
        let bound = max_bytes.saturating_add(1);
        let len = file.metadata().map_or(0, |meta| meta.len()).min(bound);
        let len = usize::try_from(len).unwrap_or(usize::MAX - 1);
        let bytes = read_file_whole(file, len, bound).map_err(|err| self.error(OP, name, err))?;
        if bytes.len() as u64 > max_bytes {
            return Err(too_large(OP, name, max_bytes));
        }
        Ok(Some(bytes))
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        const OP: &str = "write file";
        check_name(OP, name)?;
        let _one_at_a_time = self.changes.lock();
        self.replace(name, bytes).map_err(|err| self.error(OP, name, err))?;
        self.forget(name);
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        const OP: &str = "remove file";
        check_name(OP, name)?;
        let _one_at_a_time = self.changes.lock();
        let removed = self.unlink(name);
        // Also where somebody else deleted it: an open descriptor would keep its space.
        self.forget(name);
        removed.and_then(|()| self.dir.sync_all()).map_err(|err| self.error(OP, name, err))
    }

    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        const OP: &str = "create file";
        check_name(OP, name)?;
        let _one_at_a_time = self.changes.lock();
        let failed = |err| self.error(OP, name, err);
        let file = self.create_new(name, self.data_flags()).map_err(failed)?;
        if let Err(err) = self.allocate(&file, bytes) {
            if let Err(err) = self.unlink(name).and_then(|()| self.dir.sync_all()) {
                tracing::error!(name, %err, "a partly allocated file stays");
            }
            return Err(failed(err));
        }
        Ok(self.register(name, file, bytes))
    }

    fn open(&self, name: &str) -> Result<(FileId, u64)> {
        const OP: &str = "open file";
        check_name(OP, name)?;
        let _one_at_a_time = self.changes.lock();
        let failed = |err| self.error(OP, name, err);
        let known = {
            let files = self.files.read();
            let found = files.open.iter().find(|(_, open)| open.name == name);
            found.map(|(&id, open)| (FileId(id), open.data.bytes()))
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let file = self.open_existing(name, self.data_flags()).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        Ok((self.register(name, file, bytes), bytes))
    }

    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let unit = self.access.alignment;
        check_range(unit, offset, buf.len())?;
        let open = self.file(file)?;
        if !self.needs_bounce(buf.as_ptr()) {
            return read_whole(open.file(), unit, offset, buf);
        }
        let mut bounce = bounce_buffer(buf.len())?;
        let mut at = offset;
        for piece in buf.chunks_mut(BOUNCE_BYTES) {
            let from = &mut bounce.as_mut_slice()[..piece.len()];
            read_whole(open.file(), unit, at, from)?;
            piece.copy_from_slice(from);
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        let unit = self.access.alignment;
        check_range(unit, offset, buf.len())?;
        let open = self.file(file)?;
        open.check_write(offset, buf.len())?;
        if !self.needs_bounce(buf.as_ptr()) {
            return write_whole(open.file(), unit, offset, buf);
        }
        let mut bounce = bounce_buffer(buf.len())?;
        let mut at = offset;
        for piece in buf.chunks(BOUNCE_BYTES) {
            let to = &mut bounce.as_mut_slice()[..piece.len()];
            to.copy_from_slice(piece);
            write_whole(open.file(), unit, at, to)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn read_vectored_at(
        &self,
        file: FileId,
        offset: u64,
        bufs: &mut [IoSliceMut<'_>],
    ) -> io::Result<()> {
        let (unit, open) = (self.access.alignment, self.file(file)?);
        self.check_all(offset, bufs.iter().map(|buf| &**buf))?;
        vectored::read_all(open.file(), unit, offset, bufs)
    }

    fn write_vectored_at(
        &self,
        file: FileId,
        offset: u64,
        bufs: &mut [IoSlice<'_>],
    ) -> io::Result<()> {
        let (unit, open) = (self.access.alignment, self.file(file)?);
        let bytes = self.check_all(offset, bufs.iter().map(|buf| &**buf))?;
        open.check_write(offset, bytes)?;
        vectored::write_all(open.file(), unit, offset, bufs)
    }

    fn sync(&self, file: FileId) -> io::Result<()> {
        self.file(file)?.file().sync_data()
    }

    fn descriptors(&self) -> Option<&dyn Descriptors> {
        Some(self)
    }
}

impl Descriptors for PosixDisk {
    fn data_file(&self, file: FileId) -> io::Result<Arc<DataFile>> {
        self.file(file)
    }
}

pub(crate) fn bounce_buffer(len: usize) -> io::Result<AlignedBuf> {
    let len = len.clamp(1, BOUNCE_BYTES).next_multiple_of(PAGE_BYTES as usize);
    AlignedBuf::new(len).map_err(|err| io::Error::new(io::ErrorKind::OutOfMemory, err))
}

fn read_whole(file: &File, unit: Alignment, mut offset: u64, mut buf: &mut [u8]) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, offset) {
            Ok(done) => {
                let done = usable(unit, done, buf.len());
                if done == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                buf = &mut buf[done..];
                offset += done as u64;
            }
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(())
}

pub(crate) fn write_whole(
    file: &File,
    unit: Alignment,
    mut offset: u64,
    mut buf: &[u8],
) -> io::Result<()> {
    while !buf.is_empty() {
        match file.write_at(buf, offset) {
            Ok(done) => {
                let done = usable(unit, done, buf.len());
                if done == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                buf = &buf[done..];
                offset += done as u64;
            }
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(())
}

/// Allocates all of a new file, so that no later write can run out of space.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::io::Errno;
    if bytes == 0 {
        return Ok(());
    }
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            // A file beyond the process' limit: for the caller the same as no space.
            Err(Errno::FBIG) => return Err(io::ErrorKind::StorageFull.into()),
            Err(Errno::OPNOTSUPP) => return write_zeros(file, bytes),
            Err(err) => return Err(err.into()),
        }
    }
}

/// The slow way, for file systems that allocate only what is written.
fn write_zeros(file: &File, bytes: u64) -> io::Result<()> {
    let zeros = bounce_buffer(BOUNCE_BYTES)?;
    let unit = Alignment { memory: 1, offset: 1 };
    let mut at = 0;
    while at < bytes {
        let len = (bytes - at).min(BOUNCE_BYTES as u64) as usize;
        write_whole(file, unit, at, &zeros.as_slice()[..len])?;
        at += len as u64;
    }
    Ok(())
}

fn list(dir: &File) -> io::Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    for name in names(dir)? {
        if name.starts_with('.') {
            continue;
        }
        let stat = match rustix::fs::statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(rustix::io::Errno::NOENT) => continue,
            Err(err) => return Err(err.into()),
        };
        if FileType::from_raw_mode(stat.st_mode).is_file() {
            files.push((name, (stat.st_blocks as u64).saturating_mul(512)));
        }
    }
    files.sort();
    Ok(files)
}

/// The names in a directory that are text; others are not the store's.
fn names(dir: &File) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        if let Ok(name) = entry?.file_name().to_str() {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn remove_scratch(dir: &File) -> io::Result<()> {
    for name in names(dir)?.iter().filter(|name| name.starts_with(SCRATCH_PREFIX)) {
        rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
    }
    Ok(())
}
