//! The commands of the machine, performed on the simulated disks.

use super::faults::{Content, Fault, Place};
use super::memory::Buffer;
use super::world::{Call, DRIVE, World, payload};
use crate::io::{JOURNAL, segment_name, verify};
use crate::machine::{Command, DriveId, Event, HeaderWrite, LoadFault};
use crate::resident::{Resident, SlabWrite};
use std::io;
use tiered_kv_io::{Disk, FileId, ReadBuf, crc32c};
use tiered_kv_types::PAGE_BYTES;

impl World {
    pub(super) fn execute(&mut self, command: Command, mut buffer: Buffer, fails: bool) -> Event {
        match command {
            Command::CopyIn { op, item, into } => {
                let Some(Call::Put(put)) = self.calls.get(&op) else {
                    panic!("a put is known until it completes")
                };
                let layout = &self.layouts[put.ns as usize];
                let bytes = payload(layout, &put.keys[item], put.versions[item]);
                Event::CopiedIn { op, item, filled: Some(into.fill_from(&bytes)) }
            }
            Command::CopyOut { op, item, from } => {
                let intact = from.copy_out(buffer.bytes());
                self.back(op, item, buffer);
                Event::CopiedOut { op, item, intact: Some(intact), generation: from.generation() }
            }
            Command::LoadInto { op, item, block, drive, reads, cancel } => {
                let Buffer::Slot(slot) = buffer else { panic!("only slots are read into") };
                let (slot, result) = self.load_into(slot, drive, &reads, &cancel, fails);
                self.back(op, item, Buffer::Slot(slot));
                Event::LoadedInto { op, item, block, result }
            }
            // Or the device had it before it was dropped, and it ends as any other.
            Command::Load { block, cancel, .. } if cancel.is_set() && self.draw(2) == 0 => {
                Event::LoadDone { block, result: Err(LoadFault::Cancelled) }
            }
            Command::Load { block, drive, reads, mut into, .. } => {
                let mut slots = into.take_slots();
                for (slot, read) in slots.iter_mut().zip(&reads) {
                    self.read(drive, read.file, read.offset, slot.as_mut_slice(), fails);
                }
                let crcs: Vec<u32> = reads.iter().map(|r| r.crc).collect();
                // As the blocking backend tells them.
                let known: Vec<_> =
                    slots.iter().map(|slot| Some(crc32c(slot.as_slice()))).collect();
                let slots = slots.into_iter().map(Some).collect();
                let checked = verify(into, slots, &known, &crcs).ok_or(LoadFault::Corrupt);
                let result = if fails { Err(LoadFault::Io) } else { checked };
                Event::LoadDone { block, result }
            }
            Command::Scrub { block, drive, reads, pass } => {
                let mut sound = true;
                for read in reads {
                    let len = usize::try_from(read.bytes).expect("small");
                    let mut bytes = vec![0; len.next_multiple_of(4096)];
                    self.read(drive, read.file, read.offset, &mut bytes, fails);
                    sound &= tiered_kv_io::crc32c(&bytes[..len]) == read.crc;
                }
                let checked = if sound { Ok(()) } else { Err(LoadFault::Corrupt) };
                let result = if fails { Err(LoadFault::Io) } else { checked };
                Event::Scrubbed { block, pass, result }
            }
            Command::Probe { drive } => Event::Probed { drive, ok: !fails },
            write => self.write(write, fails),
        }
    }

    /// Reads from a drive; one that fails may have filled a part of the memory.
    pub(super) fn read(
        &mut self,
        drive: DriveId,
        file: FileId,
        offset: u64,
        into: &mut [u8],
        fails: bool,
    ) {
        let mut len = into.len();
        if fails {
            let short = self.draw(2) == 0;
            let fault = if short { Fault::ShortRead } else { Fault::ReadError };
            let pages = len as u64 / PAGE_BYTES;
            len = if short { (self.draw(pages) * PAGE_BYTES) as usize } else { 0 };
            self.struck(fault, || format!("{len} bytes came"));
        }
        let disk = &self.disks[usize::from(drive)];
        disk.read_at(file, offset, &mut into[..len]).expect("the simulated disk reads");
    }

    /// Performs a command that writes to a disk.
    fn write(&mut self, command: Command, fails: bool) -> Event {
        match command {
            Command::PrepareSegment { drive, segment, file, image } => {
                let result = self.prepare(drive, segment, file, &image, fails);
                Event::SegmentReady { drive, segment, result }
            }
            Command::WriteSlabs { group, block, drive, from, to } => {
                let key = self.keys[&version_in(&from)];
                for (index, (file, offset)) in to.into_iter().enumerate() {
                    let slot = SlabWrite { resident: from.clone(), index };
                    let at = Place { drive, file, offset };
                    self.put_down(at, slot.as_slice(), Content::Payload(key), fails);
                }
                Event::SlabsWritten { group, block, ok: !fails }
            }
            Command::WriteHeaders { group, drive, writes } => {
                for HeaderWrite { file, offset, bytes } in writes {
                    self.put_down(Place { drive, file, offset }, &bytes, Content::Headers, fails);
                }
                Event::HeadersWritten { group, drive, ok: !fails }
            }
            Command::Sync { group, drive, files } => {
                if fails {
                    self.struck(Fault::SyncError, String::new);
                }
                for file in files {
                    // Where it fails, some of it may have become durable all the same.
                    if !fails || self.draw(2) == 0 {
                        self.disks[usize::from(drive)].sync(file).expect("syncs");
                    }
                }
                Event::Synced { group, drive, ok: !fails }
            }
            Command::WriteJournal { drive, page, bytes, zero } => {
                let (file, _) = self.disks[usize::from(drive)].open(JOURNAL).expect("there");
                let at = Place { drive, file, offset: page * PAGE_BYTES };
                self.put_down(at, &bytes, Content::Journal, fails);
                if !fails {
                    self.disks[usize::from(drive)].sync(file).expect("syncs");
                }
                Event::JournalWritten { drive, zero, ok: !fails }
            }
            other => unreachable!("{other:?} writes nothing"),
        }
    }

    fn put_down(&mut self, at: Place, bytes: &[u8], of: Content, fails: bool) {
        if fails { self.write_failing(at, bytes) } else { self.write_at(at, bytes, of) }
    }

    fn prepare(
        &mut self,
        drive: DriveId,
        segment: u32,
        file: Option<FileId>,
        image: &[u8],
        fails: bool,
    ) -> io::Result<FileId> {
        let Some(file) = file else {
            if fails {
                self.struck(Fault::NoSpace, || segment_name(segment));
                return Err(io::ErrorKind::StorageFull.into());
            }
            let disk = &self.disks[usize::from(drive)];
            let file = disk.create(&segment_name(segment), DRIVE.segment_bytes);
            let file = file.expect("there is room");
            self.prepared(Place { drive, file, offset: 0 }, image);
            return Ok(file);
        };
        let at = Place { drive, file, offset: 0 };
        if fails {
            self.write_failing(at, image);
            return Err(io::Error::other("the simulated disk cannot write it"));
        }
        self.prepared(at, image);
        Ok(file)
    }

    fn prepared(&mut self, at: Place, image: &[u8]) {
        self.write_at(at, image, Content::Image);
        self.disks[usize::from(at.drive)].sync(at.file).expect("syncs");
    }
}

/// The version that a block in memory is of.
fn version_in(resident: &Resident) -> u64 {
    let head = resident.slab(0).first_chunk().expect("no slab is as short");
    u64::from_le_bytes(*head)
}
