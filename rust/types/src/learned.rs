//! What the reuse predictor has learned, sealed: the file that outlives a close.
//!
//! ```text
//! magic 8 | format version u32 | crc32c u32
//! version of the payload u32 | zero u32 | length u64 | when it was saved u64 | payload
//! ```

use crate::codec::{Writer, triage, u32_at, u64_at};
use crate::record::Decoded;

const MAGIC: &[u8; 8] = b"TKVLRN01";
/// Of the payload, whose layout is the policy's.
const VERSION: u32 = 1;
/// Bytes before the payload.
pub const LEARNED_HEAD_BYTES: usize = 40;

/// The file's bytes; `saved_unix_ns` tells the newest of several.
pub fn encode(payload: &[u8], saved_unix_ns: u64) -> Vec<u8> {
    let mut bytes = vec![0; LEARNED_HEAD_BYTES + payload.len()];
    let mut writer = Writer(&mut bytes);
    writer.put(16, &VERSION.to_le_bytes());
    writer.put(24, &(payload.len() as u64).to_le_bytes());
    writer.put(32, &saved_unix_ns.to_le_bytes());
    writer.put(LEARNED_HEAD_BYTES, payload);
    writer.seal(MAGIC);
    bytes
}

/// When it was saved, and the payload, where a file's bytes are sound.
pub fn decode(bytes: &[u8]) -> Decoded<(u64, &[u8])> {
    let len = bytes.len().max(LEARNED_HEAD_BYTES);
    triage(bytes, MAGIC, len).then(|()| {
        let payload = &bytes[LEARNED_HEAD_BYTES..];
        match u32_at(bytes, 16) {
            VERSION if u64_at(bytes, 24) == payload.len() as u64 && u32_at(bytes, 20) == 0 => {
                Decoded::Valid((u64_at(bytes, 32), payload))
            }
            VERSION => Decoded::Damaged,
            other => Decoded::OtherVersion(other),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_that_changes_is_noticed() {
        let sound = encode(&[7; 100], 5);
        assert!(matches!(decode(&sound), Decoded::Valid((5, payload)) if payload == [7; 100]));
        for at in 0..sound.len() {
            let mut bent = sound.clone();
            bent[at] ^= 0x40;
            assert!(!matches!(decode(&bent), Decoded::Valid(_)), "byte {at}");
            assert!(!matches!(decode(&sound[..at]), Decoded::Valid(_)), "cut at {at}");
        }
        let longer = [&sound[..], &[0]].concat();
        assert!(!matches!(decode(&longer), Decoded::Valid(_)));
    }
}
