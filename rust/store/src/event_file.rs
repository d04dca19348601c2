//! The event log on disk: a line of JSON for each event, for operators and for tests.
//!
//! A line is with the operating system before anything that follows from its event is carried out,
//! so that whoever reads the file after the process was killed knows of every eviction and delete.

use crate::machine::Machine;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use tiered_kv_io::open_for_append;
use tiered_kv_types::{Error, ErrorKind, Result, hex};

/// Beyond so many bytes the file becomes the one before, `NAME.1`, and a new one is begun.
const FILE_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub(crate) struct EventFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Number of the next event.
    next: u64,
    failed: bool,
}

impl EventFile {
    /// Opens or makes the file; what it holds is kept.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = open_for_append(path).map_err(|err| {
            let context = format!(
                "`event_file` {} cannot be written: name a file in a directory of yours",
                path.display()
            );
            Error::new(ErrorKind::Config, "open", context).with_source(err)
        })?;
        let bytes = file.metadata().map_or(0, |meta| meta.len());
        Ok(Self { path: path.to_owned(), file, bytes, next: 0, failed: false })
    }

    /// Writes what the log has got since the last call. A fault is logged once; the store goes on.
    pub(crate) fn catch_up(&mut self, machine: &Machine) {
        let entries = machine.log.since(self.next);
        let Some(last) = entries.last() else { return };
        self.next = last.seq + 1;
        let mut lines = String::new();
        for entry in &entries {
            let tier = entry.tier.map_or("null".to_owned(), |tier| format!("\"{}\"", tier.name()));
            let _ = writeln!(
                lines,
                "{{\"seq\":{},\"unix_ns\":{},\"kind\":\"{}\",\"tier\":{tier},\"namespace\":\"{}\",\
                 \"key\":\"{}\"}}",
                entry.seq,
                entry.unix_ns,
                entry.kind.name(),
                hex(&machine.namespace_id(entry.ns).0),
                hex(&entry.key.0),
            );
        }
        if let Err(err) = self.append(lines.as_bytes())
            && !std::mem::replace(&mut self.failed, true)
        {
            tracing::error!(path = %self.path.display(), %err, "the event file misses events");
        }
    }

    fn append(&mut self, lines: &[u8]) -> std::io::Result<()> {
        if self.bytes >= FILE_BYTES {
            let mut before = self.path.clone().into_os_string();
            before.push(".1");
            std::fs::rename(&self.path, before)?;
            self.file = open_for_append(&self.path)?;
            self.bytes = 0;
        }
        self.bytes += lines.len() as u64;
        self.file.write_all(lines)
    }
}
