//! Commands to the drive: turned into requests of the I/O engine, and their results into events.

mod parts;

use crate::direct::DirectRead;
use crate::driver::Core;
use crate::machine::{BlockId, Command, DriveId, Event, HeaderWrite, LoadFault, OpId, SlabRead};
use crate::resident::{Filling, Resident, SlabWrite};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, OnceLock, Weak};
use tiered_kv_io::{
    AlignedBuf, CancelFlag, FileId, IoDone, IoEngine, IoOp, IoRequest, PAGE_BYTES, Priority,
    ReadInto, Region, RegionSlot, Registration, SlotMut, is_cancelled,
};
use tiered_kv_types::tombstone::JOURNAL_PAGE_BYTES;

pub(crate) use parts::verify;
use parts::{HeaderBuf, aligned, check, commit, store};

/// The name of the journal's file.
pub(crate) const JOURNAL: &str = "journal.tkv";

/// The name of a segment's file.
pub(crate) fn segment_name(segment: u32) -> String {
    format!("segment-{segment:06}.tkv")
}

/// The number of the segment in a file of this name, if it is one's name.
pub(crate) fn segment_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("segment-")?.strip_suffix(".tkv")?;
    let number = digits.parse().ok()?;
    (segment_name(number) == name).then_some(number)
}

/// What a request in flight belongs to; the last of its parts makes the event.
enum Task {
    Load {
        block: BlockId,
        filling: Filling,
        slots: Vec<Option<SlotMut>>,
        /// The checksum of each slot, where it came with the bytes.
        known: SmallVec<[Option<u32>; 1]>,
        crcs: Vec<u32>,
    },
    LoadInto {
        op: OpId,
        item: usize,
        block: BlockId,
        read: DirectRead,
    },
    Slabs {
        group: u64,
        block: BlockId,
    },
    Headers {
        group: u64,
    },
    Sync {
        group: u64,
    },
    /// Bytes of an existing file are written, then synced.
    Rewrite {
        file: FileId,
        what: Rewritten,
        synced: bool,
    },
    Create {
        segment: u32,
    },
    Probe,
    Scrub {
        block: BlockId,
        pass: Option<OpId>,
        /// Each slab's bytes once they are read, its length and its checksum.
        slabs: SmallVec<[(Option<AlignedBuf>, u64, u32); 1]>,
    },
}

/// What a rewrite was of.
#[derive(Clone, Copy)]
enum Rewritten {
    Segment(u32),
    Journal { zero: bool },
}

struct Tracked {
    task: Task,
    left: usize,
    fault: Option<io::Error>,
}

struct Requests {
    tasks: HashMap<u64, Tracked>,
    next: u64,
}

/// A direct read to be begun, with the caller's slot.
pub(crate) struct LoadInto {
    pub(crate) op: OpId,
    pub(crate) item: usize,
    pub(crate) block: BlockId,
    pub(crate) reads: SmallVec<[SlabRead; 1]>,
    pub(crate) cancel: CancelFlag,
    pub(crate) slot: RegionSlot,
}

/// Between the driver and the engine of one drive.
pub(crate) struct IoBridge {
    engine: OnceLock<Box<dyn IoEngine>>,
    /// Guards the tasks in flight.
    requests: Mutex<Requests>,
    drive: DriveId,
    segment_bytes: u64,
    journal: FileId,
    /// Guards the last error that the drive gave.
    last_fault: Mutex<Option<String>>,
}

/// Slabs of one block share a token in its upper bits; the part's number is in the lower.
const PART_BITS: u32 = 8;

impl IoBridge {
    pub(crate) fn new(drive: DriveId, segment_bytes: u64, journal: FileId) -> Self {
        let requests = Mutex::new(Requests { tasks: HashMap::new(), next: 0 });
        Self {
            engine: OnceLock::new(),
            requests,
            drive,
            segment_bytes,
            journal,
            last_fault: Mutex::default(),
        }
    }

    pub(crate) fn set_engine(&self, engine: Box<dyn IoEngine>) {
        assert!(self.engine.set(engine).is_ok(), "the engine is set once, at open");
    }

    pub(crate) fn backend(&self) -> &'static str {
        self.engine.get().map_or("none", |engine| engine.name())
    }

    /// Which backend serves the drive, and why it and not another.
    pub(crate) fn describe(&self) -> String {
        self.engine.get().map_or_else(String::new, |engine| engine.describe())
    }

    /// The last error that the drive gave.
    pub(crate) fn last_fault(&self) -> Option<String> {
        self.last_fault.lock().clone()
    }

    /// Tells the drive's backend of a region.
    pub(crate) fn register(&self, region: &Arc<Region>) -> Registration {
        self.engine.get().map_or(Registration::NotNeeded, |engine| engine.register(region))
    }

    pub(crate) fn close(&self) {
        if let Some(engine) = self.engine.get() {
            engine.close();
        }
    }

    fn track(&self, task: Task, left: usize) -> u64 {
        let mut requests = self.requests.lock();
        let token = requests.next;
        requests.next += 1;
        requests.tasks.insert(token, Tracked { task, left, fault: None });
        token << PART_BITS
    }

    /// Begins direct reads.
    pub(crate) fn load_into(&self, core: &Arc<Core>, loads: Vec<LoadInto>) {
        let mut batch = Vec::new();
        for LoadInto { op, item, block, reads, cancel, slot } in loads {
            let (read, pieces) = match DirectRead::new(slot, &reads) {
                Ok(cut) => cut,
                Err(slot) => {
                    let result = Err(LoadFault::NoMemory);
                    core.slot_back(slot, Event::LoadedInto { op, item, block, result });
                    continue;
                }
            };
            let token = self.track(Task::LoadInto { op, item, block, read }, pieces.len());
            for (part, piece) in pieces.into_iter().enumerate() {
                let op = IoOp::Read { file: piece.file, offset: piece.offset, buf: piece.into };
                let (token, cancel) = (token | part as u64, Some(cancel.clone()));
                batch.push(IoRequest { token, priority: Priority::Load, op, cancel });
            }
        }
        if !batch.is_empty() {
            self.engine.get().expect("set at open").submit(batch);
        }
    }

    pub(crate) fn submit(&self, core: &Arc<Core>, commands: Vec<Command>) {
        let mut batch = Vec::new();
        let mut events = Vec::new();
        for command in commands {
            self.request(command, &mut batch, &mut events);
        }
        if !batch.is_empty() {
            self.engine.get().expect("set at open").submit(batch);
        }
        if !events.is_empty() {
            core.drive(events);
        }
    }

    fn request(&self, command: Command, batch: &mut Vec<IoRequest>, events: &mut Vec<Event>) {
        let drive = self.drive;
        match command {
            Command::Load { block, reads, into, cancel, .. } => {
                self.load(block, reads, into, &cancel, batch);
            }
            Command::Scrub { block, reads, pass, .. } => match self.scrub(block, &reads, pass) {
                Some(requests) => batch.extend(requests),
                None => {
                    let result = Err(LoadFault::NoMemory);
                    events.push(Event::Scrubbed { block, pass, result });
                }
            },
            Command::Probe { .. } => match AlignedBuf::new(JOURNAL_PAGE_BYTES) {
                Ok(page) => {
                    let op =
                        IoOp::Read { file: self.journal, offset: 0, buf: ReadInto::Bounce(page) };
                    let (token, priority) = (self.track(Task::Probe, 1), Priority::Load);
                    batch.push(IoRequest { token, priority, op, cancel: None });
                }
                Err(_) => events.push(Event::Probed { drive, ok: false }),
            },
            Command::WriteSlabs { group, block, from, to, .. } => {
                self.write_slabs(group, block, &from, to, batch);
            }
            Command::WriteHeaders { group, writes, .. } => {
                if writes.is_empty() {
                    return events.push(Event::HeadersWritten { group, drive, ok: true });
                }
                match self.write_headers(group, writes) {
                    Ok(requests) => batch.extend(requests),
                    Err(_) => events.push(Event::HeadersWritten { group, drive, ok: false }),
                }
            }
            Command::Sync { group, files, .. } => {
                if files.is_empty() {
                    return events.push(Event::Synced { group, drive, ok: true });
                }
                self.sync(group, files, batch);
            }
            Command::PrepareSegment { segment, file, image, .. } => {
                match self.prepare(segment, file, &image) {
                    Ok(request) => batch.push(request),
                    Err(err) => {
                        let result = Err(io::Error::other(err.to_string()));
                        events.push(Event::SegmentReady { drive, segment, result });
                    }
                }
            }
            Command::WriteJournal { page, bytes, zero, .. } => {
                let offset = page * JOURNAL_PAGE_BYTES as u64;
                match self.rewrite(self.journal, offset, &bytes, Rewritten::Journal { zero }) {
                    Ok(request) => batch.push(request),
                    Err(_) => events.push(Event::JournalWritten { drive, zero, ok: false }),
                }
            }
            Command::CopyIn { .. }
            | Command::CopyOut { .. }
            | Command::LoadInto { .. }
            | Command::Complete { .. } => unreachable!("the driver keeps these"),
        }
    }

    fn load(
        &self,
        block: BlockId,
        reads: SmallVec<[SlabRead; 1]>,
        mut filling: Filling,
        cancel: &CancelFlag,
        batch: &mut Vec<IoRequest>,
    ) {
        let slots = filling.take_slots();
        let parts = slots.len();
        let crcs = reads.iter().map(|read| read.crc).collect();
        let empty = std::iter::repeat_with(|| None).take(parts).collect();
        let known = smallvec::smallvec![None; parts];
        let task = Task::Load { block, filling, slots: empty, known, crcs };
        let token = self.track(task, parts);
        for (part, (read, buf)) in reads.into_iter().zip(slots).enumerate() {
            let op = IoOp::Read { file: read.file, offset: read.offset, buf: buf.into() };
            let (token, cancel) = (token | part as u64, Some(cancel.clone()));
            batch.push(IoRequest { token, priority: Priority::Load, op, cancel });
        }
    }

    /// Reads of a scrub, into memory of their own; none where that is not to be had.
    fn scrub(
        &self,
        block: BlockId,
        reads: &[SlabRead],
        pass: Option<OpId>,
    ) -> Option<Vec<IoRequest>> {
        let page = |read: &SlabRead| usize::try_from(read.bytes.next_multiple_of(PAGE_BYTES));
        let bufs: Vec<AlignedBuf> = reads
            .iter()
            .map(|read| AlignedBuf::new(page(read).ok()?).ok())
            .collect::<Option<_>>()?;
        let slabs = reads.iter().map(|read| (None, read.bytes, read.crc)).collect();
        let token = self.track(Task::Scrub { block, pass, slabs }, reads.len());
        let request = |(part, (read, buf)): (usize, (&SlabRead, AlignedBuf))| {
            let buf = ReadInto::Bounce(buf);
            let op = IoOp::Read { file: read.file, offset: read.offset, buf };
            let token = token | part as u64;
            IoRequest { token, priority: Priority::Scrub, op, cancel: None }
        };
        Some(reads.iter().zip(bufs).enumerate().map(request).collect())
    }

    fn write_slabs(
        &self,
        group: u64,
        block: BlockId,
        from: &Arc<Resident>,
        to: Vec<(FileId, u64)>,
        batch: &mut Vec<IoRequest>,
    ) {
        let token = self.track(Task::Slabs { group, block }, to.len());
        for (index, (file, offset)) in to.into_iter().enumerate() {
            let buf = Arc::new(SlabWrite { resident: from.clone(), index });
            batch.push(store(token, IoOp::Write { file, offset, buf }));
        }
    }

    fn write_headers(
        &self,
        group: u64,
        writes: Vec<HeaderWrite>,
    ) -> tiered_kv_types::Result<Vec<IoRequest>> {
        let bufs: Vec<(FileId, u64, HeaderBuf)> = writes
            .into_iter()
            .map(|w| Ok((w.file, w.offset, HeaderBuf::new(&w.bytes)?)))
            .collect::<tiered_kv_types::Result<_>>()?;
        let token = self.track(Task::Headers { group }, bufs.len());
        let write =
            |(file, offset, buf)| commit(token, IoOp::Write { file, offset, buf: Arc::new(buf) });
        Ok(bufs.into_iter().map(write).collect())
    }

    fn sync(&self, group: u64, files: BTreeSet<FileId>, batch: &mut Vec<IoRequest>) {
        let token = self.track(Task::Sync { group }, files.len());
        batch.extend(files.into_iter().map(|file| commit(token, IoOp::Sync { file })));
    }

    fn prepare(
        &self,
        segment: u32,
        file: Option<FileId>,
        image: &[u8],
    ) -> tiered_kv_types::Result<IoRequest> {
        if let Some(file) = file {
            return self.rewrite(file, 0, image, Rewritten::Segment(segment));
        }
        let header = aligned(image)?;
        let token = self.track(Task::Create { segment }, 1);
        let (name, bytes) = (segment_name(segment), self.segment_bytes);
        Ok(commit(token, IoOp::Create { name, bytes, header, file: None }))
    }

    fn rewrite(
        &self,
        file: FileId,
        offset: u64,
        bytes: &[u8],
        what: Rewritten,
    ) -> tiered_kv_types::Result<IoRequest> {
        let buf = Arc::new(aligned(bytes)?);
        let token = self.track(Task::Rewrite { file, what, synced: false }, 1);
        Ok(commit(token, IoOp::Write { file, offset, buf }))
    }

    /// Takes a completion; the last part of a task makes its event.
    pub(crate) fn done(&self, core: &Weak<Core>, done: IoDone) {
        let mut requests = self.requests.lock();
        let token = done.token >> PART_BITS;
        let part = (done.token & ((1 << PART_BITS) - 1)) as usize;
        let Some(tracked) = requests.tasks.get_mut(&token) else { return };
        tracked.left -= 1;
        if let Err(err) = done.result
            && tracked.fault.as_ref().is_none_or(is_cancelled)
        {
            tracked.fault = Some(err);
        }
        let mut created = None;
        match (&mut tracked.task, done.op) {
            (Task::Load { slots, known, .. }, IoOp::Read { buf: ReadInto::Slot(buf), .. }) => {
                (slots[part], known[part]) = (Some(buf), done.crc);
            }
            (Task::LoadInto { read, .. }, IoOp::Read { buf, .. }) => {
                read.ended(part, buf, done.crc);
            }
            (Task::Scrub { slabs, .. }, IoOp::Read { buf: ReadInto::Bounce(buf), .. }) => {
                slabs[part].0 = Some(buf);
            }
            (Task::Create { .. }, IoOp::Create { file, .. }) => created = file,
            _ => {}
        }
        if tracked.left > 0 {
            return;
        }
        let Some(Tracked { task, fault, .. }) = requests.tasks.remove(&token) else { return };
        drop(requests);
        if let Some(err) = fault.as_ref().filter(|err| !is_cancelled(err)) {
            tracing::warn!(%err, "the drive failed an operation");
            *self.last_fault.lock() = Some(err.to_string());
        }
        let core = core.upgrade();
        if let Task::LoadInto { op, item, block, read } = task {
            let (slot, result) = read.finish(fault.map_or(Ok(()), |err| Err(load_fault(&err))));
            if let Some(core) = core {
                core.slot_back(slot, Event::LoadedInto { op, item, block, result });
            }
            return;
        }
        if let Some(event) = self.finish(task, fault, created)
            && let Some(core) = core
        {
            core.drive([event]);
        }
    }

    fn finish(
        &self,
        task: Task,
        fault: Option<io::Error>,
        created: Option<FileId>,
    ) -> Option<Event> {
        let (drive, ok) = (self.drive, fault.is_none());
        Some(match task {
            Task::Load { block, filling, slots, known, crcs } => {
                let result = match fault {
                    Some(err) => {
                        // The pages first, then their numbers: a number given back is taken at
                        // once.
                        drop(slots);
                        drop(filling);
                        Err(load_fault(&err))
                    }
                    None => verify(filling, slots, &known, &crcs).ok_or(LoadFault::Corrupt),
                };
                Event::LoadDone { block, result }
            }
            Task::LoadInto { .. } => unreachable!("it gives its slot back by itself"),
            Task::Scrub { block, pass, slabs } => {
                let read = fault.map_or(Ok(()), |err| Err(load_fault(&err)));
                let result = read.and_then(|()| check(slabs).ok_or(LoadFault::Corrupt));
                Event::Scrubbed { block, pass, result }
            }
            Task::Probe => Event::Probed { drive, ok },
            Task::Slabs { group, block } => Event::SlabsWritten { group, block, ok },
            Task::Headers { group } => Event::HeadersWritten { group, drive, ok },
            Task::Sync { group } => Event::Synced { group, drive, ok },
            Task::Rewrite { file, what, synced: false } if ok => {
                let token = self.track(Task::Rewrite { file, what, synced: true }, 1);
                let sync = commit(token, IoOp::Sync { file });
                self.engine.get().expect("set at open").submit(vec![sync]);
                return None;
            }
            Task::Rewrite { file, what: Rewritten::Segment(segment), .. } => {
                Event::SegmentReady { drive, segment, result: fault.map_or(Ok(file), Err) }
            }
            Task::Rewrite { what: Rewritten::Journal { zero }, .. } => {
                Event::JournalWritten { drive, zero, ok }
            }
            Task::Create { segment } => {
                let none = || io::Error::other("the file was not created");
                let result = match fault {
                    Some(err) => Err(err),
                    None => created.ok_or_else(none),
                };
                Event::SegmentReady { drive, segment, result }
            }
        })
    }
}

/// What the failure of a read means for its block.
fn load_fault(err: &io::Error) -> LoadFault {
    match err.kind() {
        _ if is_cancelled(err) => LoadFault::Cancelled,
        // The drive answered: it is the file that is shorter than what was stored in it.
        io::ErrorKind::UnexpectedEof => LoadFault::Corrupt,
        _ => LoadFault::Io,
    }
}
