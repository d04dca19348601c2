//! Block keys: 32 bytes that name the KV of an exact run of tokens inside a namespace.
//!
//! Every key is a keyed blake3 hash whose key is the namespace digest, so that equal tokens in two
//! namespaces never share a key. The message begins with a tag, so that the kinds never collide:
//!
//! ```text
//! token block   "tkv1:tok" | parent key (32, zero for a root) | count u32 LE | token ids u32 LE
//! ... opaque key    "tkv1:raw" | width u32 LE | the engine's bytes
//! ```
//! The exact token count is hashed, so a partial block never equals a full one.

use crate::error::{Error, ErrorKind, Result};
use crate::namespace::NamespaceId;

/// Width of a key in bytes.
pub const KEY_BYTES: usize = 32;

/// Longest opaque key of a serving engine that is accepted, in bytes.
pub const MAX_OPAQUE_KEY_BYTES: usize = 4096;

const TOKEN_TAG: &[u8; 8] = b"tkv1:tok";
const OPAQUE_TAG: &[u8; 8] = b"tkv1:raw";

/// A message up to this long is hashed at once: it is one chunk of blake3, and setting up its
/// incremental hasher costs several times as much as the hash.
const AT_ONCE_BYTES: usize = 1024;

/// The key of one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub [u8; KEY_BYTES]);

impl BlockKey {
    /// Splits packed keys (n x 32 bytes) into keys.
    ///
    /// # Errors
    /// `InvalidArgument` where the length is not a multiple of 32.
    pub fn unpack(packed: &[u8]) -> Result<Vec<Self>> {
        let (keys, rest) = packed.as_chunks::<KEY_BYTES>();
        if !rest.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "keys",
                format!(
                    "`keys` holds {} bytes, which is not a multiple of {KEY_BYTES}: pass packed \
                     keys \
                     as keys_from_tokens or keys_from_opaque return them",
                    packed.len()
                ),
            ));
        }
        Ok(keys.iter().map(|k| Self(*k)).collect())
    }

    /// Packs keys into n x 32 bytes.
    pub fn pack(keys: &[Self]) -> Vec<u8> {
        keys.iter().flat_map(|k| k.0).collect()
    }

    /// A number that stands for the key wherever nothing goes wrong if two keys share one.
    pub fn number(&self) -> u64 {
        let (words, _) = self.0.as_chunks::<8>();
        words.iter().fold(0, |sum: u64, word| {
            let mixed = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ (mixed >> 32)
        })
    }

    /// The first 16 hexadecimal digits, for messages.
    pub fn short(&self) -> String {
        crate::hex(&self.0[..8])
    }
}

impl std::fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockKey({})", self.short())
    }
}

/// A message that is hashed at once, while it is short.
struct Message<'a> {
    ns: &'a NamespaceId,
    bytes: [u8; AT_ONCE_BYTES],
    len: usize,
    /// What did not fit in, with all before it.
    long: Option<Box<blake3::Hasher>>,
}

impl<'a> Message<'a> {
    fn new(ns: &'a NamespaceId) -> Self {
        Self { ns, bytes: [0; AT_ONCE_BYTES], len: 0, long: None }
    }

    fn put(&mut self, bytes: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
            self.len += bytes.len();
            return;
        }
        let new = || Box::new(blake3::Hasher::new_keyed(&self.ns.0));
        let hasher = self.long.get_or_insert_with(new);
        hasher.update(&self.bytes[..self.len]);
        hasher.update(bytes);
        self.len = 0;
    }

    fn key(self) -> BlockKey {
        let rest = &self.bytes[..self.len];
        let hash = match self.long {
            Some(mut hasher) => hasher.update(rest).finalize(),
            None => blake3::keyed_hash(&self.ns.0, rest),
        };
        BlockKey(*hash.as_bytes())
    }
}

/// The key of one block of exactly these tokens after `parent`.
pub fn token_block_key(ns: &NamespaceId, parent: Option<&BlockKey>, tokens: &[u32]) -> BlockKey {
    let mut message = Message::new(ns);
    message.put(TOKEN_TAG);
    message.put(parent.map_or(&[0; KEY_BYTES], |p| &p.0));
    let count = u32::try_from(tokens.len()).expect("a block holds fewer than 2^32 tokens");
    message.put(&count.to_le_bytes());
    for token in tokens {
        message.put(&token.to_le_bytes());
    }
    message.key()
}

/// The chained keys of a token sequence cut into blocks of `tokens_per_block`.
///
/// Only full blocks get a key, unless `partial` asks for one of the tail too: that key covers the
/// exact number of tail tokens and never equals the key of the full block.
pub fn keys_from_tokens(
    ns: &NamespaceId,
    parent: Option<BlockKey>,
    tokens: &[u32],
    tokens_per_block: u32,
    partial: bool,
) -> Vec<BlockKey> {
    let per_block = tokens_per_block.max(1) as usize;
    let mut parent = parent;
    let mut keys = Vec::with_capacity(tokens.len() / per_block + 1);
    for block in tokens.chunks(per_block) {
        if block.len() < per_block && !partial {
            break;
        }
        let key = token_block_key(ns, parent.as_ref(), block);
        keys.push(key);
        parent = Some(key);
    }
    keys
}

/// Folds an engine's own hash of any width with the namespace.
///
/// # Errors
/// `InvalidArgument` for an empty key or one over [`MAX_OPAQUE_KEY_BYTES`].
pub fn key_from_opaque(ns: &NamespaceId, opaque: &[u8]) -> Result<BlockKey> {
    if opaque.is_empty() || opaque.len() > MAX_OPAQUE_KEY_BYTES {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "keys_from_opaque",
            format!(
                "an opaque key holds {} bytes: pass 1 to {MAX_OPAQUE_KEY_BYTES} bytes a key",
                opaque.len()
            ),
        ));
    }
    let mut message = Message::new(ns);
    message.put(OPAQUE_TAG);
    let width = u32::try_from(opaque.len()).expect("bounded by MAX_OPAQUE_KEY_BYTES");
    message.put(&width.to_le_bytes());
    message.put(opaque);
    Ok(message.key())
}

/// Folds packed engine hashes, all of `width` bytes.
///
/// # Errors
/// `InvalidArgument` where the bytes are not a multiple of the width, or the width is out of range.
pub fn keys_from_opaque(ns: &NamespaceId, packed: &[u8], width: usize) -> Result<Vec<BlockKey>> {
    if width == 0 || !packed.len().is_multiple_of(width) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "keys_from_opaque",
            format!(
                "`packed` holds {} bytes, not a multiple of `width` = {width}: pass \
                 n x width bytes",
                packed.len()
            ),
        ));
    }
    packed.chunks_exact(width).map(|k| key_from_opaque(ns, k)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_hashed_alike_whatever_its_length() {
        let ns = NamespaceId([7; 32]);
        let text: Vec<u8> = (0..5000_u32).map(|at| at.to_le_bytes()[0] ^ 0x5a).collect();
        for len in [0, 1, 12, 1023, 1024, 1025, 2047, 2048, 2049, 5000] {
            for part in [4, 32, 700, 1024, 1025, 5000] {
                let mut message = Message::new(&ns);
                text[..len].chunks(part).for_each(|some| message.put(some));
                let whole = blake3::keyed_hash(&ns.0, &text[..len]);
                assert_eq!(message.key().0, *whole.as_bytes(), "{len} bytes by {part}");
            }
        }
    }
}
