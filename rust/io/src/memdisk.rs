//! A disk in memory, for tests: it can fail on demand and lose power.

use std::collections::BTreeMap;
use std::io;

use parking_lot::Mutex;
use tiered_kv_types::{Error, Result};

use crate::PAGE_BYTES;
use crate::disk::{Alignment, Disk, FileId, check_name, check_range, not_open, too_large};

/// What a device writes whole or not at all, in bytes.
const SECTOR_BYTES: usize = 512;

/// An operation that a fault hook may fail.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is the call of the same name, with its arguments")]
pub enum DiskOp {
    List,
    ReadFile { name: String },
    WriteFile { name: String },
    Remove { name: String },
    Create { name: String, bytes: u64 },
    Open { name: String },
    ReadAt { file: FileId, offset: u64, len: usize },
    WriteAt { file: FileId, offset: u64, len: usize },
    Sync { file: FileId },
}

/// Decides which operations fail; a failed one has no effect. Called with no lock but its own held.
pub type FaultHook = Box<dyn FnMut(DiskOp) -> Option<io::Error> + Send>;

/// Files in memory, of which the device has only what was synced.
pub struct MemDisk {
    state: Mutex<State>,
    fault: Mutex<Option<FaultHook>>,
    alignment: Alignment,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, MemFile>,
    /// The name of each open file, by id; `None` once it is removed.
    open: Vec<Option<String>>,
    /// Writes that a power cut may lose, oldest first.
    unsynced: Vec<Write>,
}

#[derive(Clone)]
struct MemFile {
    /// What reads see.
    seen: Vec<u8>,
    /// What the device has for certain.
    durable: Vec<u8>,
}

struct Write {
    name: String,
    offset: usize,
    bytes: Vec<u8>,
}

impl MemDisk {
    /// An empty disk that asks for whole pages, the strictest device there is.
    pub fn new() -> Self {
        Self::with_alignment(Alignment { memory: 1, offset: PAGE_BYTES as u32 })
    }

    /// An empty disk that asks for `alignment`.
    pub fn with_alignment(alignment: Alignment) -> Self {
        Self { state: Mutex::default(), fault: Mutex::new(None), alignment }
    }

    /// Sets or clears the hook that fails operations.
    pub fn set_fault(&self, fault: Option<FaultHook>) {
        *self.fault.lock() = fault;
    }

    /// Writes that a power cut now may lose.
    pub fn unsynced_writes(&self) -> usize {
        self.state.lock().unsynced.len()
    }

    /// What the device holds after a power cut now: all that was synced and, of the unsynced writes
    /// in their order, those for whose number `keep` says yes. No file of the new disk is open.
    pub fn crash(&self, mut keep: impl FnMut(usize) -> bool) -> Self {
        self.crash_torn(|write, _| keep(write))
    }

    /// The same where single 512-byte sectors may be lost: `keep(write, sector of the write)`.
    pub fn crash_torn(&self, keep: impl FnMut(usize, usize) -> bool) -> Self {
        let in_order: Vec<usize> = (0..self.unsynced_writes()).collect();
        self.crash_reordered(&in_order, keep)
    }

    /// The same where the unsynced writes reached the device in another order: `order` names each
    /// of them once.
    ///
    /// # Panics
    /// Where it names one that is not there.
    pub fn crash_reordered(
        &self,
        order: &[usize],
        mut keep: impl FnMut(usize, usize) -> bool,
    ) -> Self {
        let state = self.state.lock();
        let mut files = state.files.clone();
        for number in order {
            let write = &state.unsynced[*number];
            let file = files.get_mut(&write.name).expect("removing a file removes its writes");
            for (sector, bytes) in write.bytes.chunks(SECTOR_BYTES).enumerate() {
                if keep(*number, sector) {
                    let at = write.offset + sector * SECTOR_BYTES;
                    file.durable[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        files.values_mut().for_each(|file| file.seen.clone_from(&file.durable));
        let image = Self::with_alignment(self.alignment);
        image.state.lock().files = files;
        image
    }

    /// Damages what the device holds: flips the bits of `mask` in one byte of a file.
    ///
    /// # Panics
    /// If there is no such byte.
    pub fn flip(&self, name: &str, offset: u64, mask: u8) {
        let mut state = self.state.lock();
        let file = state.files.get_mut(name).expect("the file to damage exists");
        file.seen[offset as usize] ^= mask;
        file.durable[offset as usize] ^= mask;
    }

    fn check(&self, op: impl FnOnce() -> DiskOp) -> io::Result<()> {
        match &mut *self.fault.lock() {
            Some(fault) => fault(op()).map_or(Ok(()), Err),
            None => Ok(()),
        }
    }
}

impl Default for MemDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn name_of(&self, file: FileId) -> io::Result<String> {
        self.open.get(file.0 as usize).cloned().flatten().ok_or_else(|| not_open(file))
    }

    fn id_of(&mut self, name: &str) -> FileId {
        let known = self.open.iter().position(|open| open.as_deref() == Some(name));
        let id = known.unwrap_or_else(|| {
            self.open.push(Some(name.to_owned()));
            self.open.len() - 1
        });
        FileId(id as u32)
    }

    /// The range of `len` bytes in a file.
    fn range(&self, name: &str, offset: u64, len: usize) -> io::Result<std::ops::Range<usize>> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start.checked_add(len).ok_or(io::ErrorKind::UnexpectedEof)?;
        if end > self.files[name].seen.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(start..end)
    }
}

fn absent() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Disk for MemDisk {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn is_direct(&self) -> bool {
        false
    }

    fn direct_reason(&self) -> String {
        "the files are in memory".into()
    }

    fn list(&self) -> Result<Vec<(String, u64)>> {
        self.check(|| DiskOp::List).map_err(|err| Error::from_io("list directory", "", err))?;
        let state = self.state.lock();
        let bytes = |file: &MemFile| (file.seen.len() as u64).next_multiple_of(PAGE_BYTES);
        Ok(state.files.iter().map(|(name, file)| (name.clone(), bytes(file))).collect())
    }

    fn read_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        const OP: &str = "read file";
        check_name(OP, name)?;
        self.check(|| DiskOp::ReadFile { name: name.to_owned() })
            .map_err(|err| Error::from_io(OP, name, err))?;
        match self.state.lock().files.get(name) {
            Some(file) if file.seen.len() as u64 > max_bytes => Err(too_large(OP, name, max_bytes)),
            file => Ok(file.map(|file| file.seen.clone())),
        }
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        const OP: &str = "write file";
        check_name(OP, name)?;
        self.check(|| DiskOp::WriteFile { name: name.to_owned() })
            .map_err(|err| Error::from_io(OP, name, err))?;
        let mut state = self.state.lock();
        // The new file takes the name; writes to the old one are to a file without name.
        state.forget(name);
        let file = MemFile { seen: bytes.to_vec(), durable: bytes.to_vec() };
        state.files.insert(name.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        const OP: &str = "remove file";
        check_name(OP, name)?;
        self.check(|| DiskOp::Remove { name: name.to_owned() })
            .map_err(|err| Error::from_io(OP, name, err))?;
        let mut state = self.state.lock();
        state.forget(name);
        let removed = state.files.remove(name);
        removed.map(|_| ()).ok_or_else(|| Error::from_io(OP, name, absent()))
    }

    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        const OP: &str = "create file";
        check_name(OP, name)?;
        let failed = |err| Error::from_io(OP, name, err);
        self.check(|| DiskOp::Create { name: name.to_owned(), bytes }).map_err(failed)?;
        let mut state = self.state.lock();
        if state.files.contains_key(name) {
            return Err(failed(io::ErrorKind::AlreadyExists.into()));
        }
        let zeros = vec![0; usize::try_from(bytes).map_err(io::Error::other).map_err(failed)?];
        let file = MemFile { seen: zeros.clone(), durable: zeros };
        state.files.insert(name.to_owned(), file);
        Ok(state.id_of(name))
    }

    fn open(&self, name: &str) -> Result<(FileId, u64)> {
        const OP: &str = "open file";
        check_name(OP, name)?;
        let failed = |err| Error::from_io(OP, name, err);
        self.check(|| DiskOp::Open { name: name.to_owned() }).map_err(failed)?;
        let mut state = self.state.lock();
        let file = state.files.get(name).ok_or_else(|| failed(absent()))?;
        let bytes = file.seen.len() as u64;
        Ok((state.id_of(name), bytes))
    }

    fn read_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.alignment, offset, buf.len())?;
        self.check(|| DiskOp::ReadAt { file, offset, len: buf.len() })?;
        let state = self.state.lock();
        let name = state.name_of(file)?;
        let range = state.range(&name, offset, buf.len())?;
        buf.copy_from_slice(&state.files[&name].seen[range]);
        Ok(())
    }

    fn write_at(&self, file: FileId, offset: u64, buf: &[u8]) -> io::Result<()> {
        check_range(self.alignment, offset, buf.len())?;
        self.check(|| DiskOp::WriteAt { file, offset, len: buf.len() })?;
        let mut state = self.state.lock();
        let name = state.name_of(file)?;
        let range = state.range(&name, offset, buf.len())?;
        let offset = range.start;
        state.files.get_mut(&name).expect("an open file exists").seen[range].copy_from_slice(buf);
        state.unsynced.push(Write { name, offset, bytes: buf.to_vec() });
        Ok(())
    }

    fn sync(&self, file: FileId) -> io::Result<()> {
        self.check(|| DiskOp::Sync { file })?;
        let mut state = self.state.lock();
        let name = state.name_of(file)?;
        let state = &mut *state;
        let target = state.files.get_mut(&name).expect("an open file exists");
        for write in state.unsynced.extract_if(.., |write| write.name == name) {
            target.durable[write.offset..][..write.bytes.len()].copy_from_slice(&write.bytes);
        }
        Ok(())
    }
}

impl State {
    /// Closes a file that loses its name, and drops its writes.
    fn forget(&mut self, name: &str) {
        self.unsynced.retain(|write| write.name != name);
        let open = self.open.iter_mut().filter(|open| open.as_deref() == Some(name));
        open.for_each(|open| *open = None);
    }
}
