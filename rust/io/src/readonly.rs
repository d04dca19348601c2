//! The files of a store directory, for those who only look: nothing is made, probed or deleted.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use tiered_kv_types::{Error, ErrorKind, Result};

use crate::directory::directory_error;
use crate::disk::{Alignment, Disk, FileId, check_name, check_range, not_open, too_large};

const OP: &str = "read directory";
const UNIT: u32 = 4096;

/// A store directory that is only read. Hold [`crate::DirLock::observe`] meanwhile.
pub struct ReadOnlyDisk {
    path: PathBuf,
    /// Guards the names by id, and the file read last: a store has more files than a process may
    /// keep open.
    files: Mutex<Files>,
}

#[derive(Default)]
struct Files {
    names: Vec<String>,
    last: Option<(FileId, File)>,
}

impl ReadOnlyDisk {
    /// Looks at a directory that is there.
    ///
    /// # Errors
    /// `NotFound`; `Config` for something else than a directory; the operating system's.
    pub fn open(dir: &Path) -> Result<Self> {
        let meta = std::fs::metadata(dir).map_err(|err| directory_error(OP, dir, err))?;
        if !meta.is_dir() {
            let context = format!("{} is not a directory: name a store's directory", dir.display());
            return Err(Error::new(ErrorKind::Config, OP, context));
        }
        Ok(Self { path: dir.to_path_buf(), files: Mutex::default() })
    }

    fn file(&self, name: &str, direct: bool) -> io::Result<File> {
        let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
        // A pipe of that name must not block the caller.
        let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | direct;
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a file")) }
    }

    fn error(&self, name: &str, err: io::Error) -> Error {
        Error::from_io(OP, self.path.join(name).display().to_string(), err)
    }

    fn refused<T>(&self) -> Result<T> {
        Err(Error::new(ErrorKind::Unsupported, OP, "the directory was opened to be read only"))
    }
}

impl Disk for ReadOnlyDisk {
    fn name(&self) -> &'static str {
        "readonly"
    }

    fn alignment(&self) -> Alignment {
        Alignment { memory: UNIT, offset: UNIT }
    }

    fn is_direct(&self) -> bool {
        false
    }

    fn direct_reason(&self) -> String {
        "past the page cache where the file system allows".to_owned()
    }

    fn list(&self) -> Result<Vec<(String, u64)>> {
        let failed = |err: io::Error| directory_error(OP, &self.path, err);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let meta = entry.metadata().map_err(failed)?;
            if let (true, Ok(name)) = (meta.is_file(), entry.file_name().into_string()) {
                found.push((name, meta.len()));
            }
        }
        found.sort();
        Ok(found)
    }

    fn read_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        check_name(OP, name)?;
        let file = match self.file(name, false) {
            Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|err| self.error(name, err))?,
        };
        let mut bytes = Vec::new();
        let read = file.take(max_bytes + 1).read_to_end(&mut bytes);
        read.map_err(|err| self.error(name, err))?;
        if bytes.len() as u64 > max_bytes {
            return Err(too_large(OP, name, max_bytes));
        }
        Ok(Some(bytes))
    }

    fn write_file(&self, _name: &str, _bytes: &[u8]) -> Result<()> {
        self.refused()
    }

    fn remove(&self, _name: &str) -> Result<()> {
        self.refused()
    }

    fn create(&self, _name: &str, _bytes: u64) -> Result<FileId> {
        self.refused()
    }

    fn open(&self, name: &str) -> Result<(FileId, u64)> {
        check_name(OP, name)?;
        let file = self.file(name, false).map_err(|err| self.error(name, err))?;
        let bytes = file.metadata().map_err(|err| self.error(name, err))?.len();
        let mut files = self.files.lock();
        let at = files.names.iter().position(|known| known == name).unwrap_or_else(|| {
            files.names.push(name.to_owned());
            files.names.len() - 1
        });
        Ok((FileId(u32::try_from(at).expect("fewer than 2^32 files")), bytes))
    }

    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.alignment(), offset, buf.len())?;
        let mut files = self.files.lock();
        if files.last.as_ref().is_none_or(|(id, _)| *id != file) {
            let name = files.names.get(file.0 as usize).ok_or_else(|| not_open(file))?;
            // What the device has is meant, not what the page cache remembers.
            let open = self.file(name, true).or_else(|_| self.file(name, false))?;
            files.last = Some((file, open));
        }
        let (_, open) = files.last.as_ref().expect("opened above");
        match open.read_exact_at(buf, offset) {
            Err(err) if err.kind() == io::ErrorKind::InvalidInput => {
                let name = files.names.get(file.0 as usize).ok_or_else(|| not_open(file))?;
                self.file(name, false)?.read_exact_at(buf, offset)
            }
            other => other,
        }
    }

    fn write_at(&self, _file: FileId, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self, _file: FileId) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}
