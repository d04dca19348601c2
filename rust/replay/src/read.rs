//! Readers of trace files: one JSON object a line, gzip or plain.

use crate::trace::{Builder, Entry, Trace};
use flate2::bufread::MultiGzDecoder;
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use tiered_kv_policy::RequestKind;

/// Longest line, in bytes: a prompt of ten million blocks, one id each.
const MAX_LINE: u64 = 128 << 20;
/// Most bytes read of one trace, unpacked.
const MAX_BYTES: u64 = 64 << 30;
/// Most accesses of one trace.
const MAX_ACCESSES: u64 = 1 << 33;
/// Most requests of one trace.
const MAX_REQUESTS: usize = 1 << 26;
/// Tokens of a block where a format does not say.
const MOONCAKE_BLOCK: u32 = 512;
const BAILIAN_BLOCK: u32 = 16;
/// Kinds with a number of their own; labels come after them.
const NAMED_KINDS: u8 = 5;

/// Why a trace could not be read.
#[derive(Debug)]
pub struct ReadError {
    /// Line of the file, from one; zero where it is not about a line.
    pub line: usize,
    /// What is wrong, and what to do.
    pub reason: String,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}", self.reason),
            line => write!(f, "line {line}: {}", self.reason),
        }
    }
}

impl std::error::Error for ReadError {}

/// A line of any of the formats; which one it is of shows in the fields that it has.
#[derive(Deserialize)]
struct Line<'a> {
    timestamp: f64,
    #[serde(default)]
    input_length: u32,
    #[serde(default)]
    output_length: u32,
    #[serde(borrow, default, rename = "type")]
    kind: Option<Cow<'a, str>>,
    /// The project's own runs of ids.
    #[serde(default)]
    block_size: Option<u32>,
    #[serde(borrow, default)]
    session_id: Option<Cow<'a, str>>,
    #[serde(default)]
    hash_runs: Option<Vec<(u64, u32)>>,
    #[serde(default)]
    out_hash_runs: Vec<(u64, u32)>,
    /// One id a block: Mooncake, in milliseconds; with a chat id Qwen-Bailian, in seconds.
    #[serde(default)]
    hash_ids: Option<Vec<u64>>,
    #[serde(default)]
    chat_id: Option<i64>,
    #[serde(default)]
    parent_chat_id: Option<i64>,
}

/// Reads a trace: runs of ids (`hash_runs`), Mooncake's or Qwen-Bailian's lines, packed or not.
///
/// # Errors
/// The file cannot be read, or a line is no request of a known format, is out of order or too long.
pub fn read_path(path: &Path) -> Result<Trace, ReadError> {
    let whole = |reason: String| ReadError { line: 0, reason };
    let file = File::open(path).map_err(|e| whole(format!("{}: {e}", path.display())))?;
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let name = name.split('.').next().unwrap_or_default().to_owned();
    read(BufReader::new(file), &name)
}

/// [`read_path`] of what is read from `source`.
///
/// # Errors
/// As [`read_path`].
pub fn read(mut source: impl BufRead, name: &str) -> Result<Trace, ReadError> {
    let start = source.fill_buf().map_err(|e| ReadError { line: 0, reason: e.to_string() })?;
    if start.starts_with(&[0x1f, 0x8b]) {
        read_lines(BufReader::new(MultiGzDecoder::new(source)), name)
    } else {
        read_lines(source, name)
    }
}

fn read_lines(mut source: impl BufRead, name: &str) -> Result<Trace, ReadError> {
    let mut reader = Reader::default();
    let (mut text, mut total) = (Vec::new(), 0u64);
    for line in 1.. {
        let fail = |reason: String| ReadError { line, reason };
        text.clear();
        let read = source.by_ref().take(MAX_LINE).read_until(b'\n', &mut text);
        let read = read.map_err(|e| fail(e.to_string()))? as u64;
        if read == 0 {
            break;
        }
        total += read;
        if read == MAX_LINE || total > MAX_BYTES {
            return Err(fail(format!("more than {MAX_LINE} bytes a line, or {MAX_BYTES} in all")));
        }
        if !text.trim_ascii().is_empty() {
            reader.line(&text).map_err(fail)?;
        }
    }
    reader.finish(name)
}

#[derive(Default)]
struct Reader {
    builder: Option<(Builder, u32)>,
    sessions: HashMap<String, u32>,
    /// Sessions of chats, where a chat names its predecessor.
    chats: HashMap<i64, u32>,
    next_session: u32,
    kinds: HashMap<String, u8>,
}

impl Reader {
    fn line(&mut self, text: &[u8]) -> Result<(), String> {
        let line: Line<'_> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        let chat = line.chat_id.is_some();
        let own = line.hash_runs.is_some();
        let default = if chat { BAILIAN_BLOCK } else { MOONCAKE_BLOCK };
        let block_tokens = line.block_size.unwrap_or(default);
        let scale = if own || chat { 1e9 } else { 1e6 };
        let now = line.timestamp * scale;
        if !(now >= 0.0 && now < u64::MAX as f64) {
            return Err("timestamp: a number of seconds from zero on is wanted".to_owned());
        }
        if block_tokens == 0 {
            return Err("block_size: at least 1 is wanted".to_owned());
        }
        if line.out_hash_runs.len() + line.hash_runs.as_ref().map_or(0, Vec::len) > 1 << 24 {
            return Err("hash_runs: too many".to_owned());
        }
        let prompt = match (line.hash_runs, line.hash_ids) {
            (Some(runs), None) => runs,
            (None, Some(ids)) => ids.into_iter().map(|id| (id, 1)).collect(),
            _ => return Err("either hash_runs or hash_ids is wanted".to_owned()),
        };
        let session = match (line.session_id.as_deref(), line.chat_id) {
            (Some(""), _) | (None, None) => None,
            (Some(label), _) => Some(self.session(label)),
            (None, Some(chat)) => Some(self.chat(chat, line.parent_chat_id)),
        };
        let kind = self.kind(line.kind.as_deref());
        let (builder, size) =
            self.builder.get_or_insert_with(|| (Builder::new(block_tokens), block_tokens));
        if *size != block_tokens {
            return Err(format!("block_size: {block_tokens} after {size}"));
        }
        let mut runs = prompt.iter().chain(&line.out_hash_runs);
        if runs.any(|(start, len)| start.checked_add(u64::from(*len)).is_none()) {
            return Err("hash_runs: a run goes beyond the largest id".to_owned());
        }
        let blocks: u64 =
            prompt.iter().chain(&line.out_hash_runs).map(|run| u64::from(run.1)).sum();
        if builder.size() + blocks > MAX_ACCESSES || builder.len() >= MAX_REQUESTS {
            return Err(format!("more than {MAX_ACCESSES} accesses or {MAX_REQUESTS} requests"));
        }
        let tokens = (line.input_length, line.output_length);
        let entry = Entry::new(now.round() as u64, session, kind, tokens);
        builder.add(entry, &prompt, &line.out_hash_runs)
    }

    fn session(&mut self, label: &str) -> u32 {
        if let Some(session) = self.sessions.get(label) {
            return *session;
        }
        let session = self.start();
        self.sessions.insert(label.to_owned(), session);
        session
    }

    fn chat(&mut self, chat: i64, parent: Option<i64>) -> u32 {
        let known = parent.and_then(|parent| self.chats.get(&parent).copied());
        let session = known.unwrap_or_else(|| self.start());
        self.chats.insert(chat, session);
        session
    }

    fn start(&mut self) -> u32 {
        self.next_session += 1;
        self.next_session - 1
    }

    fn kind(&mut self, name: Option<&str>) -> RequestKind {
        match name {
            None | Some("" | "chat" | "conversation") => RequestKind::Chat,
            Some("agent") => RequestKind::Agent,
            Some("agent-n") => RequestKind::AgentN,
            Some("agent-s") => RequestKind::AgentS,
            Some("synthetic") => RequestKind::Synthetic,
            Some(other) => {
                let next = NAMED_KINDS.saturating_add(self.kinds.len().min(10) as u8);
                if let Some(label) = self.kinds.get(other) {
                    return RequestKind::Label(*label);
                }
                if self.kinds.len() < 10 {
                    self.kinds.insert(other.to_owned(), next);
                }
                RequestKind::Label(next)
            }
        }
    }

    fn finish(self, name: &str) -> Result<Trace, ReadError> {
        match self.builder {
            Some((builder, _)) => Ok(builder.finish(name)),
            None => Err(ReadError { line: 0, reason: "no request in it".to_owned() }),
        }
    }
}
