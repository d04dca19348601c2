//! Writes a trace as runs of ids, one JSON object a line: the format that loses nothing.

use crate::trace::{Entry, Trace};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use std::io::{self, BufWriter, Write};
use tiered_kv_policy::RequestKind;

#[derive(Serialize)]
struct Line<'a> {
    id: usize,
    timestamp: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<String>,
    turn: u32,
    parent_id: i64,
    #[serde(rename = "type")]
    kind: String,
    input_length: u32,
    output_length: u32,
    block_size: u32,
    hash_runs: &'a [(u32, u32)],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    out_hash_runs: &'a [(u32, u32)],
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

/// What came before in a session: turns so far, and the last request's number.
type Sessions = Vec<(u32, i64)>;

fn line<'a>(trace: &'a Trace, id: usize, entry: &Entry, sessions: &mut Sessions) -> Line<'a> {
    let (mut turn, mut parent_id) = (1, -1);
    if let Some(session) = entry.session {
        let session = session as usize;
        if sessions.len() <= session {
            sessions.resize(session + 1, (0, -1));
        }
        let (turns, last) = &mut sessions[session];
        *turns += 1;
        (turn, parent_id) = (*turns, *last);
        *last = id as i64;
    }
    let [hash_runs, out_hash_runs] = trace.parts(entry);
    Line {
        id,
        timestamp: entry.now as f64 * 1e-9,
        session_id: entry.session.map(|session| session.to_string()),
        turn,
        parent_id,
        kind: kind(entry.kind),
        input_length: entry.input_tokens,
        output_length: entry.output_tokens,
        block_size: trace.block_tokens,
        hash_runs,
        out_hash_runs,
    }
}

fn write_lines(trace: &Trace, mut into: impl Write) -> io::Result<()> {
    let mut sessions = Sessions::new();
    for (id, entry) in trace.entries().iter().enumerate() {
        serde_json::to_writer(&mut into, &line(trace, id, entry, &mut sessions))?;
        into.write_all(b"\n")?;
    }
    into.flush()
}

/// Writes a trace as runs of ids; packed with gzip if `packed`. Blocks and sessions have the
/// numbers of the trace, whatever ids they were read from: nothing else of the source is in it.
///
/// # Errors
/// What is written to fails.
pub fn write(trace: &Trace, into: impl Write, packed: bool) -> io::Result<()> {
    let buffered = BufWriter::new(into);
    if packed {
        let mut encoder = GzEncoder::new(buffered, Compression::default());
        write_lines(trace, &mut encoder)?;
        encoder.finish()?.flush()
    } else {
        write_lines(trace, buffered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{generate, read};

    #[test]
    fn what_is_written_is_read_as_it_was() {
        for kind in ["chat", "agents", "scan"] {
            let trace = generate(kind, 500, 3).unwrap();
            for packed in [false, true] {
                let mut text = Vec::new();
                write(&trace, &mut text, packed).unwrap();
                let again = read(&text[..], &trace.name).unwrap();
                assert_eq!(format!("{again:?}"), format!("{trace:?}"), "{kind}");
            }
        }
    }
}
