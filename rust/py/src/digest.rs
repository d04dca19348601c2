//! blake3 for fingerprints of weights.

use crate::buffers::Held;
use crate::errors::{OrRaise, invalid};
use pyo3::prelude::*;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use tiered_kv::Error;

const READ_BYTES: usize = 1 << 20;

/// The blake3 digest of a buffer's bytes, in hexadecimal.
#[pyfunction]
pub(crate) fn blake3(py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<String> {
    let held = Held::one("blake3", "buffer", buffer, false)?;
    let digest = py.detach(|| ::blake3::hash(held.bytes()).to_hex().to_string());
    Ok(digest)
}

/// The blake3 digest of a file's contents, in hexadecimal.
#[pyfunction]
pub(crate) fn blake3_file(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    if path.as_os_str().is_empty() {
        return Err(invalid(py, "blake3_file", "`path` is empty: name a file"));
    }
    py.detach(|| {
        digest_file(&path).map_err(|e| {
            Error::from_io("blake3_file", format!("`path`: {} cannot be read", path.display()), e)
        })
    })
    .or_raise(py)
}

fn digest_file(path: &std::path::Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = ::blake3::Hasher::new();
    let mut chunk = vec![0; READ_BYTES];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(hasher.finalize().to_hex().to_string()),
            Ok(n) => hasher.update(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
    }
}
