//! The same targets, guided by coverage: `TIERED_KV_FUZZ_TARGET` names the one.
#![no_main]
#![expect(unsafe_code, reason = "libFuzzer's macro exports a C function")]

use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use tiered_kv_fuzz::{Target, target};

fn chosen() -> &'static Target {
    static CHOSEN: OnceLock<&'static Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("TIERED_KV_FUZZ_TARGET").unwrap_or_default();
        target(&name).expect("TIERED_KV_FUZZ_TARGET names a target")
    })
}

fuzz_target!(|data: &[u8]| (chosen().1)(data));
