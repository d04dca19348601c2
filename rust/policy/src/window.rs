//! How far to prefetch along a chain: as far as the budget of waste allows.

/// Least and most blocks of a window.
const LEAST: usize = 1;
const MOST: usize = 256;
/// What rounds fade by.
const FADE: f64 = 0.999;
/// Blocks moved after which the width is thought over.
const ROUND: u64 = 256;

/// A window forward from the position that a request reads, in blocks.
///
/// Of every 256 blocks that are moved, on demand or ahead of it, a part may be moved for
/// nothing: the window is doubled while less than a quarter of that is, and less than half of it in
/// the long run, and halved near the bound.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    width: usize,
    budget: Option<f64>,
    moved: u64,
    wasted: u64,
    /// Moved and wasted in the rounds before, which fade.
    before: (f64, f64),
}

impl Window {
    /// A window of a fixed width, which may be zero.
    pub fn fixed(width: usize) -> Self {
        Self { width, budget: None, moved: 0, wasted: 0, before: (0.0, 0.0) }
    }

    /// A window that adapts to a budget: the part of the blocks moved that may be wasted.
    pub fn within(budget: f64) -> Self {
        Self { width: 16, budget: Some(budget), moved: 0, wasted: 0, before: (0.0, 0.0) }
    }

    /// Blocks to be kept moved ahead of the position.
    pub fn width(&self) -> usize {
        self.width
    }

    /// So many blocks were moved, ahead or on demand; so many of them the request did not read.
    pub fn told(&mut self, moved: usize, wasted: usize) {
        self.moved += moved as u64;
        self.wasted += wasted as u64;
        let Some(budget) = self.budget.filter(|_| self.moved >= ROUND) else { return };
        let part = self.wasted as f64 / self.moved as f64;
        self.before.0 = self.before.0 * FADE + self.moved as f64;
        self.before.1 = self.before.1 * FADE + self.wasted as f64;
        let so_far = self.before.1 / self.before.0;
        if part > 0.9 * budget || so_far > 0.9 * budget {
            self.width = (self.width / 2).max(LEAST);
        } else if part < budget / 4.0 && so_far < budget / 2.0 {
            self.width = (self.width * 2).min(MOST);
        }
        (self.moved, self.wasted) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_as_wide_as_its_budget_allows() {
        // What is read ends at random, so that wider windows waste more: about half their width of
        // each 100 blocks.
        for (budget, widths) in [(0.02, 1..=4), (0.1, 4..=16), (0.9, 64..=64)] {
            let mut window = Window::within(budget);
            let mut seen = Vec::new();
            for _ in 0..400 {
                window.told(100 + window.width() / 2, window.width() / 2);
                seen.push(window.width());
            }
            assert!(seen[100..].iter().all(|width| widths.contains(width)), "{budget}: {seen:?}");
        }
    }

    #[test]
    fn a_fixed_window_stays_as_it_is() {
        let mut window = Window::fixed(7);
        window.told(10_000, 10_000);
        assert_eq!(window.width(), 7);
    }
}
