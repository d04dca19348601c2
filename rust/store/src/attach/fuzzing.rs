//! What fuzzing asks of the protocol: bytes from a stranger are a message or none, and a message
//! is the same after it was written again.

use super::protocol::{
    Answer, Ask, Frames, Greeting, MAX_FRAME_BYTES, MAX_KEYS, Refusal, Request, Response, VERSION,
    Welcome, frame, parse, unpack,
};
use crate::answers::Lookup;
use crate::stats::Stats;

/// A message that parses is written again with no more bytes, and read back as the same.
macro_rules! reads_back {
    ($bytes:expr, $message:ty) => {
        if let Some(message) = parse::<$message>($bytes) {
            let again = frame(&message).expect("no longer than what it was read from");
            assert!(again.len() - 4 <= $bytes.len(), "numbers are written at their shortest");
            let back = parse::<$message>(&again[4..]).expect("it was just written");
            assert_eq!(format!("{back:?}"), format!("{message:?}"));
            assert_eq!(frame(&back).as_ref(), Some(&again));
        }
    };
}

/// Reads bytes as every message that there is, and as a stream of frames cut anywhere.
///
/// # Panics
/// Where they are taken for what they are not.
pub fn messages(data: &[u8]) {
    reads_back!(data, Greeting);
    reads_back!(data, Welcome);
    reads_back!(data, Request<'_>);
    reads_back!(data, Response);
    if let Some(Request { ask: Ask::Lookup { keys, .. }, .. }) = parse(data)
        && let Some(keys) = unpack(keys)
    {
        assert!(keys.len() <= MAX_KEYS);
    }
    if let Some(Response { answer: Answer::Lookup(found), .. }) = parse(data)
        && let Some(found) = found.lookup(MAX_KEYS)
    {
        assert!(found.hits <= found.states.len() && found.states.len() <= MAX_KEYS);
    }
    let mut frames = Frames::default();
    let mut taken = 0;
    for piece in data.chunks(1 + data.len() % 7) {
        frames.push(piece);
        match frames.take() {
            Ok(Some(frame)) => {
                assert!(frame.len() <= MAX_FRAME_BYTES);
                taken += 4 + frame.len();
            }
            Ok(None) => {}
            Err(_) => return,
        }
    }
    assert_eq!(taken + frames.len(), data.len(), "every byte is taken once or kept");
}

/// One message of each kind, as it goes over the wire but for its length.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let (ns, keys) = ([7; 32], [9; 64]);
    let asks = [
        Ask::Lookup { ns, prefix: true, keys: &keys },
        Ask::Present { ns, keys: &keys },
        Ask::Hold { ns, ttl_ns: 1 << 40, keys: &keys },
        Ask::Release { holds: vec![1, 300, u64::MAX] },
        Ask::Stats,
        Ask::Health,
    ];
    let answers = [
        Answer::Lookup(Lookup::absent(2, crate::LookupMode::Each).into()),
        Answer::Present(vec![true, false]),
        Answer::Held { hold: Some(5), held: vec![true] },
        Answer::Stats(Box::new(Stats { misses: vec![("absent", 3)], ..Stats::default() })),
    ];
    let mut seeds: Vec<Option<Vec<u8>>> = Vec::new();
    seeds.push(frame(&Greeting::new(VERSION)));
    seeds.push(frame(&Welcome::new(Some(Refusal::Full(64)), "00ff".into())));
    seeds.extend((0..).zip(asks).map(|(id, ask)| frame(&Request { id, ask })));
    seeds.extend((0..).zip(answers).map(|(id, answer)| frame(&Response { id, answer })));
    seeds.into_iter().flatten().map(|frame| frame[4..].to_vec()).collect()
}
