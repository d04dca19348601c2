//! The recorder: which blocks the requests of a store used, and when, as a trace that
//! `tiered-kv replay` reads. Ids only: no token, no key, no name is in it.

use crate::machine::{Access, Sizes};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use tiered_kv_io::{Nanos, open_for_append};
use tiered_kv_policy::RequestKind;
use tiered_kv_types::{Error, ErrorKind, Result};

/// A bounded file of requests; what is over is not recorded.
#[derive(Debug)]
pub(crate) struct Recorder {
    path: PathBuf,
    file: File,
    /// Bytes that it may still take.
    left: u64,
    /// What the wall clock shows when the monotonic one is at zero.
    origin_unix_ns: u64,
    last: u64,
    /// Makes the names of sessions unguessable.
    salt: u64,
    /// Of the first request: a trace has one.
    block_tokens: Option<u32>,
    lines: String,
    ended: bool,
}

impl Recorder {
    /// Opens or makes the file, which takes up to `most` bytes; what it holds is kept.
    pub(crate) fn open(path: &Path, most: u64, now: (Nanos, u64), salt: u64) -> Result<Self> {
        let file = open_for_append(path).map_err(|err| {
            let context = format!(
                "`record` {} cannot be written: name a file in a directory of yours",
                path.display()
            );
            Error::new(ErrorKind::Config, "open", context).with_source(err)
        })?;
        let there = file.metadata().map_or(0, |meta| meta.len());
        Ok(Self {
            path: path.to_owned(),
            file,
            left: most.saturating_sub(there),
            origin_unix_ns: now.1.saturating_sub(now.0),
            last: 0,
            salt,
            block_tokens: None,
            lines: String::new(),
            ended: false,
        })
    }

    /// Notes a request; it is in the file after [`Recorder::write`].
    pub(crate) fn note(&mut self, access: &Access, sizes: Sizes) {
        if self.ended || access.keys.is_empty() {
            return;
        }
        // A trace is in order, and names a block once a request.
        self.last = self.last.max(self.origin_unix_ns.saturating_add(access.now));
        let mut seen = std::collections::HashSet::with_capacity(access.keys.len());
        let numbers = access.keys.iter().map(|key| key.number() >> 1);
        let ids: Vec<(usize, u64)> =
            numbers.enumerate().filter(|(_, id)| seen.insert(*id)).collect();
        let full = *self.block_tokens.get_or_insert(sizes.block_tokens);
        let tokens = if full == sizes.block_tokens {
            sizes.tokens
        } else {
            // Blocks of another size count as if they were of this one.
            u32::try_from(sizes.prompt as u64 * u64::from(full)).unwrap_or(u32::MAX)
        };
        let before = self.lines.len();
        let (seconds, nanos) = (self.last / 1_000_000_000, self.last % 1_000_000_000);
        let told = &access.told;
        let lines = &mut self.lines;
        let _ = write!(lines, "{{\"timestamp\":{seconds}.{nanos:09},");
        if let Some(session) = told.session {
            let _ = write!(lines, "\"session_id\":\"{:016x}\",", mixed(session ^ self.salt));
        }
        let _ = write!(
            lines,
            "\"turn\":{},\"type\":\"{}\",\"input_length\":{tokens},\"output_length\":{},\
             \"block_size\":{full},\"hash_runs\":[",
            told.turn,
            kind(told.kind),
            told.output_tokens,
        );
        let (prompt, output): (Vec<_>, Vec<_>) = ids.iter().partition(|(at, _)| *at < sizes.prompt);
        runs(lines, &prompt);
        lines.push_str("],\"out_hash_runs\":[");
        runs(lines, &output);
        lines.push_str("]}\n");
        if self.lines.len() as u64 > self.left {
            self.lines.truncate(before);
            tracing::warn!(path = %self.path.display(), "`record` has its bytes: no more follow");
            self.ended = true;
        }
    }

    /// Writes what was noted. A fault is logged once, and ends the recording; the store goes on.
    pub(crate) fn write(&mut self) {
        if let Err(err) = self.file.write_all(self.lines.as_bytes()) {
            tracing::warn!(path = %self.path.display(), %err, "requests are recorded no more");
            self.ended = true;
        }
        self.left -= self.lines.len() as u64;
        self.lines.clear();
    }
}

/// Each id as a run of its own: ids stand for prefixes and are in no order.
fn runs(lines: &mut String, ids: &[(usize, u64)]) {
    for (number, (_, id)) in ids.iter().enumerate() {
        let _ = write!(lines, "{}[{id},1]", if number == 0 { "" } else { "," });
    }
}

fn mixed(label: u64) -> u64 {
    let mixed = label.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn kind(kind: RequestKind) -> String {
    match kind {
        RequestKind::Chat => "chat".to_owned(),
        RequestKind::Agent => "agent".to_owned(),
        RequestKind::AgentN => "agent-n".to_owned(),
        RequestKind::AgentS => "agent-s".to_owned(),
        RequestKind::Synthetic => "synthetic".to_owned(),
        RequestKind::Label(label) => format!("label-{label}"),
    }
}
