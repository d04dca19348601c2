//! Stores blocks, restarts, loads them: what an outside program can do with the public crate.

use tiered_kv::{GetOptions, KvLayout, NamespaceSpec, PutOptions, Result, Store, StoreConfig};

const BLOCK: usize = 8192;

fn main() -> Result<()> {
    let dir = std::env::args_os().nth(1).expect("usage: outside DIRECTORY");
    let config = StoreConfig {
        dram_capacity: Some(1 << 20),
        nvme_paths: vec![dir.into()],
        nvme_capacity: 8 << 20,
        ..StoreConfig::default()
    };
    let layout = KvLayout::uniform(2, BLOCK as u64)?;
    let spec = NamespaceSpec::new("model", "weights", "float16", layout);
    let store = Store::open(&config)?;
    let ns = store.namespace(&spec)?;
    let keys = ns.keys_from_tokens(&[1, 2, 3, 4], None);
    let blocks = vec![vec![3u8; BLOCK], vec![4u8; BLOCK]];
    store.put(&ns, &keys, blocks.clone(), &PutOptions::default())?.wait();
    assert!(store.flush(None)?.wait().all_durable());
    store.close();
    drop(store);

    let store = Store::open(&config)?;
    let ns = store.namespace(&spec)?;
    let buffers = vec![vec![0u8; BLOCK]; 2];
    let loaded = store.get_into(&ns, &keys, buffers, &GetOptions::default())?.wait();
    assert_eq!(loaded.buffers, blocks);
    println!("loaded {} blocks from {:?}", loaded.hits(), loaded.items[0]);
    Ok(())
}
