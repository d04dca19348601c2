//! What of the predictor is in use: every ingredient can be left out, to see what it is worth.

/// Ingredients of [`super::Beta`].
#[derive(Clone, Copy, Debug)]
pub struct BetaOptions {
    /// The name under which results are reported.
    pub name: &'static str,
    /// Hazards by age and the Gittins index; else the chance that a block of the pair is reused.
    pub by_age: bool,
    /// What is known of a block outlives its eviction.
    pub ghosts: bool,
    /// Only blocks without a resident child leave.
    pub leaf_first: bool,
    /// All private blocks of a request share transition and level.
    pub session_state: bool,
    /// Cells are split by the average gap.
    pub gap: bool,
    /// Cells are split by the request score.
    pub score: bool,
    /// Blocks that a session did not come back to get a transition of their own.
    pub left_behind: bool,
    /// How much longer than its known prefix a request's predecessor may have been, in blocks,
    /// where a session is inferred.
    pub infer_slack: u64,
    /// A request goes on with a session that is inferred only if its prompt has room for the
    /// session's last prompt and output.
    pub infer_growth: bool,
    /// Gaps that are expected split the cells of private blocks, not those that were.
    pub pace: bool,
    /// Private blocks age in units of the gap that is expected.
    pub scale: bool,
    /// The request score is fitted as one, over more features.
    pub fit: bool,
    /// Where a cache by recency does better, it does as that one.
    pub guard: bool,
    /// Candidates looked at in one draw; where there are no more, all are looked at.
    pub draw: usize,
    /// Weight of a new gap in the moving averages.
    pub gap_weight: f32,
    /// Strength of the prior that a cell takes from its parent, in observations.
    pub strength: f64,
    /// Requests after which counts weigh half.
    pub half_life: f32,
}

impl BetaOptions {
    /// The policy as specified.
    pub const SPEC: Self = Self {
        name: "beta-spec",
        by_age: true,
        ghosts: true,
        leaf_first: true,
        session_state: true,
        gap: true,
        score: true,
        left_behind: true,
        infer_slack: 1,
        infer_growth: false,
        pace: false,
        scale: false,
        fit: false,
        guard: false,
        draw: 64,
        gap_weight: 0.3,
        strength: 40.0,
        half_life: 8000.0,
    };

    /// The default: all that was found to be better than [`Self::SPEC`].
    pub const DEFAULT: Self = Self {
        name: "beta",
        infer_growth: true,
        pace: true,
        scale: true,
        fit: true,
        draw: 256,
        ..Self::SPEC
    };

    /// From [`Self::SPEC`] to [`Self::DEFAULT`], one change more in each.
    pub fn steps() -> [Self; 5] {
        let draw = Self { name: "beta-draw-256", draw: 256, ..Self::SPEC };
        let growth = Self { name: "beta-growth", infer_growth: true, ..draw };
        let fit = Self { name: "beta-fit", fit: true, ..growth };
        let pace = Self { name: "beta-pace", pace: true, ..fit };
        [draw, growth, fit, pace, Self::DEFAULT]
    }

    /// [`Self::DEFAULT`] with the regret guard.
    pub const GUARDED: Self = Self { name: "beta-guard", guard: true, ..Self::DEFAULT };

    /// What was tried besides to do better, one change to [`Self::SPEC`] in each.
    pub fn tried() -> [Self; 7] {
        let spec = Self::SPEC;
        [
            Self { name: "beta-draw-1024", draw: 1024, ..spec },
            Self { name: "beta-slack-0", infer_slack: 0, ..spec },
            Self { name: "beta-gap-0.5", gap_weight: 0.5, ..spec },
            Self { name: "beta-prior-20", strength: 20.0, ..spec },
            Self { name: "beta-prior-80", strength: 80.0, ..spec },
            Self { name: "beta-half-20000", half_life: 20_000.0, ..spec },
            Self { name: "beta-no-left", left_behind: false, ..spec },
        ]
    }

    /// Whether gaps are expected.
    pub(crate) fn paces(&self) -> bool {
        self.pace || self.scale
    }

    /// The options of this name, if there are any.
    pub fn named(name: &str) -> Option<Self> {
        let all = Self::ablation()
            .into_iter()
            .chain([Self::GUARDED])
            .chain(Self::steps())
            .chain(Self::tried());
        all.into_iter().find(|options| options.name == name)
    }

    /// The ablation: one ingredient more in each, up to [`Self::SPEC`].
    pub fn ablation() -> [Self; 7] {
        let class = Self {
            name: "beta-class",
            by_age: false,
            ghosts: false,
            leaf_first: false,
            session_state: false,
            gap: false,
            score: false,
            ..Self::SPEC
        };
        let age = Self { name: "beta-age", by_age: true, ..class };
        let ghosts = Self { name: "beta-ghosts", ghosts: true, ..age };
        let leaf = Self { name: "beta-leaf", leaf_first: true, ..ghosts };
        let session = Self { name: "beta-session", session_state: true, ..leaf };
        let gap = Self { name: "beta-gap", gap: true, ..session };
        [class, age, ghosts, leaf, session, gap, Self::SPEC]
    }
}
