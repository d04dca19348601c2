//! Readers of trace files: one JSON object a line, gzip or plain.

use crate::trace::{Builder, Entry, Format, Trace};
use flate2::bufread::MultiGzDecoder;
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use tiered_kv_policy::RequestKind;

/// Longest line, in bytes: a prompt of millions of blocks, one id each.
const MAX_LINE: u64 = 64 << 20;
/// Most bytes read of one trace, unpacked.
const MAX_BYTES: u64 = 64 << 30;
/// Most blocks of one request: a few bytes of a file can ask for any number of them.
const MAX_REQUEST: u64 = 1 << 22;
/// Longest label or hash, in bytes.
const MAX_LABEL: usize = 512;
/// Most different blocks of one trace, some 16 bytes each.
const MAX_BLOCKS: usize = 1 << 27;
/// Most accesses of one trace.
const MAX_ACCESSES: u64 = 1 << 32;
/// Most requests of one trace.
const MAX_REQUESTS: usize = 1 << 26;
/// Tokens of a block where a format does not say.
const MOONCAKE_BLOCK: u32 = 512;
const BAILIAN_BLOCK: u32 = 16;
const LMCACHE_BLOCK: u32 = 256;
/// Kinds with a number of their own; labels come after them.
const NAMED_KINDS: u8 = 5;

/// Why a trace could not be read.
#[derive(Debug)]
pub struct ReadError {
    /// What the system said, where it refused.
    pub io: Option<std::io::ErrorKind>,
    /// Line of the file, from one; zero where it is not about a line.
    pub line: usize,
    /// What is wrong, and what to do.
    pub reason: String,
}

impl ReadError {
    fn at(line: usize, reason: String) -> Self {
        Self { io: None, line, reason }
    }

    fn of_system(line: usize, error: &std::io::Error) -> Self {
        Self { io: Some(error.kind()), line, reason: error.to_string() }
    }
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
    /// LMCache's lookups, in seconds: a hash a chunk, over all tokens up to its end.
    #[serde(borrow, default)]
    chunk_hashes: Option<Vec<Cow<'a, str>>>,
    #[serde(borrow, default, alias = "lookup_id")]
    request_id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    model_name: Option<Cow<'a, str>>,
    #[serde(default)]
    chunk_size: Option<u32>,
    #[serde(default)]
    seq_len: Option<u32>,
}

impl Line<'_> {
    /// Labels are kept, so they are bounded.
    fn check_labels(&self) -> Result<(), String> {
        let labels = [
            ("session_id", &self.session_id),
            ("type", &self.kind),
            ("request_id", &self.request_id),
            ("model_name", &self.model_name),
        ];
        let long = |text: &Cow<'_, str>| text.len() > MAX_LABEL;
        for (field, label) in labels {
            if label.as_ref().is_some_and(long) {
                return Err(format!("{field}: more than {MAX_LABEL} bytes"));
            }
        }
        if self.chunk_hashes.as_ref().is_some_and(|hashes| hashes.iter().any(long)) {
            return Err(format!("chunk_hashes: one has more than {MAX_LABEL} bytes"));
        }
        Ok(())
    }

    /// Which format it is of, and how many tokens its blocks have.
    fn format(&self) -> Result<(Format, u32), String> {
        let format = match (&self.hash_runs, &self.hash_ids, &self.chunk_hashes) {
            (Some(_), None, None) => Format::Runs,
            (None, Some(_), None) if self.chat_id.is_some() => Format::QwenBailian,
            (None, Some(_), None) => Format::Mooncake,
            (None, None, Some(_)) => Format::Lmcache,
            _ => return Err("one of hash_runs, hash_ids and chunk_hashes is wanted".to_owned()),
        };
        let (said, default) = match format {
            Format::QwenBailian => (self.block_size, BAILIAN_BLOCK),
            Format::Lmcache => (self.chunk_size, LMCACHE_BLOCK),
            Format::Runs | Format::Mooncake => (self.block_size, MOONCAKE_BLOCK),
        };
        match said.unwrap_or(default) {
            0 => Err("block_size: at least 1 is wanted".to_owned()),
            tokens => Ok((format, tokens)),
        }
    }
}

/// Reads a trace: runs of ids (`hash_runs`), Mooncake's or Qwen-Bailian's lines, or LMCache's log
/// of lookups, packed or not.
///
/// # Errors
/// The file cannot be read, or a line is no request of a known format, is out of order or too long.
pub fn read_path(path: &Path) -> Result<Trace, ReadError> {
    let file = File::open(path).map_err(|e| ReadError::of_system(0, &e))?;
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let name = name.split('.').next().unwrap_or_default().to_owned();
    read(BufReader::new(file), &name)
}

/// [`read_path`] of what is read from `source`.
///
/// # Errors
/// As [`read_path`].
pub fn read(mut source: impl BufRead, name: &str) -> Result<Trace, ReadError> {
    let start = source.fill_buf().map_err(|e| ReadError::of_system(0, &e))?;
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
        text.clear();
        let read = source.by_ref().take(MAX_LINE).read_until(b'\n', &mut text);
        let read = read.map_err(|e| ReadError::of_system(line, &e))? as u64;
        if read == 0 {
            break;
        }
        total += read;
        if read == MAX_LINE || total > MAX_BYTES {
            let reason = format!("more than {MAX_LINE} bytes a line, or {MAX_BYTES} in all");
            return Err(ReadError::at(line, reason));
        }
        if !text.trim_ascii().is_empty() {
            reader.line(&text).map_err(|reason| ReadError::at(line, reason))?;
        }
    }
    reader.finish(name)
}

#[derive(Default)]
struct Reader {
    builder: Option<(Builder, Format, u32)>,
    sessions: HashMap<String, u32>,
    /// Sessions of chats, where a chat names its predecessor.
    chats: HashMap<i64, u32>,
    next_session: u32,
    kinds: HashMap<String, u8>,
    /// Numbers of the hashes that are text, and lookups that were seen.
    hashes: HashMap<String, u64>,
    lookups: HashSet<String>,
}

impl Reader {
    fn line(&mut self, text: &[u8]) -> Result<(), String> {
        let line: Line<'_> = serde_json::from_slice(text)
            .map_err(|e| format!("not a request of a known format ({e})"))?;
        let (format, block_tokens) = line.format()?;
        line.check_labels()?;
        let scale = if format == Format::Mooncake { 1e6 } else { 1e9 };
        let now = line.timestamp * scale;
        if !(now >= 0.0 && now < u64::MAX as f64) {
            return Err("timestamp: a number of seconds from zero on is wanted".to_owned());
        }
        if self.is_repeated(&line) {
            return Ok(());
        }
        let session = match (line.session_id.as_deref(), line.chat_id) {
            (Some(""), _) | (None, None) => None,
            (Some(label), _) => Some(self.session(label)),
            (None, Some(chat)) => Some(self.chat(chat, line.parent_chat_id)),
        };
        let kind = self.kind(line.kind.as_deref());
        let tokens = (line.seq_len.unwrap_or(line.input_length), line.output_length);
        let entry = Entry::new(now.round() as u64, session, kind, tokens);
        let prompt = match (line.hash_runs, line.hash_ids, line.chunk_hashes) {
            (Some(runs), ..) => runs,
            (_, Some(ids), _) => ids.into_iter().map(|id| (id, 1)).collect(),
            (.., hashes) => self.numbers(hashes.unwrap_or_default(), line.model_name.as_deref()),
        };
        let first = || (Builder::new(block_tokens), format, block_tokens);
        let (builder, _, size) = self.builder.get_or_insert_with(first);
        if *size != block_tokens {
            return Err(format!("block_size: {block_tokens} after {size}: one trace has one"));
        }
        check_size(builder, &prompt, &line.out_hash_runs)?;
        builder.add(entry, &prompt, &line.out_hash_runs)
    }

    /// Whether it is a lookup of a request that was looked up before: it counts once.
    fn is_repeated(&mut self, line: &Line<'_>) -> bool {
        match line.request_id.as_deref() {
            Some(id) if line.chunk_hashes.is_some() && !id.is_empty() => {
                !self.lookups.insert(id.to_owned())
            }
            _ => false,
        }
    }

    /// Numbers for hashes; those of different models are different.
    fn numbers(&mut self, hashes: Vec<Cow<'_, str>>, model: Option<&str>) -> Vec<(u64, u32)> {
        let model = model.unwrap_or_default();
        let number = |hash: Cow<'_, str>| {
            let next = self.hashes.len() as u64;
            (*self.hashes.entry(format!("{hash} {model}")).or_insert(next), 1)
        };
        hashes.into_iter().map(number).collect()
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
            Some((builder, format, _)) => Ok(builder.finish(name).with_format(format)),
            None => Err(ReadError::at(0, "no request in it".to_owned())),
        }
    }
}

/// Refuses what would take more memory than a trace may.
fn check_size(
    builder: &Builder,
    prompt: &[(u64, u32)],
    output: &[(u64, u32)],
) -> Result<(), String> {
    let mut blocks = 0u64;
    for (start, len) in prompt.iter().chain(output) {
        if start.checked_add(u64::from(*len)).is_none() {
            return Err("hash_runs: a run goes beyond the largest id".to_owned());
        }
        blocks += u64::from(*len);
        if blocks > MAX_REQUEST {
            return Err(format!("more than {MAX_REQUEST} blocks in a request"));
        }
    }
    if builder.size() + blocks > MAX_ACCESSES || builder.len() >= MAX_REQUESTS {
        return Err(format!("more than {MAX_ACCESSES} accesses or {MAX_REQUESTS} requests"));
    }
    if builder.blocks() > MAX_BLOCKS {
        return Err(format!("more than {MAX_BLOCKS} different blocks"));
    }
    Ok(())
}
