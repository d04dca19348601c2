//! What goes wrong in the simulated world, and what it does to the promises.
//!
//! A fault that nobody is told of (a write that never lands or lands elsewhere, a bit that flips at
//! rest) takes the promise to be found again from exactly the copies that it touched. It never
//! excuses a wrong byte.

use super::world::{DRIVE, JOURNAL_PAGES, World};
use crate::io::{JOURNAL, segment_name};
use crate::machine::DriveId;
use std::collections::BTreeMap;
use tiered_kv_io::{Disk, FileId};
use tiered_kv_types::record::RECORD_BYTES;
use tiered_kv_types::{BlockKey, Checkpoint, PAGE_BYTES, RecordHeader, SegmentHeader};

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Some sectors of an unsynced write are lost at a power cut.
    Torn,
    /// An unsynced write is lost at a power cut.
    Unsynced,
    /// Unsynced writes reached the device in another order than they were made in.
    Reordered,
    /// A write was cut off by the power cut, or ended without anybody hearing of it.
    CutInFlight,
    /// A write is acknowledged and never lands.
    Lost,
    /// A write lands where another slot is.
    Misdirected,
    /// A bit flips, at rest or on its way.
    Flipped,
    ShortRead,
    ReadError,
    /// A read fails while the store is opened.
    OpenError,
    /// A write fails, and any part of it has landed.
    WriteError,
    SyncError,
    NoSpace,
    /// An operation does not end for so long that deadlines pass.
    Stall,
    PowerCut,
}

impl Fault {
    pub(super) const ALL: [Self; 15] = [
        Self::Torn,
        Self::Unsynced,
        Self::Reordered,
        Self::CutInFlight,
        Self::Lost,
        Self::Misdirected,
        Self::Flipped,
        Self::ShortRead,
        Self::ReadError,
        Self::OpenError,
        Self::WriteError,
        Self::SyncError,
        Self::NoSpace,
        Self::Stall,
        Self::PowerCut,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Torn => "torn_write",
            Self::Unsynced => "unsynced_write_lost",
            Self::Reordered => "writes_reordered",
            Self::CutInFlight => "cut_in_flight",
            Self::Lost => "write_lost",
            Self::Misdirected => "write_misdirected",
            Self::Flipped => "bit_flipped",
            Self::ShortRead => "short_read",
            Self::ReadError => "read_error",
            Self::OpenError => "read_error_at_open",
            Self::WriteError => "write_error",
            Self::SyncError => "sync_error",
            Self::NoSpace => "no_space",
            Self::Stall => "stall",
            Self::PowerCut => "power_cut",
        }
    }
}

/// A place on a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) drive: DriveId,
    pub(super) file: FileId,
    pub(super) offset: u64,
}

/// What a write is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Payload(BlockKey),
    Headers,
    /// The header page and the empty table of a segment.
    Image,
    Journal,
}

enum Fate {
    Lands,
    Lost,
    /// Over the block of this key.
    Elsewhere(Place, BlockKey),
}

/// A record that the machine counts on, with the places of its payload and its header.
pub(super) struct Counted {
    pub(super) record: RecordHeader,
    pub(super) payload: Place,
    pub(super) header: Place,
}

fn key_of(header: &[u8]) -> Option<BlockKey> {
    RecordHeader::decode(&header[..RECORD_BYTES]).valid().map(|record| record.key)
}

impl World {
    pub(super) fn struck(&mut self, fault: Fault, what: impl FnOnce() -> String) {
        self.struck_by[fault as usize] += 1;
        self.note(|| format!("fault {}: {}", fault.name(), what()));
    }

    /// Writes to a drive that may do something else and say that it did as it was told.
    pub(super) fn write_at(&mut self, at: Place, bytes: &[u8], of: Content) {
        let to = match self.fate(at, bytes, of) {
            Fate::Lands => {
                self.landed(at, bytes, of);
                at
            }
            Fate::Lost => {
                self.struck(Fault::Lost, || format!("{of:?} at {at:?}"));
                return self.never_landed(at, bytes, of);
            }
            Fate::Elsewhere(to, victim) => {
                self.struck(Fault::Misdirected, || format!("{of:?} at {at:?} went to {to:?}"));
                self.never_landed(at, bytes, of);
                self.oracle.touched(&victim);
                to
            }
        };
        let disk = &self.disks[usize::from(to.drive)];
        disk.write_at(to.file, to.offset, bytes).expect("the simulated disk writes");
    }

    /// A write that fails: nothing, a part or all of it has landed.
    pub(super) fn write_failing(&mut self, at: Place, bytes: &[u8]) {
        let pages = bytes.len() as u64 / PAGE_BYTES;
        let landed = match self.draw(3) {
            0 => 0,
            1 => self.draw(pages + 1),
            _ => pages,
        };
        let len = usize::try_from(landed * PAGE_BYTES).expect("small");
        let disk = &self.disks[usize::from(at.drive)];
        disk.write_at(at.file, at.offset, &bytes[..len]).expect("the simulated disk writes");
        self.struck(Fault::WriteError, || format!("{landed} pages landed at {at:?}"));
    }

    fn fate(&mut self, at: Place, bytes: &[u8], of: Content) -> Fate {
        let kind = if self.calm { u64::MAX } else { self.draw(150) };
        match (kind, of) {
            // The other drive has every tombstone too.
            (0, Content::Journal) if usize::from(at.drive) != self.journal_victim => Fate::Lands,
            (0, _) => Fate::Lost,
            (1, Content::Payload(_) | Content::Headers) => {
                let fits = |c: &Counted| match of {
                    Content::Payload(_) => {
                        tiered_kv_types::round_up_to_page(c.record.payload_bytes)
                            == bytes.len() as u64
                    }
                    _ => bytes.len() as u64 == u64::from(DRIVE.header_stride),
                };
                let place = |c: &Counted| match of {
                    Content::Payload(_) => c.payload,
                    _ => c.header,
                };
                let others = self.counted_on(at.drive);
                let others: Vec<&Counted> =
                    others.iter().filter(|c| fits(c) && place(c) != at).collect();
                if others.is_empty() {
                    return Fate::Lands;
                }
                let victim = others[self.draw(others.len() as u64) as usize];
                Fate::Elsewhere(place(victim), victim.record.key)
            }
            _ => Fate::Lands,
        }
    }

    fn landed(&mut self, at: Place, bytes: &[u8], of: Content) {
        let segment = (at.drive, at.file);
        match of {
            Content::Image => drop(self.bad_segments.remove(&segment)),
            Content::Headers if self.bad_segments.contains(&segment) => {
                for key in bytes.chunks(PAGE_BYTES as usize).filter_map(key_of) {
                    self.oracle.touched(&key);
                }
            }
            _ => {}
        }
    }

    /// What a write was to replace is still there, and what it was to bring is not.
    fn never_landed(&mut self, at: Place, bytes: &[u8], of: Content) {
        match of {
            Content::Payload(key) => self.oracle.touched(&key),
            Content::Headers => {
                for key in bytes.chunks(PAGE_BYTES as usize).filter_map(key_of) {
                    self.oracle.touched(&key);
                }
                self.rise(at, bytes.len() as u64);
            }
            Content::Image => {
                self.bad_segments.insert((at.drive, at.file));
                self.rise(at, DRIVE.segment_bytes);
            }
            // There is another copy of it.
            Content::Journal => {}
        }
    }

    /// The records whose headers lie here and should have gone may be found again, also instead of
    /// what was written since.
    fn rise(&mut self, at: Place, len: u64) {
        for key in self.keys_at(at, len) {
            self.oracle.risen(&key);
            self.oracle.touched(&key);
        }
    }

    /// The keys of the headers that lie here.
    pub(super) fn keys_at(&self, at: Place, len: u64) -> Vec<BlockKey> {
        let mut bytes = vec![0; usize::try_from(len).expect("small")];
        let disk = &self.disks[usize::from(at.drive)];
        disk.read_at(at.file, at.offset, &mut bytes).expect("the simulated disk reads");
        bytes.chunks(PAGE_BYTES as usize).filter_map(key_of).collect()
    }

    pub(super) fn counted_on(&self, drive: DriveId) -> Vec<Counted> {
        let Checkpoint { segments, records } = self.machine.checkpoint(drive);
        let headers: BTreeMap<u32, SegmentHeader> =
            segments.into_iter().map(|header| (header.segment, header)).collect();
        let disk = &self.disks[usize::from(drive)];
        let counted = |record: RecordHeader| {
            let segment = headers.get(&record.segment).expect("a record lies in a segment in use");
            let (file, _) = disk.open(&segment_name(record.segment)).expect("its file is there");
            let slot = u64::from(record.slot);
            let payload = segment.data_offset + slot * segment.slot_bytes;
            let at = |offset| Place { drive, file, offset };
            Counted { record, payload: at(payload), header: at(DRIVE.header_offset(record.slot)) }
        };
        records.into_iter().map(counted).collect()
    }

    /// One bit of what a drive holds flips.
    pub(super) fn flip_bit(&mut self) {
        if self.calm {
            return;
        }
        let drive = self.draw(self.disks.len() as u64) as DriveId;
        let mask = 1 << self.draw(8);
        let kind = self.draw(8);
        if kind == 0 {
            let offset = self.draw(JOURNAL_PAGES * PAGE_BYTES);
            self.disks[self.journal_victim].flip(JOURNAL, offset, mask);
            return self.struck(Fault::Flipped, || format!("journal, byte {offset}"));
        }
        let counted = self.counted_on(drive);
        if counted.is_empty() {
            return;
        }
        let Counted { record, payload, header } =
            &counted[self.draw(counted.len() as u64) as usize];
        let name = segment_name(record.segment);
        let offset = match kind {
            1 => {
                self.bad_segments.insert((drive, payload.file));
                let at = Place { offset: 0, ..*payload };
                for key in self.keys_at(at, DRIVE.segment_bytes) {
                    self.oracle.touched(&key);
                }
                self.draw(80)
            }
            2..4 => header.offset + self.draw(RECORD_BYTES as u64),
            _ => payload.offset + self.draw(record.payload_bytes),
        };
        self.oracle.touched(&record.key);
        self.disks[usize::from(drive)].flip(&name, offset, mask);
        self.struck(Fault::Flipped, || format!("{name} of drive {drive}, byte {offset}"));
    }
}
