//! The store inside a Rust program: lease blocks, restart, read them into memory of one's own, and
//! delete them.
//!
//! `cargo run --example embed [DIRECTORY]`
#![allow(clippy::print_stdout, reason = "an example prints what it does")]

use tiered_kv::{
    AlignedBuf, Delete, GetOptions, KvLayout, LookupMode, NamespaceSpec, PutOptions, Store,
    StoreConfig,
};

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
    // A lease is a read-only view of the store's own memory, pinned until it is dropped.
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
    println!(
        "after a restart: {} found in a store opened in {:.3} s",
        found.hits,
        store.open_times().total_s
    );
    // An engine's own pool: the drive writes into its slots, and they are checked there.
    let pool = AlignedBuf::new(16 * BLOCK_BYTES)?;
    let region = store.register(pool, BLOCK_BYTES)?;
    let slots = region.claim_all(&[3, 5, 9, 0, 1, 2, 12, 7])?;
    let loaded = store.get_into(&ns, &keys, slots, &GetOptions::default())?.wait();
    for (slot, block) in loaded.buffers.iter().zip(&blocks) {
        assert_eq!(slot.as_slice(), block, "what comes back is what was stored");
    }
    println!("read directly: {} blocks from {:?}", loaded.hits(), loaded.items[0]);
    // The slots are free again once they are dropped.
    drop(loaded);
    assert_eq!(region.slots_used(), 0);

    let deleted = store.delete(&ns, &Delete::Keys(keys[4..].to_vec()))?.wait();
    println!("deleted {} blocks, durably: {}", deleted.removed, deleted.durable);
    let found = store.lookup(&ns, &keys, LookupMode::Prefix);
    println!("left: {}", found.hits);
    store.close();
    if std::env::args_os().len() < 2 {
        std::fs::remove_dir_all(&dir)?;
    }
    Ok(())
}
