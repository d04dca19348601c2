//! Traces of requests, in each of the formats.

use tiered_kv_replay::{read, write};

/// Times that a number with a fraction tells to the nanosecond, or nearly.
const LATEST: u64 = 1 << 62;

/// A trace that is read is the same after it was written out and read again.
pub(crate) fn trace(data: &[u8]) {
    let trace = match read(data, "t") {
        Ok(trace) => trace,
        Err(err) => return assert!(!err.to_string().is_empty()),
    };
    if trace.entries().iter().any(|entry| entry.now > LATEST) {
        return;
    }
    let mut text = Vec::new();
    write(&trace, &mut text, false).expect("memory takes it");
    let again = read(&text[..], "t").expect("it was just written");
    assert_eq!(again.entries().len(), trace.entries().len());
    assert_eq!(again.block_accesses, trace.block_accesses);
    assert_eq!(again.unique_blocks, trace.unique_blocks);
    assert_eq!(again.sessions(), trace.sessions());
    for outputs in [false, true] {
        assert_eq!(again.ceiling_pct(outputs), trace.ceiling_pct(outputs));
    }
}
