//! DLPack capsules of leases: one row of bytes, read-only and versioned, or a copy.
//!
//! The structures are those of the DLPack standard, version 1.0.

use crate::leases::Lease;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use tiered_kv::io_seams::AlignedBuf;

/// Host memory, as `__dlpack_device__` says it.
pub(crate) const HOST: (i32, i32) = (1, 0);

const UNSIGNED: u8 = 1;
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
const VERSIONED: &CStr = c"dltensor_versioned";
const LEGACY: &CStr = c"dltensor";

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: (i32, i32),
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

#[repr(C)]
struct ManagedLegacy {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedLegacy)>,
}

/// What a tensor's memory belongs to.
enum Memory {
    Pinned(Arc<tiered_kv::Lease>),
    Copied(AlignedBuf),
}

/// Owns all that a tensor points to; `context` is its address.
struct Context {
    shape: i64,
    stride: i64,
    memory: Memory,
}

impl Context {
    fn boxed(memory: Memory, len: usize) -> Box<Self> {
        let shape = i64::try_from(len).expect("a slab is at most 4 GiB");
        Box::new(Self { shape, stride: 1, memory })
    }

    fn tensor(&mut self, slab: usize) -> DlTensor {
        let data = match &mut self.memory {
            // Flagged as read-only; the pages are, whatever a consumer does.
            Memory::Pinned(lease) => lease.slab(slab).as_ptr().cast_mut(),
            Memory::Copied(buf) => buf.as_mut_slice().as_mut_ptr(),
        };
        DlTensor {
            data: data.cast(),
            device: HOST,
            ndim: 1,
            code: UNSIGNED,
            bits: 8,
            lanes: 1,
            shape: &raw mut self.shape,
            strides: &raw mut self.stride,
            byte_offset: 0,
        }
    }
}

/// The capsule that `__dlpack__` returns.
///
/// A consumer that asks for no version cannot be told that memory is read-only, so it gets a copy
/// or an error, as the standard says.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    lease: &Lease,
    max_version: Option<(u32, u32)>,
    copy: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let versioned = max_version.is_some_and(|(major, _)| major >= 1);
    if !versioned && !copy {
        return Err(PyBufferError::new_err(
            "a lease is read-only, which DLPack before 1.0 cannot say: pass copy=True, or use a \
             library that asks for max_version (numpy 2.1, torch 2.9 or newer)",
        ));
    }
    let bytes = lease.lease.slab(lease.slab);
    let memory = if copy {
        let copied = py.detach(|| {
            let mut buf = AlignedBuf::new(bytes.len().next_multiple_of(4096))?;
            buf.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            Ok(buf)
        });
        Memory::Copied(copied.map_err(|error| crate::errors::to_py(py, &error))?)
    } else {
        Memory::Pinned(lease.lease.clone())
    };
    let mut context = Context::boxed(memory, bytes.len());
    let tensor = context.tensor(lease.slab);
    let flags = if copy { IS_COPIED } else { READ_ONLY };
    let context = Box::into_raw(context).cast();
    if versioned {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
        let managed = ManagedVersioned { major: 1, minor: 0, context, deleter, flags, tensor };
        wrap(py, Box::into_raw(Box::new(managed)).cast(), VERSIONED, drop_versioned)
    } else {
        let deleter = Some(delete_legacy as unsafe extern "C" fn(_));
        let managed = ManagedLegacy { tensor, context, deleter };
        wrap(py, Box::into_raw(Box::new(managed)).cast(), LEGACY, drop_legacy)
    }
}

fn wrap<'py>(
    py: Python<'py>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: ffi::PyCapsule_Destructor,
) -> PyResult<Bound<'py, PyAny>> {
    let managed = NonNull::new(managed).expect("a box has an address");
    // SAFETY: `managed` points to the structure that `name` stands for; the destructor frees it
    // unless a consumer has renamed the capsule and with that taken it over.
    let capsule =
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, managed, name, Some(destructor)) }?;
    Ok(capsule.into_any())
}

/// # Safety
/// `managed` came from `capsule` and is passed once.
unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: both were made by `Box::into_raw` in `capsule`, and the standard calls a deleter
    // once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Context>()));
    }
}

/// # Safety
/// As for `delete_versioned`.
unsafe extern "C" fn delete_legacy(managed: *mut ManagedLegacy) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Context>()));
    }
}

/// The tensor of a capsule that nobody has taken over, or null.
///
/// # Safety
/// `capsule` is the capsule being destroyed.
unsafe fn unused(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: the interpreter passes the live capsule and holds the GIL; the name is asked for
    // first, so that no error is set.
    unsafe {
        match ffi::PyCapsule_IsValid(capsule, name.as_ptr()) {
            1 => ffi::PyCapsule_GetPointer(capsule, name.as_ptr()),
            _ => std::ptr::null_mut(),
        }
    }
}

/// # Safety
/// Called by the interpreter for a capsule of `capsule`.
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule still of this name owns its structure.
    unsafe {
        let managed = unused(capsule, VERSIONED);
        if !managed.is_null() {
            delete_versioned(managed.cast());
        }
    }
}

/// # Safety
/// Called by the interpreter for a capsule of `capsule`.
unsafe extern "C" fn drop_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_versioned`.
    unsafe {
        let managed = unused(capsule, LEGACY);
        if !managed.is_null() {
            delete_legacy(managed.cast());
        }
    }
}
