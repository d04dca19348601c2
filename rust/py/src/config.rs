//! The configuration on its way between Python's fields and the one schema, which is Rust's.

use crate::errors::{OrRaise, to_py};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use std::collections::HashMap;
use tiered_kv::{Error, ErrorKind, StoreConfig};

fn refused(py: Python<'_>, context: String) -> PyErr {
    to_py(py, &Error::new(ErrorKind::Config, "config", context))
}

/// A field's value as TOML.
fn to_toml(field: &str, value: &Bound<'_, PyAny>) -> PyResult<toml::Value> {
    let py = value.py();
    let wrong = |what: &str| refused(py, format!("`{field}` {what}"));
    if value.is_instance_of::<PyBool>() {
        return Ok(toml::Value::Boolean(value.extract()?));
    }
    if value.is_instance_of::<PyInt>() {
        let number = value.extract().map_err(|_| wrong("is out of range: give less than 2^63"))?;
        return Ok(toml::Value::Integer(number));
    }
    if value.is_instance_of::<PyFloat>() {
        return Ok(toml::Value::Float(value.extract()?));
    }
    let text = |value: &Bound<'_, PyAny>| {
        value.extract().map(toml::Value::String).map_err(|_| wrong("is not UTF-8 text: rename it"))
    };
    if value.is_instance_of::<PyString>() {
        return text(value);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?.map(|item| to_toml(field, &item?));
        return items.collect::<PyResult<Vec<_>>>().map(toml::Value::Array);
    }
    // What is left can only be a path; anything else is refused with its type's name.
    match py.import("os")?.call_method1("fspath", (value,)) {
        Ok(path) if path.is_instance_of::<PyString>() => text(&path),
        _ => Err(wrong(&format!(
            "is of type {}: give a number, text, a truth value or a list of paths",
            value.get_type().name()?
        ))),
    }
}

fn from_toml<'py>(py: Python<'py>, value: &toml::Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        toml::Value::String(text) => text.into_pyobject(py)?.into_any(),
        toml::Value::Integer(number) => number.into_pyobject(py)?.into_any(),
        toml::Value::Float(number) => number.into_pyobject(py)?.into_any(),
        toml::Value::Boolean(truth) => truth.into_pyobject(py)?.to_owned().into_any(),
        toml::Value::Array(items) => {
            let items: PyResult<Vec<_>> = items.iter().map(|item| from_toml(py, item)).collect();
            PyTuple::new(py, items?)?.into_any()
        }
        other => other.to_string().into_pyobject(py)?.into_any(),
    })
}

fn to_dict<'py>(py: Python<'py>, config: &StoreConfig) -> PyResult<Bound<'py, PyDict>> {
    let table = config.to_table().or_raise(py)?;
    let fields = PyDict::new(py);
    for name in StoreConfig::field_names() {
        match table.get(&name) {
            Some(value) => fields.set_item(name, from_toml(py, value)?)?,
            None => fields.set_item(name, py.None())?,
        }
    }
    Ok(fields)
}

/// The configuration that `fields` stand for, with `env` on top; a field that is `None` is absent.
pub(crate) fn read(
    fields: &Bound<'_, PyDict>,
    env: HashMap<String, String>,
) -> PyResult<StoreConfig> {
    let mut table = toml::Table::new();
    for (name, value) in fields {
        if !value.is_none() {
            let name: String = name.extract().map_err(|_| {
                let shown = name.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
                refused(name.py(), format!("`{shown}` is no field: give the name as UTF-8 text"))
            })?;
            let value = to_toml(&name, &value)?;
            table.insert(name, value);
        }
    }
    StoreConfig::from_table(table, env).or_raise(fields.py())
}

/// Every field of the configuration with its default; `None` where the default depends on the
/// machine.
#[pyfunction]
pub(crate) fn default_config(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    to_dict(py, &StoreConfig::default())
}

/// Checks fields or TOML text, lets environment variables override them, and fills in the defaults.
#[pyfunction]
#[pyo3(signature = (fields, env=None))]
pub(crate) fn parse_config<'py>(
    py: Python<'py>,
    fields: &Bound<'py, PyAny>,
    env: Option<HashMap<String, String>>,
) -> PyResult<Bound<'py, PyDict>> {
    let env = env.unwrap_or_default();
    let config = match fields.extract::<String>() {
        Ok(text) => StoreConfig::from_toml(&text, env).or_raise(py)?,
        Err(_) => read(fields.cast::<PyDict>()?, env)?,
    };
    to_dict(py, &config)
}
