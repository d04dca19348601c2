//! What owner and attached process say to each other; `docs/attach.md` draws it.
//!
//! A frame is a length (u32, little-endian) and that many bytes of postcard. The first frame of
//! each side is a greeting whose form never changes, so that two versions can tell each other
//! apart.
//! Everything that comes in is bounded before memory is taken for it.

use crate::answers::{Health, Lookup};
use crate::index::Residency;
use crate::operator::{Question, Reply};
use crate::stats::Stats;
use serde::{Deserialize, Serialize};
use tiered_kv_types::{BlockInfo, BlockKey, BlockType};

/// Version of the protocol; both sides must speak the same.
pub(super) const VERSION: u32 = 3;
/// Longest frame, without its length.
pub(super) const MAX_FRAME_BYTES: usize = 1 << 20;
/// Most keys of one request.
pub(super) const MAX_KEYS: usize = 4096;
/// Most holds that one release names.
pub(super) const MAX_RELEASED: usize = 4096;
const MAGIC: [u8; 4] = *b"TKVA";
const LENGTH_BYTES: usize = 4;

/// The attached process's first frame.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Greeting {
    magic: [u8; 4],
    pub(super) version: u32,
}

impl Greeting {
    pub(super) fn new(version: u32) -> Self {
        Self { magic: MAGIC, version }
    }

    pub(super) fn is_sound(&self) -> bool {
        self.magic == MAGIC
    }
}

/// The owner's first frame.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    magic: [u8; 4],
    pub(super) version: u32,
    pub(super) refusal: Option<Refusal>,
    /// The first drive's identity, in hexadecimal.
    pub(super) store_id: String,
    /// The owner's process.
    pub(super) pid: u32,
}

impl Welcome {
    pub(super) fn new(refusal: Option<Refusal>, store_id: String) -> Self {
        Self { magic: MAGIC, version: VERSION, refusal, store_id, pid: std::process::id() }
    }

    pub(super) fn is_sound(&self) -> bool {
        self.magic == MAGIC
    }
}

/// Why an owner takes no more to do with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// It speaks another version.
    Version,
    /// As many as this are attached already.
    Full(u32),
    /// It is another user's process.
    User,
}

/// One request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request<'a> {
    /// Comes back with the answer.
    pub(super) id: u64,
    #[serde(borrow)]
    pub(super) ask: Ask<'a>,
}

/// What is asked. Keys are packed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask<'a> {
    Lookup { ns: [u8; 32], prefix: bool, keys: &'a [u8] },
    Present { ns: [u8; 32], keys: &'a [u8] },
    Hold { ns: [u8; 32], ttl_ns: u64, keys: &'a [u8] },
    Release { holds: Vec<u64> },
    Stats,
    Health,
    Operate(Question),
}

/// The answer to the request with its number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Response {
    pub(super) id: u64,
    pub(super) answer: Answer,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Lookup(Found),
    Present(Vec<bool>),
    Held { hold: Option<u64>, held: Vec<bool> },
    Released,
    Stats(Box<Stats>),
    Health(Box<Health>),
    Operate(Box<Reply>),
}

/// A lookup's result.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Found {
    hits: usize,
    blocks: Vec<(Residency, Told)>,
}

/// What was told of a block: depth, tokens, flags, type.
type Told = (u32, u32, u8, u8);

impl From<Lookup> for Found {
    fn from(lookup: Lookup) -> Self {
        let told = |info: BlockInfo| (info.depth, info.tokens, info.flags(), info.block_type as u8);
        let blocks = lookup.states.into_iter().zip(lookup.infos.into_iter().map(told)).collect();
        Self { hits: lookup.hits, blocks }
    }
}

impl Found {
    /// The lookup of `keys` keys; `None` where the owner contradicts itself.
    pub(super) fn lookup(self, keys: usize) -> Option<Lookup> {
        if self.blocks.len() > keys || self.hits > self.blocks.len() {
            return None;
        }
        let mut found = Lookup { hits: self.hits, ..Lookup::default() };
        for (state, (depth, tokens, flags, block_type)) in self.blocks {
            let block_type = BlockType::from_u8(block_type);
            let info = BlockInfo { depth, tokens, block_type, ..BlockInfo::default() };
            found.states.push(state);
            found.infos.push(info.with_flags(flags));
        }
        Some(found)
    }
}

/// The keys of a request; `None` where there are too many or one is cut short.
pub(super) fn unpack(packed: &[u8]) -> Option<Vec<BlockKey>> {
    BlockKey::unpack(packed).ok().filter(|keys| keys.len() <= MAX_KEYS)
}

/// A message as a frame; `None` where it is too long for one.
pub(super) fn frame(message: &impl Serialize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; LENGTH_BYTES];
    bytes = postcard::to_extend(message, bytes).ok()?;
    let len = bytes.len() - LENGTH_BYTES;
    if len > MAX_FRAME_BYTES {
        return None;
    }
    bytes[..LENGTH_BYTES].copy_from_slice(&u32::try_from(len).ok()?.to_le_bytes());
    Some(bytes)
}

/// A frame's content, all of it.
pub(super) fn parse<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Option<T> {
    let (message, rest) = postcard::take_from_bytes(frame).ok()?;
    rest.is_empty().then_some(message)
}

/// A frame longer than any that is spoken.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

/// Bytes received, cut into frames. Takes memory for what has come in, never for what a length
/// says.
#[derive(Debug, Default)]
pub(super) struct Frames {
    bytes: Vec<u8>,
}

impl Frames {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Bytes of frames not yet taken.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Length of the first frame, where it is known.
    fn first(&self) -> Result<Option<usize>, TooLong> {
        let Some(length) = self.bytes.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        match usize::try_from(u32::from_le_bytes(*length)) {
            Ok(len) if len <= MAX_FRAME_BYTES => Ok(Some(len)),
            _ => Err(TooLong),
        }
    }

    /// Whether a whole frame is there.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.first(), Ok(Some(len)) if self.bytes.len() - LENGTH_BYTES >= len)
    }

    /// Takes the first frame, where all of it is there.
    pub(super) fn take(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        match self.first()? {
            Some(len) if self.bytes.len() - LENGTH_BYTES >= len => {
                let rest = self.bytes.split_off(LENGTH_BYTES + len);
                let mut frame = std::mem::replace(&mut self.bytes, rest);
                frame.drain(..LENGTH_BYTES);
                Ok(Some(frame))
            }
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod protocol_tests {
    use super::*;
    use crate::stats::ReuseStats;
    use proptest::prelude::*;

    #[test]
    fn a_frame_longer_than_any_is_refused_before_it_is_received() {
        let mut frames = Frames::default();
        frames.push(&u32::try_from(MAX_FRAME_BYTES + 1).expect("small").to_le_bytes());
        assert_eq!(frames.take(), Err(TooLong));
    }

    #[test]
    fn a_request_of_the_most_keys_and_its_answers_fit_in_a_frame() {
        let keys = vec![0xff; MAX_KEYS * 32];
        let ask = Ask::Hold { ns: [0xff; 32], ttl_ns: u64::MAX, keys: &keys };
        assert!(frame(&Request { id: u64::MAX, ask }).is_some());
        let info = BlockInfo { depth: u32::MAX, tokens: u32::MAX, ..BlockInfo::default() };
        let in_memory = Residency::In(tiered_kv_types::Tier::Dram);
        let all = Lookup {
            hits: MAX_KEYS,
            states: vec![in_memory; MAX_KEYS],
            infos: vec![info; MAX_KEYS],
        };
        let answer = Answer::Lookup(all.clone().into());
        let bytes = frame(&Response { id: u64::MAX, answer }).expect("it fits");
        let back: Response = parse(&bytes[LENGTH_BYTES..]).expect("it was made here");
        let Answer::Lookup(found) = back.answer else { panic!("a lookup") };
        assert_eq!(found.lookup(MAX_KEYS), Some(all));
    }

    #[test]
    fn statistics_arrive_as_they_were_sent() {
        let stats = Stats {
            misses: vec![("absent", 3)],
            counters: vec![("lookups", 7), ("put_stored", 1)],
            held_bytes: 9,
            reuses_by_pair: vec![ReuseStats { predicted: 0.25, reuses: 1 }],
            ..Stats::default()
        };
        let bytes = frame(&Answer::Stats(Box::new(stats.clone()))).expect("short");
        let Some(Answer::Stats(back)) = parse(&bytes[LENGTH_BYTES..]) else { panic!("statistics") };
        assert_eq!(format!("{back:?}"), format!("{stats:?}"));
    }

    proptest! {
        #[test]
        fn what_comes_in_is_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..99)) {
            let _ = parse::<Request<'_>>(&bytes);
            let _ = parse::<Response>(&bytes);
            let _ = parse::<Greeting>(&bytes);
            let _ = parse::<Welcome>(&bytes);
        }

        #[test]
        fn frames_come_out_however_they_are_cut(cuts in prop::collection::vec(1usize..40, 1..40)) {
            let sent: Vec<Vec<u8>> = (0..20u8).map(|n| vec![n; usize::from(n)]).collect();
            let mut wire = Vec::new();
            for body in &sent {
                wire.extend(u32::try_from(body.len()).expect("short").to_le_bytes());
                wire.extend(body);
            }
            let (mut frames, mut received, mut at) = (Frames::default(), Vec::new(), 0);
            for cut in cuts.iter().cycle() {
                let end = (at + cut).min(wire.len());
                frames.push(&wire[at..end]);
                while let Some(frame) = frames.take().expect("all are short") {
                    received.push(frame);
                }
                at = end;
                if at == wire.len() {
                    break;
                }
            }
            prop_assert_eq!(received, sent);
        }
    }
}
