//! The slab grid of a block: layer groups x head groups, with bytes for each rectangle.

use crate::error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Most slabs a block can have: residency is one bit a slab in a `u64`.
pub const MAX_SLABS: usize = 64;

/// Largest block accepted, in bytes (4 GiB); a slot of it must fit in a segment as well.
pub const MAX_BLOCK_BYTES: u64 = 4 << 30;

/// Shape of one block: tokens, grid, and bytes of each slab.
///
/// A slab is one rectangle of the grid and the unit of residency, of checksums and of transfer. In
/// a caller's buffer the slabs of a block lie one behind the other, layer group by layer group,
/// head group by head group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    tokens_per_block: u32,
    layer_groups: u16,
    head_groups: u16,
    slab_bytes: Vec<u64>,
}

fn bad(context: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, "layout", context)
}

impl KvLayout {
    /// The default grid of 1 x 1: a block is one slab of `block_bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` where a number is zero or over its limit.
    pub fn uniform(tokens_per_block: u32, block_bytes: u64) -> Result<Self> {
        Self::grid(tokens_per_block, 1, 1, vec![block_bytes])
    }

    /// A grid of `layer_groups` x `head_groups`; `slab_bytes` is row-major, one row a layer group.
    ///
    /// # Errors
    /// `InvalidArgument` where a number is zero, the grid has over 64 slabs, or the sizes
    /// do not match.
    pub fn grid(
        tokens_per_block: u32,
        layer_groups: u16,
        head_groups: u16,
        slab_bytes: Vec<u64>,
    ) -> Result<Self> {
        if tokens_per_block == 0 {
            return Err(bad("`tokens_per_block` is 0: give at least 1".into()));
        }
        let slabs = usize::from(layer_groups) * usize::from(head_groups);
        if slabs == 0 || slabs > MAX_SLABS {
            return Err(bad(format!(
                "`layer_groups` x `head_groups` is {slabs}: a block has 1 to {MAX_SLABS} slabs"
            )));
        }
        if slab_bytes.len() != slabs {
            return Err(bad(format!(
                "`slab_bytes` has {} entries for a grid of {slabs} slabs: give one a slab",
                slab_bytes.len()
            )));
        }
        if slab_bytes.contains(&0) {
            return Err(bad("`slab_bytes` holds a 0: every slab has at least one byte".into()));
        }
        let total = slab_bytes.iter().try_fold(0u64, |sum, b| sum.checked_add(*b));
        match total {
            Some(total) if total <= MAX_BLOCK_BYTES => {}
            _ => {
                return Err(bad(format!(
                    "the block is larger than {MAX_BLOCK_BYTES} bytes: use fewer tokens a block"
                )));
            }
        }
        Ok(Self { tokens_per_block, layer_groups, head_groups, slab_bytes })
    }

    /// Tokens in a full block.
    pub fn tokens_per_block(&self) -> u32 {
        self.tokens_per_block
    }

    /// Rows of the grid.
    pub fn layer_groups(&self) -> u16 {
        self.layer_groups
    }

    /// Columns of the grid.
    pub fn head_groups(&self) -> u16 {
        self.head_groups
    }

    /// Bytes of each slab, row-major.
    pub fn slab_bytes(&self) -> &[u64] {
        &self.slab_bytes
    }

    /// Number of slabs in a block.
    pub fn slabs(&self) -> usize {
        self.slab_bytes.len()
    }

    /// Bytes of a whole block.
    pub fn block_bytes(&self) -> u64 {
        self.slab_bytes.iter().sum()
    }

    /// Grid coordinate (layer group, head group) of slab `index`.
    pub fn coordinate(&self, index: usize) -> (u16, u16) {
        coordinate(self.head_groups, index)
    }

    /// The mask with one bit for every slab of a block.
    pub fn full_mask(&self) -> u64 {
        full_mask(self.slabs())
    }
}

/// Grid coordinate (layer group, head group) of slab `index` in a grid of `head_groups` columns.
pub fn coordinate(head_groups: u16, index: usize) -> (u16, u16) {
    let columns = usize::from(head_groups);
    let row = u16::try_from(index / columns).expect("at most 64 slabs");
    let column = u16::try_from(index % columns).expect("at most 64 slabs");
    (row, column)
}

/// The mask with one bit for each of `slabs` slabs.
pub fn full_mask(slabs: usize) -> u64 {
    if slabs >= MAX_SLABS { u64::MAX } else { (1 << slabs) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_knows_its_slabs() {
        let layout = KvLayout::grid(16, 2, 3, vec![1, 2, 3, 4, 5, 6]).expect("valid");
        assert_eq!(layout.block_bytes(), 21);
        assert_eq!(layout.coordinate(5), (1, 2));
        assert_eq!(layout.full_mask(), 0b11_1111);
        assert_eq!(KvLayout::grid(1, 8, 8, vec![1; 64]).expect("valid").full_mask(), u64::MAX);
    }

    #[test]
    fn bad_grids_name_the_field() {
        for (layout, field) in [
            (KvLayout::uniform(0, 1), "tokens_per_block"),
            (KvLayout::uniform(1, 0), "slab_bytes"),
            (KvLayout::grid(1, 9, 9, vec![1; 81]), "layer_groups"),
            (KvLayout::grid(1, 2, 1, vec![1]), "slab_bytes"),
            (KvLayout::uniform(1, u64::MAX), "block"),
        ] {
            let text = layout.expect_err("must be refused").to_string();
            assert!(text.contains(field), "{text}");
        }
    }
}
