//! A trace in memory: requests as runs of dense block numbers.

use foldhash::fast::FixedState;
use std::collections::HashMap;
use tiered_kv_policy::{Nanos, RequestKind};

/// Block numbers below this are looked up in a table, others in a map.
const SMALL: u64 = 1 << 26;
const NONE: u32 = u32::MAX;

/// One request of a trace.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// When it came.
    pub now: Nanos,
    /// Its session, numbered in the order of the first requests; `None` where it is not told.
    pub session: Option<u32>,
    /// What kind of traffic it is.
    pub kind: RequestKind,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the output.
    pub output_tokens: u32,
    /// Blocks of the prompt.
    pub prompt: u32,
    /// Where its runs begin, where those of the output do, and where they end.
    runs: [usize; 3],
}

/// In which format a trace was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The project's own: runs of ids; also what was made up.
    #[default]
    Runs,
    /// Mooncake's release.
    Mooncake,
    /// Qwen-Bailian's anonymous usage traces.
    QwenBailian,
    /// LMCache's log of lookups.
    Lmcache,
}

impl Format {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Mooncake => "mooncake",
            Self::QwenBailian => "qwen-bailian",
            Self::Lmcache => "lmcache",
        }
    }
}

/// Requests in ascending order of time, their blocks numbered densely from zero.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Under which name it is reported.
    pub name: String,
    /// In which format it was read.
    pub format: Format,
    /// Tokens of a block.
    pub block_tokens: u32,
    entries: Vec<Entry>,
    runs: Vec<(u32, u32)>,
    /// How many different blocks prompts have.
    pub unique_blocks: usize,
    /// How often a prompt's block is accessed.
    pub block_accesses: u64,
    /// How many blocks came behind another block than before: zero where ids stand for prefixes.
    pub unchained: u64,
    /// Hits of a cache without bounds: with only prompts inserted, and with outputs too.
    ceilings: [u64; 2],
}

impl Trace {
    /// All requests.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Puts the numbers of an entry's blocks into `blocks`, with the output's behind them if
    /// `outputs`.
    pub fn blocks(&self, entry: &Entry, outputs: bool, blocks: &mut Vec<u64>) {
        blocks.clear();
        let [from, middle, to] = entry.runs;
        for (start, len) in &self.runs[from..if outputs { to } else { middle }] {
            blocks.extend(u64::from(*start)..u64::from(*start) + u64::from(*len));
        }
    }

    pub(crate) fn with_format(self, format: Format) -> Self {
        Self { format, ..self }
    }

    /// The runs of an entry's prompt, and those of its output.
    pub(crate) fn parts(&self, entry: &Entry) -> [&[(u32, u32)]; 2] {
        let [from, middle, to] = entry.runs;
        [&self.runs[from..middle], &self.runs[middle..to]]
    }

    /// Whether any entry has blocks of an output.
    pub fn has_outputs(&self) -> bool {
        self.entries.iter().any(|entry| entry.runs[1] < entry.runs[2])
    }

    /// How many sessions are told; zero where none is.
    pub fn sessions(&self) -> usize {
        self.entries
            .iter()
            .filter_map(|entry| entry.session)
            .max()
            .map_or(0, |last| last as usize + 1)
    }

    /// Percent of the accesses that are hits if nothing ever leaves.
    pub fn ceiling_pct(&self, outputs: bool) -> f64 {
        percent(self.ceilings[usize::from(outputs)] as f64, self.block_accesses as f64)
    }
}

/// `part` of `whole` in percent; zero of nothing.
pub(crate) fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}

/// What is known of a block while a trace is built.
#[derive(Clone, Copy)]
struct Seen {
    parent: u32,
    /// The last request that named it.
    request: u32,
    /// Whether a prompt had it.
    prompt: bool,
}

/// Builds a trace, request by request.
#[derive(Default)]
pub struct Builder {
    entries: Vec<Entry>,
    runs: Vec<(u32, u32)>,
    small: Vec<u32>,
    large: HashMap<u64, u32, FixedState>,
    seen: Vec<Seen>,
    block_tokens: u32,
    unique: usize,
    accesses: u64,
    unchained: u64,
    ceilings: [u64; 2],
}

impl Entry {
    /// A request whose blocks are not told yet.
    pub fn new(now: Nanos, session: Option<u32>, kind: RequestKind, tokens: (u32, u32)) -> Self {
        let (input_tokens, output_tokens) = tokens;
        Self { now, session, kind, input_tokens, output_tokens, prompt: 0, runs: [0; 3] }
    }
}

impl Builder {
    /// An empty trace of blocks of so many tokens.
    pub fn new(block_tokens: u32) -> Self {
        Self { block_tokens, ..Self::default() }
    }

    /// Requests so far.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no request yet.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Accesses to blocks of prompts and outputs, at most.
    pub(crate) fn size(&self) -> u64 {
        self.accesses
    }

    /// Different blocks of prompts and outputs.
    pub(crate) fn blocks(&self) -> usize {
        self.seen.len()
    }

    /// Adds a request: ranges of the prompt's block ids, and of the output's.
    ///
    /// # Errors
    /// What is wrong with it: a time before the last request's, or a block that it has twice.
    pub fn add(
        &mut self,
        entry: Entry,
        prompt: &[(u64, u32)],
        output: &[(u64, u32)],
    ) -> Result<(), String> {
        if self.entries.last().is_some_and(|last| last.now > entry.now) {
            return Err("timestamp before the last one: sort the requests by it".to_owned());
        }
        let request = self.entries.len() as u32;
        let mut entry = Entry { runs: [self.runs.len(); 3], prompt: 0, ..entry };
        let (mut parent, mut leading) = (NONE, [true; 2]);
        for (part, ranges) in [prompt, output].into_iter().enumerate() {
            for id in ranges.iter().flat_map(|(start, len)| *start..*start + u64::from(*len)) {
                let block = self.number(id);
                let seen = &mut self.seen[block as usize];
                if seen.request == request {
                    return Err(format!("block {id} twice: ids must stand for prefixes"));
                }
                if seen.request == NONE {
                    seen.parent = parent;
                    leading[1] = false;
                } else if seen.parent != parent {
                    self.unchained += 1;
                    seen.parent = parent;
                }
                leading[0] &= seen.prompt;
                seen.request = request;
                if part == 0 {
                    self.unique += usize::from(!seen.prompt);
                    seen.prompt = true;
                    entry.prompt += 1;
                    self.accesses += 1;
                    self.ceilings[0] += u64::from(leading[0]);
                    self.ceilings[1] += u64::from(leading[1]);
                }
                parent = block;
                self.extend(entry.runs[part], block);
            }
            entry.runs[part + 1] = self.runs.len();
        }
        entry.runs[2] = self.runs.len();
        self.entries.push(entry);
        Ok(())
    }

    /// Appends a block to the runs from `first` on.
    fn extend(&mut self, first: usize, block: u32) {
        match self.runs[first..].last_mut() {
            Some((start, len)) if *start + *len == block => *len += 1,
            _ => self.runs.push((block, 1)),
        }
    }

    fn number(&mut self, id: u64) -> u32 {
        let next = self.seen.len() as u32;
        let number = if id < SMALL {
            let at = id as usize;
            if self.small.len() <= at {
                self.small.resize((at + 1).next_power_of_two(), NONE);
            }
            let number = &mut self.small[at];
            if *number == NONE {
                *number = next;
            }
            *number
        } else {
            *self.large.entry(id).or_insert(next)
        };
        if number == next {
            self.seen.push(Seen { parent: NONE, request: NONE, prompt: false });
        }
        number
    }

    /// The trace, under a name.
    pub fn finish(self, name: impl Into<String>) -> Trace {
        Trace {
            name: name.into(),
            format: Format::default(),
            block_tokens: self.block_tokens,
            entries: self.entries,
            runs: self.runs,
            unique_blocks: self.unique,
            block_accesses: self.accesses,
            unchained: self.unchained,
            ceilings: self.ceilings,
        }
    }
}
