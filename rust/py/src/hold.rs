//! Holds, and the rules of hybrid lookups.

use crate::args;
use crate::errors::invalid;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tiered_kv::{BlockKey, GroupRule, HoldId};

/// Keeps blocks in some tier until it is released, used by a get, or over time.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Hold {
    /// Guards the core's hold against a release from another thread; gone once released.
    inner: Mutex<Option<tiered_kv::Hold>>,
    id: HoldId,
    /// Number of the store that it was made in.
    store: u64,
    #[pyo3(get)]
    hits: usize,
    #[pyo3(get)]
    held: Vec<bool>,
}

impl Hold {
    pub(crate) fn new(inner: tiered_kv::Hold, store: u64) -> Self {
        let (id, hits, held) = (inner.id(), inner.hits(), inner.held().to_vec());
        Self { inner: Mutex::new(Some(inner)), id, store, hits, held }
    }

    /// The number of a hold that a call on the store of number `store` may use.
    pub(crate) fn id_in(
        py: Python<'_>,
        op: &'static str,
        hold: Option<&Self>,
        store: u64,
    ) -> PyResult<Option<HoldId>> {
        if hold.is_some_and(|hold| hold.store != store) {
            let remedy = "make it in this one with store.hold(ns, keys, ttl)";
            return Err(invalid(py, op, format!("`hold` belongs to another store: {remedy}")));
        }
        Ok(hold.map(|hold| hold.id))
    }
}

#[pymethods]
impl Hold {
    /// Ends the hold; does nothing where it has ended.
    fn release(&self, py: Python<'_>) {
        let inner = self.inner.lock().take();
        // Puts that wait for room may be copied by this thread now.
        py.detach(|| drop(inner));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.release(py);
    }

    fn __repr__(&self) -> String {
        format!("<Hold: {} leading hits of {} keys>", self.hits, self.held.len())
    }
}

/// Groups of layers as (keys, rule) pairs.
pub(crate) fn groups(
    op: &'static str,
    value: &Bound<'_, PyAny>,
) -> PyResult<Vec<(Vec<BlockKey>, GroupRule)>> {
    let wrong = |what: String| {
        invalid(value.py(), op, format!("{what}: pass a sequence of (keys, rule) pairs"))
    };
    let items = value.try_iter().map_err(|_| wrong("`groups` is not a sequence".into()))?;
    let mut groups = Vec::new();
    for (index, item) in items.enumerate() {
        let pair: PyResult<(Bound<'_, PyAny>, Bound<'_, PyAny>)> = item?.extract();
        let (keys, rule) = pair.map_err(|_| wrong(format!("`groups[{index}]` is not a pair")))?;
        let field = format!("groups[{index}]");
        groups.push((args::keys_of(op, &field, &keys)?, group_rule(op, &field, &rule)?));
    }
    Ok(groups)
}

fn group_rule(op: &'static str, field: &str, rule: &Bound<'_, PyAny>) -> PyResult<GroupRule> {
    match rule.extract::<&str>() {
        Ok("all") => return Ok(GroupRule::All),
        Ok("last") => return Ok(GroupRule::Last),
        _ => {}
    }
    if let Ok((name, blocks)) = rule.extract::<(String, usize)>()
        && name == "window"
        && blocks > 0
    {
        return Ok(GroupRule::Window(blocks));
    }
    let shown = rule.repr().map_or_else(|_| "unknown".into(), |text| text.to_string());
    let remedy = "give \"all\", \"last\" or (\"window\", blocks) with 1 block or more";
    Err(invalid(rule.py(), op, format!("`{field}` has the rule {shown}: {remedy}")))
}
