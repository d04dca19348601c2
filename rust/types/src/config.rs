//! The one configuration schema, for Rust, Python, TOML and the environment.
//!
//! Python passes its fields as TOML text, so that a field, its default and its check exist once.
//! Sizes are integers of bytes or text such as `"512MiB"`; an environment variable is `TIERED_KV_`
//! and the field's name in capitals, and wins over the file.

use crate::PAGE_BYTES;
use crate::cpus::CpuList;
use crate::error::{Error, ErrorKind, Result};
pub use crate::size::parse_size;
use crate::size::{de_size, de_size_opt};
use serde::{Deserialize, Deserializer, Serialize};
use std::path::PathBuf;

/// Prefix of the environment variables.
pub const ENV_PREFIX: &str = "TIERED_KV_";
/// Smallest segment, in bytes.
pub const MIN_SEGMENT_BYTES: u64 = 64 << 10;
/// Least memory of the predictor, in bytes.
pub const MIN_METADATA_BYTES: u64 = 4 << 20;
/// Largest default segment, in bytes.
pub const MAX_DEFAULT_SEGMENT_BYTES: u64 = 256 << 20;

/// What to do with a directory that another format version wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFormatMismatch {
    /// Refuse to open.
    #[default]
    Error,
    /// Drop everything in it and begin anew.
    Reset,
}

/// Who reads and writes the drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoBackend {
    /// io_uring where it can be had, else threads that block.
    #[default]
    Auto,
    /// io_uring, or refuse to open.
    IoUring,
    /// Threads that block in the operating system's calls.
    Blocking,
}

/// What decides which block leaves a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionPolicy {
    /// Predicted reuse.
    #[default]
    Beta,
    /// Predicted reuse, as first specified: a smaller draw.
    BetaSpec,
    /// The block that was used longest ago.
    Lru,
}

/// How a store is opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// Bytes of T1, host memory. Absent: min(25 % of the cgroup's limit, 4 GiB). 0: none; blocks
    /// are read from T3 into the caller's memory, and `get` and `reserve` are refused.
    #[serde(deserialize_with = "de_size_opt")]
    pub dram_capacity: Option<u64>,
    /// Where T1 is 0: bytes through which blocks are written, and read into memory that is not
    /// registered.
    #[serde(deserialize_with = "de_size")]
    pub staging_capacity: u64,
    /// Directory of each drive of T3. Empty: no T3.
    #[serde(deserialize_with = "de_paths")]
    pub nvme_paths: Vec<PathBuf>,
    /// Bytes that T3 may allocate on each drive, all files counted.
    #[serde(deserialize_with = "de_size")]
    pub nvme_capacity: u64,
    /// Bytes a second that may be written to each drive, over the hours: an hour's may be written
    /// at once. Where less than half of that is left, what is worth most is written, and the rest
    /// stays in memory only. 0: no bound. A drive of 1 TB that may be written once a day bears 11
    /// MB a second.
    #[serde(deserialize_with = "de_size")]
    pub nvme_write_bytes_per_s: u64,
    /// Bytes of a T3 segment. Absent: min(256 MiB, capacity / 8).
    #[serde(deserialize_with = "de_size_opt")]
    pub segment_bytes: Option<u64>,
    /// Part of T1 that leases may pin; beyond it a `get` is a miss.
    pub max_leased_fraction: f64,
    /// Part of T1 that may wait to be written to T3; beyond it a `put` is throttled.
    pub dirty_high_fraction: f64,
    /// Part of T1 that must be left waiting before puts are taken again after that.
    pub dirty_low_fraction: f64,
    /// Bytes that may be loading from a drive at once; beyond it a `get` is a miss.
    #[serde(deserialize_with = "de_size")]
    pub max_load_bytes: u64,
    /// Deadline of a load in seconds, where the call names none.
    pub load_timeout_s: f64,
    /// Tokens a second that the engine computes in prefill. A load that is estimated to take longer
    /// than computing what it would bring is not begun: it is a miss. Absent: every load is worth
    /// it, unless its call says otherwise.
    pub recompute_tokens_per_s: Option<f64>,
    /// Part of what is moved up from the drives to T1 that may be so for nothing: behind a block
    /// that a get reads from a drive, what is stored next is read ahead, as far as this allows. 0:
    /// only what is asked for is.
    pub ahead_waste: f64,
    /// Deadline of a put in seconds, where the call names none.
    pub put_timeout_s: f64,
    /// Seconds without an answer to any read after which a drive counts as stalled: what waits for
    /// it is a miss then, and it is not asked until it answers again.
    pub drive_stall_s: f64,
    /// Seconds after which a drive that failed repeatedly is tried again.
    pub drive_retry_s: f64,
    /// Bytes a second that are read back from each drive and verified while nothing else is to be
    /// done. 0: none.
    #[serde(deserialize_with = "de_size")]
    pub scrub_bytes_per_s: u64,
    /// Seconds after which a reservation that was not published is dropped.
    pub reservation_ttl_s: f64,
    /// Seconds that `close` may spend on writing what is not yet durable.
    pub close_timeout_s: f64,
    /// What to do with a directory of another format version.
    pub on_format_mismatch: OnFormatMismatch,
    /// Entries that the event log keeps.
    pub event_log_entries: usize,
    /// File to which each event is written as a line of JSON before what follows from it is done.
    /// Absent: none.
    pub event_file: Option<PathBuf>,
    /// What decides which block leaves a tier: `beta`, `beta-spec` or `lru`.
    pub policy: EvictionPolicy,
    /// Most bytes of memory that the predictor keeps: for what is resident, what it remembers of
    /// blocks that left, which shrinks first, and what it learned. Absent: 1 % of all tiers, at
    /// least 64 MiB.
    #[serde(deserialize_with = "de_size_opt")]
    pub metadata_bytes: Option<u64>,
    /// File to which requests are recorded, as a trace that `tiered-kv replay` reads: ids of
    /// blocks and sessions, times and lengths, no tokens and no names. Absent: none.
    pub record: Option<PathBuf>,
    /// Bytes beyond which nothing more is recorded.
    #[serde(deserialize_with = "de_size")]
    pub record_bytes: u64,
    /// Who reads and writes the drives: `auto`, `io_uring` or `blocking`.
    pub io_backend: IoBackend,
    /// Threads that serve loads, with the blocking backend; two buffers of 2 MiB a drive for each,
    /// at most 16, besides `dram_capacity`.
    pub load_threads: usize,
    /// Threads that write to the drives, with the blocking backend.
    pub store_threads: usize,
    /// Threads that copy and check payloads.
    pub copy_threads: usize,
    /// Processors that the store is opened and its threads run on; those that the process may not
    /// use are left out. Absent: those of the thread that opens it, which are too few where an
    /// engine has bound that one to its computation.
    #[serde(deserialize_with = "CpuList::read_opt")]
    pub cpus: Option<CpuList>,
    /// Collapse T1 to huge pages where the kernel can.
    pub huge_pages: bool,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            dram_capacity: None,
            staging_capacity: 64 << 20,
            nvme_paths: Vec::new(),
            nvme_capacity: 0,
            nvme_write_bytes_per_s: 0,
            segment_bytes: None,
            max_leased_fraction: 0.5,
            dirty_high_fraction: 0.75,
            dirty_low_fraction: 0.5,
            max_load_bytes: 1 << 30,
            load_timeout_s: 10.0,
            recompute_tokens_per_s: None,
            ahead_waste: 0.05,
            put_timeout_s: 30.0,
            drive_stall_s: 2.0,
            drive_retry_s: 5.0,
            scrub_bytes_per_s: 0,
            reservation_ttl_s: 60.0,
            close_timeout_s: 60.0,
            on_format_mismatch: OnFormatMismatch::Error,
            event_log_entries: 65_536,
            event_file: None,
            policy: EvictionPolicy::default(),
            metadata_bytes: None,
            record: None,
            record_bytes: 256 << 20,
            io_backend: IoBackend::Auto,
            load_threads: 2,
            store_threads: 1,
            copy_threads: 2,
            cpus: None,
            huge_pages: true,
        }
    }
}

fn bad(field: &str, remedy: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Config, "config", format!("`{field}` {remedy}"))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Paths {
    One(PathBuf),
    Many(Vec<PathBuf>),
}

fn de_paths<'de, D: Deserializer<'de>>(de: D) -> std::result::Result<Vec<PathBuf>, D::Error> {
    match Paths::deserialize(de) {
        Ok(Paths::One(path)) => Ok(vec![path]),
        Ok(Paths::Many(paths)) => Ok(paths),
        Err(_) => Err(serde::de::Error::custom("is not a directory or a list of them: give text")),
    }
}

impl StoreConfig {
    /// Reads the schema from TOML text and lets `env` (name, value) override single fields.
    ///
    /// # Errors
    /// `Config`, naming the field and what it accepts.
    pub fn from_toml(text: &str, env: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        Self::from_table(text.parse().map_err(no_toml)?, env)
    }

    /// The same from fields that were read already.
    ///
    /// # Errors
    /// `Config`, naming the field and what it accepts.
    pub fn from_table(
        mut table: toml::Table,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        for (name, value) in env {
            if let Some(field) = name.strip_prefix(ENV_PREFIX) {
                let field = field.to_ascii_lowercase();
                if is_field(&field) {
                    table.insert(field, env_value(&value));
                }
            }
        }
        let config: Self = table.try_into().map_err(unreadable)?;
        config.check()?;
        Ok(config)
    }

    /// Every field by name; one that is absent is not in the table.
    ///
    /// # Errors
    /// `Config` where a path is not UTF-8 or a number is over 2^63.
    pub fn to_table(&self) -> Result<toml::Table> {
        toml::Table::try_from(self)
            .map_err(|e| Error::new(ErrorKind::Config, "config", e.to_string()))
    }

    /// The names of all fields, absent ones too.
    pub fn field_names() -> Vec<String> {
        let full = Self {
            dram_capacity: Some(0),
            segment_bytes: Some(0),
            event_file: Some(PathBuf::new()),
            metadata_bytes: Some(0),
            recompute_tokens_per_s: Some(1.0),
            record: Some(PathBuf::new()),
            cpus: CpuList::new([0]).ok(),
            ..Self::default()
        };
        let table = full.to_table().expect("the defaults are representable");
        table.into_iter().map(|(name, _)| name).collect()
    }

    /// Checks what can be known before anything is opened.
    ///
    /// # Errors
    /// `Config`, naming the field and the remedy.
    pub fn check(&self) -> Result<()> {
        if self.has_no_dram() && (self.nvme_paths.is_empty() || self.nvme_capacity == 0) {
            return Err(bad(
                "dram_capacity",
                "and `nvme_capacity` are both 0: give one of the tiers a capacity",
            ));
        }
        if self.nvme_paths.is_empty() && self.nvme_capacity > 0 {
            return Err(bad(
                "nvme_paths",
                "is empty but `nvme_capacity` is not 0: name a directory",
            ));
        }
        if !self.nvme_paths.is_empty() && self.nvme_capacity == 0 {
            return Err(bad(
                "nvme_capacity",
                "is 0 but `nvme_paths` names a directory: give a size",
            ));
        }
        self.check_tiers()?;
        for (field, value) in [
            ("max_leased_fraction", self.max_leased_fraction),
            ("dirty_high_fraction", self.dirty_high_fraction),
            ("dirty_low_fraction", self.dirty_low_fraction),
        ] {
            if !(value > 0.0 && value <= 1.0) {
                return Err(bad(field, format!("is {value}: give a part of 1, over 0")));
            }
        }
        for (field, value) in [
            ("load_timeout_s", self.load_timeout_s),
            ("put_timeout_s", self.put_timeout_s),
            ("drive_stall_s", self.drive_stall_s),
            ("drive_retry_s", self.drive_retry_s),
            ("reservation_ttl_s", self.reservation_ttl_s),
            ("close_timeout_s", self.close_timeout_s),
        ] {
            if !(value > 0.0 && value <= 86_400.0) {
                return Err(bad(
                    field,
                    format!("is {value}: give seconds, over 0 and up to 86400"),
                ));
            }
        }
        for (field, value) in [
            ("load_threads", self.load_threads),
            ("store_threads", self.store_threads),
            ("copy_threads", self.copy_threads),
        ] {
            if !(1..=256).contains(&value) {
                return Err(bad(field, format!("is {value}: give 1 to 256")));
            }
        }
        if self.event_log_entries > 16 << 20 {
            return Err(bad("event_log_entries", "is over 16777216: give less"));
        }
        if self.event_log_entries == 0 && self.event_file.is_some() {
            return Err(bad("event_file", "needs `event_log_entries` over 0: raise it"));
        }
        self.check_policy()
    }

    fn check_policy(&self) -> Result<()> {
        if let Some(bytes) = self.metadata_bytes
            && bytes < MIN_METADATA_BYTES
        {
            return Err(bad("metadata_bytes", format!("is {bytes}: give at least 4 MiB")));
        }
        if let Some(rate) = self.recompute_tokens_per_s
            && !(rate > 0.0 && rate.is_finite())
        {
            return Err(bad(
                "recompute_tokens_per_s",
                format!("is {rate}: give tokens a second, over 0"),
            ));
        }
        if !(0.0..=1.0).contains(&self.ahead_waste) {
            let waste = self.ahead_waste;
            return Err(bad("ahead_waste", format!("is {waste}: give a part, 0 to 1")));
        }
        Ok(())
    }

    fn check_tiers(&self) -> Result<()> {
        for (at, path) in self.nvme_paths.iter().enumerate() {
            if self.nvme_paths[..at].contains(path) {
                return Err(bad("nvme_paths", "names a directory twice: name each drive once"));
            }
        }
        if self.nvme_paths.len() > 256 {
            return Err(bad("nvme_paths", "names over 256 drives: name fewer"));
        }
        if self.has_no_dram() && self.staging_capacity < 8 * PAGE_BYTES {
            let bytes = self.staging_capacity;
            return Err(bad(
                "staging_capacity",
                format!("is {bytes} and `dram_capacity` is 0: give at least 32 KiB"),
            ));
        }
        if let Some(bytes) = self.dram_capacity
            && (1..8 * PAGE_BYTES).contains(&bytes)
        {
            return Err(bad("dram_capacity", format!("is {bytes}: give at least 32 KiB")));
        }
        if self.nvme_capacity > 0 && self.nvme_capacity < 8 * MIN_SEGMENT_BYTES {
            return Err(bad(
                "nvme_capacity",
                format!("is {}: give 512 KiB or more", self.nvme_capacity),
            ));
        }
        if let Some(bytes) = self.segment_bytes {
            let fits = self.nvme_capacity == 0 || bytes <= self.nvme_capacity / 2;
            if bytes < MIN_SEGMENT_BYTES || !bytes.is_multiple_of(PAGE_BYTES) || !fits {
                return Err(bad(
                    "segment_bytes",
                    format!(
                        "is {bytes}: give a multiple of 4 KiB from 64 KiB to half the capacity"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Whether there is no T1: blocks only pass through memory.
    pub fn has_no_dram(&self) -> bool {
        self.dram_capacity == Some(0)
    }

    /// Bytes of a segment of a tier of `capacity` bytes.
    pub fn segment_bytes_for(&self, capacity: u64) -> u64 {
        let default = (capacity / 8).clamp(MIN_SEGMENT_BYTES, MAX_DEFAULT_SEGMENT_BYTES);
        self.segment_bytes.unwrap_or(default) / PAGE_BYTES * PAGE_BYTES
    }
}

fn is_field(name: &str) -> bool {
    StoreConfig::field_names().iter().any(|field| field == name)
}

/// The parser's message, which shows the place in the text.
fn no_toml(e: toml::de::Error) -> Error {
    Error::new(ErrorKind::Config, "config", e.to_string().trim_end())
}

/// Names and values come from anywhere: none of them breaks a message's line.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

/// What is wrong with a field's value, with the field in front.
fn unreadable(e: toml::de::Error) -> Error {
    let text = e.to_string();
    let text = text.trim_end();
    match text.rsplit_once("\nin `") {
        Some((what, field)) => bad(&one_line(field.trim_end_matches('`')), one_line(what)),
        None => Error::new(ErrorKind::Config, "config", one_line(text)),
    }
}

/// An environment value as TOML: a number or truth value where it reads as one, else text.
fn env_value(text: &str) -> toml::Value {
    if let Ok(number) = text.parse::<i64>() {
        return toml::Value::Integer(number);
    }
    if let Ok(number) = text.parse::<f64>() {
        return toml::Value::Float(number);
    }
    match text {
        "true" => toml::Value::Boolean(true),
        "false" => toml::Value::Boolean(false),
        _ => toml::Value::String(text.to_owned()),
    }
}
