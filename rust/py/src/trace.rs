//! Traces and their replay. The work is done on threads of its own: the calling one looks for
//! signals and tells how far it is.

use crate::args;
use crate::errors::{invalid, to_py};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::io::{self, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tiered_kv::{Error, ErrorKind};
use tiered_kv_policy::beta::{PairPosterior, ages};
use tiered_kv_replay::{
    ABLATION, ALL, KINDS, Options, Outcome, Prefetched, Progress, ReadError, STEPS, TRIED, Unknown,
    capacity_blocks, generate, jobs, known, learned, nodes_json, predictor, prefetch_rows, read,
    read_path, run, write,
};

const OP: &str = "replay";
/// How often signals are looked for, and how far it is is told.
const TICK: Duration = Duration::from_millis(100);
/// Most capacities and seeds of a call, and threads.
const MAX_CAPACITIES: usize = 1000;
const MAX_SEEDS: usize = 1000;
const MAX_THREADS: usize = 256;
/// Most requests that are made up.
const MAX_GENERATED: usize = 1_000_000;

/// A trace of requests in memory.
#[pyclass(frozen, module = "tiered_kv._core")]
pub(crate) struct Trace {
    inner: Arc<tiered_kv_replay::Trace>,
}

/// Does `work` on a thread of its own. A signal, or an exception of `told`, ends it soon.
fn apart<T: Send + 'static>(
    py: Python<'_>,
    told: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Progress) -> T + Send + 'static,
) -> PyResult<T> {
    let progress = Arc::new(Progress::default());
    let (sender, receiver) = mpsc::channel();
    let shared = Arc::clone(&progress);
    let spawned = thread::Builder::new().name("tkv-replay".to_owned()).spawn(move || {
        // Nobody listens any more after an interrupt.
        let _ = sender.send(work(&shared));
    });
    spawned.map_err(|error| {
        to_py(py, &Error::new(ErrorKind::NoSpace, OP, format!("no thread could be had: {error}")))
    })?;
    let receiver = Mutex::new(receiver);
    loop {
        match py.detach(|| receiver.lock().recv_timeout(TICK)) {
            Ok(found) => return Ok(found),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(to_py(py, &Error::new(ErrorKind::Internal, OP, "its thread ended")));
            }
        }
        let told = || told.map_or(Ok(()), |told| told.call1((progress.requests(),)).map(drop));
        if let Err(error) = py.check_signals().and_then(|()| told()) {
            progress.stop();
            return Err(error);
        }
    }
}

fn system_error(py: Python<'_>, op: &'static str, path: &str, kind: io::ErrorKind) -> PyErr {
    let (kind, what) = match kind {
        io::ErrorKind::NotFound => (ErrorKind::NotFound, "it is not there: check the path".into()),
        io::ErrorKind::PermissionDenied => {
            (ErrorKind::Permission, "the system refuses it: check the permissions".into())
        }
        other => (ErrorKind::Io, format!("{other}: check that it is a file and undamaged")),
    };
    to_py(py, &Error::new(kind, op, format!("`trace` {path}: {what}")))
}

fn read_error(py: Python<'_>, path: &str, error: &ReadError) -> PyErr {
    match error.io {
        Some(kind) if error.line == 0 => system_error(py, "trace", path, kind),
        _ => {
            let remedy = "give one JSON object a line, as docs/replay.md shows";
            invalid(py, "trace", format!("`trace` {path}: {error}: {remedy}"))
        }
    }
}

fn capacity(value: &Bound<'_, PyAny>, field: &str) -> PyResult<f64> {
    match value.extract::<f64>() {
        Ok(pct) if pct > 0.0 && pct <= 100.0 => Ok(pct),
        _ => {
            let shown = value.repr().map_or_else(|_| "that".into(), |text| text.to_string());
            let want = "give a percentage of the unique blocks, above 0 and at most 100";
            Err(invalid(value.py(), OP, format!("`{field}` is {shown}: {want}")))
        }
    }
}

fn capacities(values: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    let py = values.py();
    let wrong =
        || invalid(py, OP, "`capacities` is no sequence of 1 to 1000 percentages: give one");
    let mut found = Vec::new();
    for value in values.try_iter().map_err(|_| wrong())? {
        found.push(capacity(&value?, "capacities")?);
        if found.len() > MAX_CAPACITIES {
            return Err(wrong());
        }
    }
    if found.is_empty() { Err(wrong()) } else { Ok(found) }
}

/// Runs at a time: as asked, or as many as there are processors.
fn threads(asked: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
    match asked {
        Some(threads) => args::within(OP, "threads", threads, 1..=MAX_THREADS),
        None => Ok(thread::available_parallelism().map_or(1, Into::into).min(MAX_THREADS)),
    }
}

fn policies(py: Python<'_>, names: &[String]) -> PyResult<Vec<&'static str>> {
    let mut found: Vec<&'static str> = Vec::new();
    for name in names {
        let more: Vec<&'static str> = match name.as_str() {
            "all" => ALL.to_vec(),
            "ablation" => ABLATION.to_vec(),
            "steps" => STEPS.to_vec(),
            "tried" => TRIED.to_vec(),
            other => vec![known(other).ok_or_else(|| {
                let shown: String = other.chars().take(60).collect();
                invalid(py, OP, Unknown(shown).to_string())
            })?],
        };
        found.extend(more.into_iter().filter(|name| !found.contains(name)).collect::<Vec<_>>());
    }
    if found.is_empty() {
        return Err(invalid(py, OP, "`policies` is empty: name one, or give all"));
    }
    Ok(found)
}

fn outcome<'py>(py: Python<'py>, found: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("capacity_pct", found.capacity_pct)?;
    row.set_item("capacity_blocks", found.capacity_blocks)?;
    row.set_item("policy", found.policy)?;
    row.set_item("seed", found.seed)?;
    row.set_item("hit_pct", found.hit_pct)?;
    row.set_item("cost_saved_pct", found.cost_saved_pct)?;
    row.set_item("ns_per_block", found.ns_per_block)?;
    Ok(row)
}

fn prefetched<'py>(py: Python<'py>, found: &Prefetched) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("fast_pct", found.fast_pct)?;
    row.set_item("slow_pct", found.slow_pct)?;
    row.set_item("window", found.window)?;
    row.set_item("budget_pct", found.budget_pct)?;
    row.set_item("fast_hit_pct", found.fast_hit_pct)?;
    row.set_item("slow_hit_pct", found.slow_hit_pct)?;
    row.set_item("covered_pct", found.covered_pct)?;
    row.set_item("moved_blocks", found.moved_blocks)?;
    row.set_item("waste_pct", found.waste_pct)?;
    Ok(row)
}

fn pair<'py>(py: Python<'py>, found: &PairPosterior) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("block_type", found.block_type)?;
    row.set_item("transition", found.transition)?;
    row.set_item("mean", found.mean)?;
    row.set_item("low", found.interval.0)?;
    row.set_item("high", found.interval.1)?;
    row.set_item("lives", found.lives)?;
    row.set_item("reuses", found.reuses)?;
    row.set_item("hazard", found.hazard.to_vec())?;
    Ok(row)
}

#[pymethods]
impl Trace {
    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let shown = path.display().to_string();
        let inner = apart(py, None, move |_| read_path(&path))?;
        let inner = Arc::new(inner.map_err(|error| read_error(py, &shown, &error))?);
        Ok(Self { inner })
    }

    #[staticmethod]
    fn parse(py: Python<'_>, data: &Bound<'_, PyBytes>, name: String) -> PyResult<Self> {
        let (data, shown) = (data.as_bytes().to_vec(), name.clone());
        let inner = apart(py, None, move |_| read(BufReader::new(&data[..]), &name))?;
        let inner = Arc::new(inner.map_err(|error| read_error(py, &shown, &error))?);
        Ok(Self { inner })
    }

    #[staticmethod]
    fn generate(
        py: Python<'_>,
        kind: String,
        requests: &Bound<'_, PyAny>,
        seed: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let requests = args::within("trace", "requests", requests, 1..=MAX_GENERATED)?;
        let seed = args::whole::<u64>("trace", "seed", seed)?;
        if !KINDS.iter().any(|(name, _)| *name == kind) {
            let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
            let shown: String = kind.chars().take(60).collect();
            let context = format!("`kind` is {shown:?}: give one of {}", names.join(", "));
            return Err(invalid(py, "trace", context));
        }
        let inner = apart(py, None, move |_| generate(&kind, requests, seed))?;
        Ok(Self { inner: Arc::new(inner.expect("the kind is one of those that there are")) })
    }

    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let (trace, shown) = (Arc::clone(&self.inner), path.display().to_string());
        let written = apart(py, None, move |_| -> io::Result<()> {
            let packed = path.extension().is_some_and(|end| end == "gz");
            let mut options = std::fs::OpenOptions::new();
            let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path)?;
            write(&trace, file, packed)
        })?;
        written.map_err(|error| system_error(py, "trace", &shown, error.kind()))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    #[getter]
    fn format(&self) -> &'static str {
        self.inner.format.name()
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.inner.block_tokens
    }

    #[getter]
    fn requests(&self) -> usize {
        self.inner.entries().len()
    }

    #[getter]
    fn sessions(&self) -> usize {
        self.inner.sessions()
    }

    #[getter]
    fn block_accesses(&self) -> u64 {
        self.inner.block_accesses
    }

    #[getter]
    fn unique_blocks(&self) -> usize {
        self.inner.unique_blocks
    }

    #[getter]
    fn unchained(&self) -> u64 {
        self.inner.unchained
    }

    #[getter]
    fn has_outputs(&self) -> bool {
        self.inner.has_outputs()
    }

    #[getter]
    fn seconds(&self) -> f64 {
        let entries = self.inner.entries();
        let (first, last) = (entries.first(), entries.last());
        first.zip(last).map_or(0.0, |(first, last)| (last.now - first.now) as f64 * 1e-9)
    }

    /// Tokens of all prompts, and of all outputs.
    fn tokens(&self) -> (u64, u64) {
        let each = self.inner.entries().iter();
        each.fold((0, 0), |(input, output), entry| {
            (input + u64::from(entry.input_tokens), output + u64::from(entry.output_tokens))
        })
    }

    fn ceiling_pct(&self, outputs: bool) -> f64 {
        self.inner.ceiling_pct(outputs)
    }

    #[pyo3(signature = (
        capacities, policies, *, seeds, outputs, labels, threads=None, progress=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "all but two are keywords in Python")]
    fn replay<'py>(
        &self,
        py: Python<'py>,
        capacities: &Bound<'py, PyAny>,
        policies: Vec<String>,
        seeds: &Bound<'py, PyAny>,
        outputs: bool,
        labels: bool,
        threads: Option<&Bound<'py, PyAny>>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let capacities = self::capacities(capacities)?;
        let policies = self::policies(py, &policies)?;
        let seeds = args::within(OP, "seeds", seeds, 1..=MAX_SEEDS)?;
        let threads = self::threads(threads)?;
        let options = Options { outputs, no_labels: !labels };
        let trace = Arc::clone(&self.inner);
        let found = apart(py, progress, move |progress| {
            let jobs = jobs(&capacities, &policies, seeds as u64);
            run(&trace, options, &jobs, threads, progress, |_| ())
        })?;
        found.unwrap_or_default().iter().map(|one| outcome(py, one)).collect()
    }

    #[pyo3(signature = (fast, slow, *, outputs, labels, progress=None))]
    fn prefetch<'py>(
        &self,
        py: Python<'py>,
        fast: &Bound<'py, PyAny>,
        slow: &Bound<'py, PyAny>,
        outputs: bool,
        labels: bool,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let tiers = (capacity(fast, "fast")?, capacity(slow, "slow")?);
        if tiers.0 > tiers.1 {
            let context = "`slow` is less than `fast`: the slow tier holds what the fast one does";
            return Err(invalid(py, OP, context));
        }
        let options = Options { outputs, no_labels: !labels };
        let trace = Arc::clone(&self.inner);
        let found =
            apart(py, progress, move |progress| prefetch_rows(&trace, options, tiers, progress))?;
        found.unwrap_or_default().iter().map(|one| prefetched(py, one)).collect()
    }

    #[pyo3(signature = (specs, *, outputs, labels, threads=None, progress=None))]
    fn nodes<'py>(
        &self,
        py: Python<'py>,
        specs: String,
        outputs: bool,
        labels: bool,
        threads: Option<&Bound<'py, PyAny>>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<String> {
        let threads = self::threads(threads)?;
        let options = Options { outputs, no_labels: !labels };
        let trace = Arc::clone(&self.inner);
        let found = apart(py, progress, move |progress| {
            nodes_json(&trace, options, &specs, threads, progress)
        })?;
        let found = found.map_err(|fault| invalid(py, OP, fault))?;
        Ok(found.expect("only an exception stops it, which was raised"))
    }

    #[pyo3(signature = (capacity, policy, *, outputs, labels, progress=None))]
    #[allow(clippy::too_many_arguments, reason = "all but two are keywords in Python")]
    fn posterior<'py>(
        &self,
        py: Python<'py>,
        capacity: &Bound<'py, PyAny>,
        policy: &str,
        outputs: bool,
        labels: bool,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let pct = self::capacity(capacity, "capacity")?;
        let predictor = predictor(policy).filter(|_| known(policy).is_some()).ok_or_else(|| {
            let shown: String = policy.chars().take(60).collect();
            invalid(
                py,
                OP,
                format!("`policy` is {shown:?}: only beta and its variants learn pairs"),
            )
        })?;
        let options = Options { outputs, no_labels: !labels };
        let trace = Arc::clone(&self.inner);
        let blocks = capacity_blocks(&trace, pct);
        let found = apart(py, progress, move |progress| {
            let beta = learned(&trace, options, predictor, blocks, progress);
            beta.map(|beta| beta.posterior().to_vec())
        })?;
        let all = PyDict::new(py);
        all.set_item("capacity_pct", pct)?;
        all.set_item("capacity_blocks", blocks)?;
        all.set_item("policy", predictor.name)?;
        all.set_item("age_starts_s", ages().to_vec())?;
        let pairs: PyResult<Vec<_>> =
            found.unwrap_or_default().iter().map(|one| pair(py, one)).collect();
        all.set_item("pairs", pairs?)?;
        Ok(all)
    }
}

/// Names of policies: those that "all", "ablation", "steps" and "tried" stand for.
#[pyfunction]
pub(crate) fn replay_policies(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let groups = PyDict::new(py);
    groups.set_item("all", ALL)?;
    groups.set_item("ablation", ABLATION)?;
    groups.set_item("steps", STEPS)?;
    groups.set_item("tried", TRIED)?;
    Ok(groups)
}

/// Kinds of traces that are made up, and what each is about.
#[pyfunction]
pub(crate) fn trace_kinds(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let kinds = PyDict::new(py);
    for (kind, about) in KINDS {
        kinds.set_item(kind, about)?;
    }
    Ok(kinds)
}
