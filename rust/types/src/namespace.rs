//! Namespaces: everything that makes stored bytes incompatible, digested into 32 bytes.

use crate::error::{Error, ErrorKind, Result};
use crate::layout::KvLayout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Digest of a [`NamespaceSpec`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub [u8; 32]);

impl std::fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NamespaceId({})", crate::hex(&self.0[..8]))
    }
}

/// Longest text field, in bytes.
pub const MAX_FIELD_BYTES: usize = 4096;
/// Most rope parameters.
pub const MAX_ROPE_ENTRIES: usize = 64;

/// Everything that makes the KV bytes of two requests incompatible.
///
/// Changing any field makes everything miss. The tenant that pays for the bytes is not among them:
/// a tenant accounts, a salt isolates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceSpec {
    /// Model id, such as `HuggingFaceTB/SmolLM2-135M-Instruct`.
    pub model: String,
    /// Fingerprint of the weights (hexadecimal blake3 of the weight files, or a revision).
    pub weights: String,
    /// Type of a stored element, such as `bfloat16`.
    pub kv_dtype: String,
    /// Shape of a block.
    pub layout: KvLayout,
    /// Rotary position parameters as the model's configuration gives them, each value as text.
    #[serde(default)]
    pub rope: BTreeMap<String, String>,
    /// Identity of the LoRA adapter, empty for none.
    #[serde(default)]
    pub lora: String,
    /// Tenant salt: different salts never share bytes.
    #[serde(default)]
    pub salt: String,
    /// The engine's parallel layout, such as `tp=2/rank=0`.
    #[serde(default)]
    pub parallel: String,
    /// The engine, its hash algorithm and its hash seed, where its keys depend on them.
    #[serde(default)]
    pub engine: String,
}

impl NamespaceSpec {
    /// A specification with the mandatory fields; the others are empty.
    pub fn new(
        model: impl Into<String>,
        weights: impl Into<String>,
        kv_dtype: impl Into<String>,
        layout: KvLayout,
    ) -> Self {
        Self {
            model: model.into(),
            weights: weights.into(),
            kv_dtype: kv_dtype.into(),
            layout,
            rope: BTreeMap::new(),
            lora: String::new(),
            salt: String::new(),
            parallel: String::new(),
            engine: String::new(),
        }
    }

    /// The digest: blake3 over every field with its name and its length, so that no two
    /// specifications share an encoding.
    ///
    /// # Errors
    /// `InvalidArgument` where a mandatory field is empty or a field is too long.
    pub fn id(&self) -> Result<NamespaceId> {
        self.check()?;
        let mut hasher = blake3::Hasher::new_derive_key("tiered-kv 2026 namespace v1");
        for (name, value) in self.text_fields() {
            put_field(&mut hasher, name, value.as_bytes());
        }
        for (name, value) in &self.rope {
            put_field(&mut hasher, &format!("rope.{name}"), value.as_bytes());
        }
        let mut layout = Vec::with_capacity(8 + 8 * self.layout.slabs());
        layout.extend(self.layout.tokens_per_block().to_le_bytes());
        layout.extend(self.layout.layer_groups().to_le_bytes());
        layout.extend(self.layout.head_groups().to_le_bytes());
        for bytes in self.layout.slab_bytes() {
            layout.extend(bytes.to_le_bytes());
        }
        put_field(&mut hasher, "layout", &layout);
        Ok(NamespaceId(*hasher.finalize().as_bytes()))
    }

    /// Every field by name as text, for people and for comparison; rope parameters are `rope.NAME`,
    /// and of the salt there is only a digest, since whoever knows it shares bytes.
    pub fn fields(&self) -> BTreeMap<String, String> {
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let mut fields: BTreeMap<String, String> =
            self.text_fields().into_iter().map(owned).collect();
        if !self.salt.is_empty() {
            let digest = blake3::derive_key("tiered-kv 2026 salt shown v1", self.salt.as_bytes());
            fields.insert("salt".to_owned(), format!("digest:{}", crate::hex(&digest[..8])));
        }
        fields.extend(self.rope.iter().map(|(k, v)| (format!("rope.{k}"), v.clone())));
        let layout = &self.layout;
        let sizes: Vec<String> = layout.slab_bytes().iter().map(u64::to_string).collect();
        for (name, value) in [
            ("tokens_per_block", layout.tokens_per_block().to_string()),
            ("layer_groups", layout.layer_groups().to_string()),
            ("head_groups", layout.head_groups().to_string()),
            ("slab_bytes", sizes.join(",")),
        ] {
            fields.insert(format!("layout.{name}"), value);
        }
        fields
    }

    fn text_fields(&self) -> [(&'static str, &str); 7] {
        [
            ("model", &self.model),
            ("weights", &self.weights),
            ("kv_dtype", &self.kv_dtype),
            ("lora", &self.lora),
            ("salt", &self.salt),
            ("parallel", &self.parallel),
            ("engine", &self.engine),
        ]
    }

    fn check(&self) -> Result<()> {
        let bad = |field: &str, why: &str| {
            Err(Error::new(ErrorKind::InvalidArgument, "namespace", format!("`{field}` {why}")))
        };
        for (name, value) in self.text_fields() {
            if value.len() > MAX_FIELD_BYTES {
                return bad(name, "is longer than 4096 bytes: pass a digest of it");
            }
        }
        for (name, value) in &self.text_fields()[..3] {
            if value.is_empty() {
                return bad(
                    name,
                    "is empty: it is mandatory, since it decides who may share bytes",
                );
            }
        }
        if self.rope.len() > MAX_ROPE_ENTRIES
            || self.rope.iter().any(|(k, v)| k.len() + v.len() > MAX_FIELD_BYTES)
        {
            return bad("rope", "has over 64 entries or one over 4096 bytes: pass a digest of it");
        }
        Ok(())
    }
}

fn put_field(hasher: &mut blake3::Hasher, name: &str, value: &[u8]) {
    for part in [name.as_bytes(), value] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
}
