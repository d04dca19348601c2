//! Keys: packed ones, those of tokens, and engines' own.

use tiered_kv_types::key::{MAX_OPAQUE_KEY_BYTES, keys_from_opaque, keys_from_tokens};
use tiered_kv_types::{BlockKey, KEY_BYTES, NamespaceId};

/// Keys pack and unpack to the same; a changed token or byte changes every key from there on.
pub(crate) fn keys(data: &[u8]) {
    if let Ok(keys) = BlockKey::unpack(data) {
        assert_eq!(BlockKey::pack(&keys), data);
    } else {
        assert!(!data.len().is_multiple_of(KEY_BYTES));
    }
    let Some((head, rest)) = data.split_first_chunk::<3>() else { return };
    let ns = NamespaceId([head[2]; 32]);
    let width = usize::from(u16::from_le_bytes([head[0], head[1]]));
    match keys_from_opaque(&ns, rest, width) {
        Ok(keys) => {
            assert!(rest.is_empty() || (1..=MAX_OPAQUE_KEY_BYTES).contains(&width));
            assert_eq!(keys.len() * width, rest.len());
        }
        Err(_) => assert!(width == 0 || width > MAX_OPAQUE_KEY_BYTES || rest.len() % width != 0),
    }
    let tokens: Vec<u32> =
        rest.as_chunks::<4>().0.iter().map(|token| u32::from_le_bytes(*token)).collect();
    let per_block = u32::from(head[0] % 9);
    let all = keys_from_tokens(&ns, None, &tokens, per_block, head[1] & 1 != 0);
    assert!(all.len() <= tokens.len());
    if let Some(last) = tokens.len().checked_sub(1) {
        let mut changed = tokens.clone();
        let at = usize::from(head[1]) % (last + 1);
        changed[at] ^= 1 << (head[0] % 32);
        let others = keys_from_tokens(&ns, None, &changed, per_block, head[1] & 1 != 0);
        let same = all.iter().zip(&others).take_while(|(one, other)| one == other).count();
        assert_eq!(same, (at / per_block.max(1) as usize).min(all.len()), "from its block on");
    }
}
