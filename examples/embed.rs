//! The store inside a Rust program: store blocks, restart, load them again.
//!
//! `cargo run --example embed [DIRECTORY]`
#![allow(clippy::print_stdout, reason = "an example prints what it does")]

use tiered_kv::{GetOptions, KvLayout, LookupMode, NamespaceSpec, PutOptions, Store, StoreConfig};

const BLOCK_BYTES: usize = 256 << 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let scratch = std::env::temp_dir().join(format!("tiered-kv-embed-{}", std::process::id()));
    let dir = std::env::args_os().nth(1).map_or(scratch, Into::into);
    let config = StoreConfig {
        dram_capacity: Some(64 << 20),
        nvme_paths: vec![dir.clone()],
        nvme_capacity: 256 << 20,
        ..StoreConfig::default()
    };
    let layout = KvLayout::uniform(16, BLOCK_BYTES as u64)?;
    let spec = NamespaceSpec::new("my-model", "weights-fingerprint", "bfloat16", layout);
    let tokens: Vec<u32> = (0..16 * 8).collect();

    let store = Store::open(&config)?;
    let ns = store.namespace(&spec)?;
    let keys = ns.keys_from_tokens(&tokens, None);
    let blocks: Vec<Vec<u8>> = (0..keys.len()).map(|i| vec![i as u8; BLOCK_BYTES]).collect();
    let put = store.put(&ns, &keys, blocks.clone(), &PutOptions::default())?.wait();
    let leases = store.get(&ns, &keys, &GetOptions::default())?.wait();
    println!("stored {} blocks; {} hits from {:?}", put.stored(), leases.hits(), leases.sources[0]);
    let flushed = store.flush(None)?.wait();
    println!("durable: {}", flushed.all_durable());
    drop(leases);
    store.close();
    drop(store);

    let store = Store::open(&config)?;
    let ns = store.namespace(&spec)?;
    let found = store.lookup(&ns, &keys, LookupMode::Prefix);
    let into = vec![vec![0u8; BLOCK_BYTES]; keys.len()];
    let loaded = store.get_into(&ns, &keys, into, &GetOptions::default())?.wait();
    assert_eq!(loaded.buffers, blocks, "what comes back is what was stored");
    println!(
        "after a restart: {} found, {} loaded from {:?} in a store opened in {:.3} s",
        found.hits,
        loaded.hits(),
        loaded.items[0],
        store.open_times().total_s
    );
    store.close();
    if std::env::args_os().len() < 2 {
        std::fs::remove_dir_all(&dir)?;
    }
    Ok(())
}
