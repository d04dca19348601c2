//! Tenants: who pays for bytes. Records keep a digest of the name, never the name.

/// Digest of a tenant's name; zero for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub [u8; 16]);

impl TenantId {
    /// No tenant.
    pub const NONE: Self = Self([0; 16]);

    /// The digest of a name: the first half of a blake3, so that a record says nothing of it.
    pub fn of(name: &str) -> Self {
        if name.is_empty() {
            return Self::NONE;
        }
        let digest = blake3::derive_key("tiered-kv 2026 tenant v1", name.as_bytes());
        Self(*digest.first_chunk().expect("a digest has 32 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_none_is_zero() {
        assert_eq!(TenantId::of(""), TenantId::NONE);
        assert_ne!(TenantId::of("a"), TenantId::of("b"));
        assert_ne!(TenantId::of("a"), TenantId::NONE);
        // What is on disk already must go on meaning the same.
        assert_eq!(crate::hex(&TenantId::of("acme").0), "7fd4b27e51212652460ea93cb55295e5");
    }
}
