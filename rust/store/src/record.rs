//! The recorder: which blocks the requests of a store used, and when, as a trace that
//! `tiered-kv replay` reads. Ids only: no token, no key, no name is in it.

use crate::machine::{Access, Sizes};
use parking_lot::{Condvar, Mutex};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiered_kv_io::{Nanos, Threads, open_for_append};
use tiered_kv_policy::RequestKind;
use tiered_kv_types::{Error, ErrorKind, Result};

/// Most bytes of lines that wait for the file: what is over is not recorded.
const MOST_WAITING: usize = 8 << 20;

/// The lines on their way to the file, which a thread of its own writes: the file's disk may not
/// answer, and nobody else waits for it.
#[derive(Debug, Default)]
pub(crate) struct RecordFile {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: String,
    /// The thread is writing some.
    writing: bool,
    /// Nothing is taken any more.
    ended: bool,
    /// Some found no room.
    full: bool,
}

impl RecordFile {
    fn push(&self, path: &Path, lines: &str) {
        let mut waiting = self.waiting.lock();
        if waiting.ended || lines.is_empty() {
            return;
        }
        if waiting.lines.len() + lines.len() > MOST_WAITING {
            if !std::mem::replace(&mut waiting.full, true) {
                tracing::warn!(path = %path.display(), "`record` is slow: requests are left out");
            }
            return;
        }
        waiting.lines.push_str(lines);
        self.changed.notify_all();
    }

    /// Waits until what was handed over is written, for as long as `limit`.
    pub(crate) fn wait_written(&self, limit: Duration) {
        let until = Instant::now().checked_add(limit);
        let mut waiting = self.waiting.lock();
        while waiting.writing || !waiting.lines.is_empty() {
            match until {
                Some(until) if self.changed.wait_until(&mut waiting, until).timed_out() => return,
                Some(_) => {}
                None => self.changed.wait(&mut waiting),
            }
        }
    }

    /// Takes no more lines; the thread ends once it has written what waits.
    fn end(&self) {
        self.waiting.lock().ended = true;
        self.changed.notify_all();
    }

    /// Body of the thread. A fault is logged once, and ends the recording; the store goes on.
    fn write_all(&self, path: &Path, mut file: impl std::io::Write) {
        let mut waiting = self.waiting.lock();
        loop {
            let lines = std::mem::take(&mut waiting.lines);
            if lines.is_empty() {
                if waiting.ended {
                    return;
                }
                self.changed.wait(&mut waiting);
                continue;
            }
            waiting.writing = true;
            drop(waiting);
            let written = file.write_all(lines.as_bytes());
            waiting = self.waiting.lock();
            waiting.writing = false;
            if let Err(err) = written {
                tracing::warn!(path = %path.display(), %err, "requests are recorded no more");
                waiting.ended = true;
                waiting.lines.clear();
            }
            self.changed.notify_all();
        }
    }
}

/// A bounded file of requests; what is over is not recorded.
#[derive(Debug)]
pub(crate) struct Recorder {
    path: PathBuf,
    file: Arc<RecordFile>,
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
    pub(crate) fn open(
        path: &Path,
        most: u64,
        now: (Nanos, u64),
        salt: u64,
        threads: &dyn Threads,
    ) -> Result<Self> {
        let file = open_for_append(path).map_err(|err| {
            let context = format!(
                "`record` {} cannot be written: name a file in a directory of yours",
                path.display()
            );
            Error::new(ErrorKind::Config, "open", context).with_source(err)
        })?;
        let there = file.metadata().map_or(0, |meta| meta.len());
        let waiting = Arc::new(RecordFile::default());
        let (lines, to) = (waiting.clone(), path.to_owned());
        threads.spawn("tkv-record".into(), Box::new(move || lines.write_all(&to, file)))?;
        Ok(Self {
            path: path.to_owned(),
            file: waiting,
            left: most.saturating_sub(there),
            origin_unix_ns: now.1.saturating_sub(now.0),
            last: 0,
            salt,
            block_tokens: None,
            lines: String::new(),
            ended: false,
        })
    }

    /// Notes a request; it is on its way after [`Recorder::hand_over`].
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

    /// Hands what was noted to the thread that writes it.
    pub(crate) fn hand_over(&mut self) {
        self.file.push(&self.path, &self.lines);
        self.left -= self.lines.len() as u64;
        self.lines.clear();
    }

    pub(crate) fn file(&self) -> Arc<RecordFile> {
        self.file.clone()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.file.end();
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
