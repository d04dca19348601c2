//! The commands of the machine, performed on the simulated disks.

use super::memory::Buffer;
use super::world::{Call, DRIVE, World, payload};
use crate::io::{JOURNAL, segment_name, verify};
use crate::machine::{Command, Event, LoadFault};
use tiered_kv_io::Disk;

impl World {
    pub(super) fn execute(&mut self, command: Command, mut buffer: Buffer, fails: bool) -> Event {
        match command {
            Command::CopyIn { op, item, into } => {
                let Some(Call::Put { keys, versions, ns, .. }) = self.calls.get(&op) else {
                    panic!("a put is known until it completes")
                };
                let layout = &self.layouts[*ns as usize];
                let bytes = payload(layout, &keys[item], versions[item]);
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
            Command::Load { block, cancel, .. } if cancel.is_set() => {
                Event::LoadDone { block, result: Err(LoadFault::Cancelled) }
            }
            Command::Load { block, drive, reads, mut into, .. } => {
                let disk = &self.disks[usize::from(drive)];
                let mut slots = into.take_slots();
                for (slot, read) in slots.iter_mut().zip(&reads) {
                    let read = disk.read_at(read.file, read.offset, slot.as_mut_slice());
                    read.expect("the simulated disk reads");
                }
                let crcs: Vec<u32> = reads.iter().map(|r| r.crc).collect();
                let slots = slots.into_iter().map(Some).collect();
                let checked = verify(into, slots, &crcs).ok_or(LoadFault::Corrupt);
                let result = if fails { Err(LoadFault::Io) } else { checked };
                Event::LoadDone { block, result }
            }
            write => self.write(write, fails),
        }
    }

    /// Performs a command that writes to a disk.
    fn write(&mut self, command: Command, fails: bool) -> Event {
        match command {
            Command::PrepareSegment { drive, segment, file, image } => {
                let disk = &self.disks[usize::from(drive)];
                let result = if fails {
                    Err(std::io::ErrorKind::StorageFull.into())
                } else {
                    let file = file.unwrap_or_else(|| {
                        let name = segment_name(segment);
                        disk.create(&name, DRIVE.segment_bytes).expect("there is room")
                    });
                    disk.write_at(file, 0, &image).expect("writes");
                    disk.sync(file).expect("syncs");
                    Ok(file)
                };
                Event::SegmentReady { drive, segment, result }
            }
            Command::WriteSlabs { group, block, drive, from, to } => {
                for (index, (file, offset)) in to.into_iter().enumerate() {
                    let slot = crate::resident::SlabWrite { resident: from.clone(), index };
                    let bytes = tiered_kv_io::ReadBuf::as_slice(&slot);
                    self.disks[usize::from(drive)].write_at(file, offset, bytes).expect("writes");
                }
                Event::SlabsWritten { group, block, ok: !fails }
            }
            Command::WriteHeaders { group, drive, writes } => {
                for write in writes {
                    let disk = &self.disks[usize::from(drive)];
                    disk.write_at(write.file, write.offset, &write.bytes).expect("writes");
                }
                Event::HeadersWritten { group, drive, ok: !fails }
            }
            Command::Sync { group, drive, files } => {
                let disk = &self.disks[usize::from(drive)];
                if !fails {
                    files.iter().for_each(|file| disk.sync(*file).expect("syncs"));
                }
                Event::Synced { group, drive, ok: !fails }
            }
            Command::WriteJournal { drive, page, bytes, zero } => {
                let disk = &self.disks[usize::from(drive)];
                let (file, _) = disk.open(JOURNAL).expect("made at boot");
                disk.write_at(file, page * 4096, &bytes).expect("writes");
                if !fails {
                    disk.sync(file).expect("syncs");
                }
                Event::JournalWritten { drive, zero, ok: !fails }
            }
            other => unreachable!("{other:?} writes nothing"),
        }
    }
}
