//! What a run does, in words.

use crate::machine::{Command, Event, HeaderWrite};
use tiered_kv_types::{PAGE_BYTES, RecordHeader};

/// One line for a command.
pub(super) fn command(command: &Command) -> String {
    match command {
        Command::CopyIn { op, item, .. } => format!("copy in, item {item} of {op:?}"),
        Command::CopyOut { op, item, .. } => format!("copy out, item {item} of {op:?}"),
        Command::Load { block, drive, reads, cancel, .. } => {
            let places: Vec<_> = reads.iter().map(|read| (read.file, read.offset)).collect();
            format!("load block {block}, drive {drive}, {places:?}, cancelled {}", cancel.is_set())
        }
        Command::LoadInto { op, item, block, drive, reads, .. } => {
            let places: Vec<_> = reads.iter().map(|read| (read.file, read.offset)).collect();
            format!("read block {block} into item {item} of {op:?}, drive {drive}, {places:?}")
        }
        Command::PrepareSegment { drive, segment, file, .. } => {
            format!("prepare segment {segment}, drive {drive}, {file:?}")
        }
        Command::WriteSlabs { group, block, drive, from, to } => {
            let generation = from.generation();
            format!("write block {block} of {generation}, group {group}, drive {drive}, {to:?}")
        }
        Command::WriteHeaders { group, drive, writes } => {
            let headers: Vec<String> = writes.iter().map(headers).collect();
            format!("write headers, group {group}, drive {drive}: {}", headers.join(", "))
        }
        Command::Sync { group, drive, files } => {
            format!("sync, group {group}, drive {drive}, {files:?}")
        }
        Command::WriteJournal { drive, page, bytes, zero } => {
            let pages = bytes.len() as u64 / PAGE_BYTES;
            format!("journal, drive {drive}, page {page} and {pages} in all, zero {zero}")
        }
        other => brief(other),
    }
}

fn headers(write: &HeaderWrite) -> String {
    let entry = |bytes: &[u8]| match RecordHeader::decode(bytes).valid() {
        Some(record) => format!("{:?} of {}", record.key, record.generation),
        None => "none".to_owned(),
    };
    let stride = usize::try_from(PAGE_BYTES).expect("small");
    let entries: Vec<String> = write.bytes.chunks(stride).map(entry).collect();
    format!("{:?} at {}: {}", write.file, write.offset, entries.join("; "))
}

/// One line for an event.
pub(super) fn event(event: &Event) -> String {
    match event {
        Event::Put { op, ns, items, .. } => {
            let keys: Vec<_> = items.iter().map(|item| item.key).collect();
            format!("put {op:?}, namespace {ns}: {keys:?}")
        }
        Event::CopiedIn { op, item, .. } => format!("copied in, item {item} of {op:?}"),
        Event::LoadDone { block, result } => {
            format!("loaded block {block}: {:?}", result.as_ref().map(drop))
        }
        other => brief(other),
    }
}

/// The beginning of what something says of itself.
fn brief(thing: &impl std::fmt::Debug) -> String {
    let all = format!("{thing:?}");
    let end = all.char_indices().nth(200).map_or(all.len(), |(at, _)| at);
    all[..end].to_owned()
}
