//! The recorder: which blocks the requests of a store used, and when, as a trace that
//! `tiered-kv replay` reads. Ids only: no token, no key, no name is in it.

use crate::machine::{Access, Sizes};
use parking_lot::{Condvar, Mutex};
use std::fmt::Write as _;
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiered_kv_io::{Nanos, Threads, open_for_append};
use tiered_kv_policy::RequestKind;
use tiered_kv_types::{Error, ErrorKind, Result};

/// How each line begins.
const FIRST_FIELD: &str = "{\"timestamp\":";
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
    /// The thread has let the file go.
    gone: bool,
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
        self.wait_for(limit, |waiting| waiting.writing || !waiting.lines.is_empty());
    }

    fn wait_for(&self, limit: Duration, waits: impl Fn(&Waiting) -> bool) {
        let until = Instant::now().checked_add(limit);
        let mut waiting = self.waiting.lock();
        while waits(&waiting) {
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

    /// Ends it, and waits until the file is free for the next store; not longer than `limit`.
    pub(crate) fn close(&self, limit: Duration) {
        self.end();
        self.wait_for(limit, |waiting| !waiting.gone);
    }

    /// Body of the thread.
    fn run(&self, path: &Path, mut file: impl std::io::Write) {
        self.write_all(path, &mut file);
        drop(file);
        self.waiting.lock().gone = true;
        self.changed.notify_all();
    }

    /// A fault is logged once, and ends the recording; the store goes on.
    fn write_all(&self, path: &Path, file: &mut impl std::io::Write) {
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
    /// Makes numbers of sessions of which nobody can tell the session.
    key: [u8; 32],
    /// Of the file's first request: a trace has one.
    block_tokens: Option<u32>,
    lines: String,
    ended: bool,
}

impl Recorder {
    /// Opens or makes the file, which takes up to `most` bytes; what it holds is continued.
    pub(crate) fn open(
        path: &Path,
        most: u64,
        now: (Nanos, u64),
        key: [u8; 32],
        threads: &dyn Threads,
    ) -> Result<Self> {
        let file = open_for_append(path).map_err(|err| {
            let context = format!(
                "`record` {} cannot be written: name a file in a directory of yours",
                path.display()
            );
            Error::new(ErrorKind::Config, "open", context).with_source(err)
        })?;
        let last = continued(&file).map_err(|reason| {
            let context = format!("`record` {} {reason}", path.display());
            Error::new(ErrorKind::Config, "open", context)
        })?;
        let waiting = Arc::new(RecordFile::default());
        let (lines, to) = (waiting.clone(), path.to_owned());
        threads.spawn("tkv-record".into(), Box::new(move || lines.run(&to, file)))?;
        Ok(Self {
            path: path.to_owned(),
            file: waiting,
            left: most.saturating_sub(last.bytes),
            // A clock that was set back goes on where the file ends.
            origin_unix_ns: now.1.max(last.unix_ns).saturating_sub(now.0),
            last: last.unix_ns,
            key,
            block_tokens: last.block_tokens,
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
        let _ = write!(lines, "{FIRST_FIELD}{seconds}.{nanos:09},");
        if let Some(session) = told.session {
            let _ = write!(lines, "\"session_id\":\"{:016x}\",", number_of(&self.key, session));
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

/// A session's number, of which nobody who has not the key can tell the session.
fn number_of(key: &[u8; 32], session: u64) -> u64 {
    let hash = blake3::keyed_hash(key, &session.to_le_bytes());
    let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
    u64::from_le_bytes(*first)
}

/// Where a file ends that is continued.
#[derive(Default)]
struct Last {
    bytes: u64,
    unix_ns: u64,
    block_tokens: Option<u32>,
}

/// Locks the file, makes it private, and cuts off what a killed process left of a line. A pipe has
/// none of it. The error says what to do.
fn continued(file: &File) -> std::result::Result<Last, String> {
    let cannot = |err: std::io::Error| format!("cannot be continued ({err}): name another file");
    let meta = file.metadata().map_err(cannot)?;
    if !meta.is_file() {
        return Ok(Last::default());
    }
    if file.try_lock().is_err() {
        return Err("is another store's: name a file for each".to_owned());
    }
    let end = last_newline(file, meta.len()).map_err(cannot)?;
    let begin = last_newline(file, end.saturating_sub(1)).map_err(cannot)?;
    let mut line = [0; 512];
    let n = file.read_at(&mut line, if end == 0 { 0 } else { begin }).map_err(cannot)?;
    let line = String::from_utf8_lossy(&line[..n]);
    let after = |name: &str| line.split_once(name).map(|(_, after)| after);
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let whole = |text: &str| text[..digits(text)].parse::<u64>().ok();
    let is_ours = line.starts_with(FIRST_FIELD) || (n > 0 && FIRST_FIELD.starts_with(&*line));
    let foreign = || "holds something else than requests: name another file".to_owned();
    if n > 0 && !is_ours {
        return Err(foreign());
    }
    let mut last = Last { bytes: end, ..Last::default() };
    if end > 0 {
        let time = after(FIRST_FIELD).ok_or_else(foreign)?;
        let nanos = after(".").and_then(whole).ok_or_else(foreign)?;
        let seconds = whole(time).ok_or_else(foreign)?;
        last.unix_ns = seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
        let size = after("\"block_size\":").and_then(whole).and_then(|n| u32::try_from(n).ok());
        last.block_tokens = Some(size.ok_or_else(foreign)?);
    }
    file.set_permissions(Permissions::from_mode(0o600)).map_err(cannot)?;
    file.set_len(end).map_err(cannot)?;
    Ok(last)
}

/// The place behind the last newline before `end`, zero where there is none.
fn last_newline(file: &File, mut end: u64) -> std::io::Result<u64> {
    let mut chunk = vec![0; 64 << 10];
    while end > 0 {
        let from = end.saturating_sub(chunk.len() as u64);
        let some = &mut chunk[..(end - from) as usize];
        file.read_exact_at(some, from)?;
        if let Some(at) = some.iter().rposition(|byte| *byte == b'\n') {
            return Ok(from + at as u64 + 1);
        }
        end = from;
    }
    Ok(0)
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
