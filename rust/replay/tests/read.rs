//! Readers: what each format says, what is counted of it, and what is refused.

use std::io::{BufReader, Write};
use tiered_kv_policy::RequestKind;
use tiered_kv_replay::{Trace, read};

fn text(lines: &[&str]) -> Result<Trace, String> {
    read(BufReader::new(lines.join("\n").as_bytes()), "t").map_err(|e| e.to_string())
}

fn blocks(trace: &Trace, number: usize, outputs: bool) -> Vec<u64> {
    let mut blocks = Vec::new();
    trace.blocks(&trace.entries()[number], outputs, &mut blocks);
    blocks
}

const RUNS: [&str; 3] = [
    r#"{"timestamp":1.5,"session_id":"a","type":"agent-n","input_length":70,"output_length":20,
        "block_size":16,"hash_runs":[[100,2],[7,2]],"out_hash_runs":[[50,1]]}"#,
    r#"{"timestamp":2.0,"session_id":"b","type":"chat","input_length":32,"output_length":1,
        "block_size":16,"hash_runs":[[100,2]]}"#,
    r#"{"timestamp":2.0,"session_id":"a","type":"mine","input_length":96,"output_length":1,
        "block_size":16,"hash_runs":[[100,2],[7,2],[50,2]]}"#,
];

fn one_line(lines: &[&str]) -> Vec<String> {
    lines.iter().map(|line| line.replace('\n', " ")).collect()
}

#[test]
fn runs_of_ids() {
    let lines = one_line(&RUNS);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let trace = text(&lines).unwrap();
    assert_eq!((trace.block_tokens, trace.unique_blocks, trace.block_accesses), (16, 6, 12));
    assert_eq!(blocks(&trace, 0, false), [0, 1, 2, 3]);
    assert_eq!(blocks(&trace, 0, true), [0, 1, 2, 3, 4]);
    assert_eq!(blocks(&trace, 2, true), [0, 1, 2, 3, 4, 5]);
    let entries = trace.entries();
    assert_eq!(entries[0].session, entries[2].session);
    assert_ne!(entries[0].session, entries[1].session);
    assert_eq!(entries[0].kind, RequestKind::AgentN);
    assert_eq!(entries[2].kind, RequestKind::Label(5));
    assert_eq!((entries[0].now, entries[0].prompt), (1_500_000_000, 4));
    let percent = |part: f64| 100.0 * part / 12.0;
    assert_eq!(trace.ceiling_pct(false), percent(6.0), "the output's block was in no prompt");
    assert_eq!(trace.ceiling_pct(true), percent(7.0));
    assert_eq!(trace.unchained, 0);
}

#[test]
fn packed_traces_are_unpacked() {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(one_line(&RUNS).join("\n").as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    let trace = read(BufReader::new(&packed[..]), "t").unwrap();
    assert_eq!(trace.entries().len(), 3);
}

#[test]
fn mooncake() {
    let trace = text(&[
        r#"{"timestamp":0,"input_length":1000,"output_length":5,"hash_ids":[0,9000000000]}"#,
        r#"{"timestamp":3000,"input_length":600,"output_length":5,"hash_ids":[0,2]}"#,
    ]);
    let trace = trace.unwrap();
    assert_eq!((trace.block_tokens, trace.entries()[1].now), (512, 3_000_000_000));
    assert_eq!((blocks(&trace, 0, true), blocks(&trace, 1, true)), (vec![0, 1], vec![0, 2]));
    assert_eq!(trace.entries()[0].session, None);
}

#[test]
fn qwen_bailian() {
    let line = |chat: i64, parent: i64, at: f64, kind: &str| {
        format!(
            r#"{{"chat_id":{chat},"parent_chat_id":{parent},"timestamp":{at},"input_length":40,
            "output_length":5,"type":"{kind}","turn":1,"hash_ids":[1,2,{}]}}"#,
            10 + chat
        )
        .replace('\n', " ")
    };
    let lines = [line(1, -1, 0.5, "text"), line(2, -1, 1.0, "file"), line(3, 1, 2.0, "text")];
    let trace = text(&lines.each_ref().map(String::as_str)).unwrap();
    let sessions: Vec<_> = trace.entries().iter().map(|entry| entry.session).collect();
    assert_eq!(sessions, [Some(0), Some(1), Some(0)], "a chat goes on with its parent's session");
    let kinds: Vec<_> = trace.entries().iter().map(|entry| entry.kind.index()).collect();
    assert_eq!((kinds, trace.block_tokens), (vec![5, 6, 5], 16));
}

#[test]
fn what_is_no_trace_is_refused_with_its_line_and_a_reason() {
    let good = r#"{"timestamp":5,"block_size":16,"hash_runs":[[0,3]]}"#;
    for (bad, reason) in [
        (r#"{"timestamp":5}"#, "one of hash_runs"),
        (r#"{"timestamp":-1,"hash_runs":[]}"#, "timestamp"),
        (r#"{"timestamp":1e300,"hash_runs":[]}"#, "timestamp"),
        (r#"{"timestamp":4,"block_size":16,"hash_runs":[]}"#, "sort the requests"),
        (r#"{"timestamp":6,"block_size":32,"hash_runs":[]}"#, "block_size: 32 after 16"),
        (r#"{"timestamp":6,"block_size":16,"hash_runs":[[0,2],[1,1]]}"#, "block 1 twice"),
        (r#"{"timestamp":6,"block_size":16,"hash_runs":[[18446744073709551615,2]]}"#, "hash_runs"),
        (r#"{"timestamp":6,"block_size":0,"hash_runs":[]}"#, "block_size"),
        (
            r#"{"timestamp":6,"block_size":16,"hash_runs":[[0,4294967295],[0,4294967295],
            [0,4294967295]]}"#,
            "more than",
        ),
        (r#"{"timestamp":6,"block_size":16,"hash_runs":[[0,4294967295]]}"#, "in a request"),
        (r#"{"timestamp":6,"block_size":16,"hash_runs":[],"hash_ids":[]}"#, "one of hash_runs"),
        ("no json", "not a request of a known format (expected"),
    ] {
        let fault = text(&[good, &bad.replace('\n', " ")]).unwrap_err();
        assert!(fault.starts_with("line 2: ") && fault.contains(reason), "{bad}: {fault}");
    }
    assert_eq!(text(&["", " "]).unwrap_err(), "no request in it");
    let label = "x".repeat(600);
    for field in ["session_id", "type"] {
        let line = format!(r#"{{"timestamp":1,"{field}":"{label}","hash_runs":[]}}"#);
        assert!(text(&[&line]).unwrap_err().contains(field), "a label of any length is kept");
    }
}

/// Two models, a request that is looked up twice, and a block size of the log's own.
#[test]
fn lookups_of_lmcache() {
    let line = |at: f64, id: &str, model: &str, hashes: &str| {
        format!(
            r#"{{"timestamp":{at},"request_id":"{id}","model_name":"{model}","chunk_size":128,
            "seq_len":300,"dtypes":["bfloat16"],"shapes":[[2,128]],"chunk_hashes":[{hashes}]}}"#
        )
        .replace('\n', " ")
    };
    let lines = [
        line(1.5, "a", "m", r#""0xaa","0xbb""#),
        line(1.6, "a", "m", r#""0xaa","0xbb""#),
        line(2.0, "b", "m", r#""0xaa","0xcc""#),
        line(3.0, "c", "n", r#""0xaa""#),
    ];
    let trace = text(&lines.each_ref().map(String::as_str)).unwrap();
    assert_eq!(
        (trace.format.name(), trace.block_tokens, trace.entries().len()),
        ("lmcache", 128, 3)
    );
    let prompts: Vec<_> = (0..3).map(|number| blocks(&trace, number, true)).collect();
    assert_eq!(prompts, [vec![0, 1], vec![0, 2], vec![3]]);
    assert_eq!((trace.entries()[0].input_tokens, trace.entries()[0].now), (300, 1_500_000_000));
    let plain = r#"{"timestamp": 7.5, "lookup_id": "x", "chunk_hashes": ["aa", "bb"]}"#;
    let trace = text(&[plain]).unwrap();
    assert_eq!((trace.block_tokens, trace.block_accesses), (256, 2));
}

/// Nothing that a file can hold makes a reader panic.
#[test]
fn damaged_lines_are_errors() {
    let line = one_line(&RUNS)[0].clone();
    for at in 0..line.len() {
        let _ = text(&[&line[..at]]).is_ok();
        let mut bytes = line.clone().into_bytes();
        bytes[at] = b'9';
        let _ = read(BufReader::new(&bytes[..]), "t").is_ok();
    }
    assert!(text(&[&line]).is_ok());
}
