//! What the store's own path costs, beside the machine's limits.
//!
//! `cargo bench`: lookups and leases by the call, copies beside a plain copy of the same bytes.
#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tiered_kv::{
    BlockKey, Contiguous, GetOptions, KvLayout, LookupMode, Namespace, NamespaceSpec, PutOptions,
    Store, StoreConfig,
};

fn store(block_bytes: u64, n: u32) -> (std::sync::Arc<Store>, Namespace, Vec<BlockKey>) {
    let config = StoreConfig { dram_capacity: Some(1 << 30), ..StoreConfig::default() };
    let store = Store::open(&config).expect("opens");
    let layout = KvLayout::uniform(1, block_bytes).expect("valid");
    let ns = store.namespace(&NamespaceSpec::new("m", "w", "d", layout)).expect("valid");
    let keys = ns.keys_from_tokens(&(0..n).collect::<Vec<u32>>(), None);
    let bytes = vec![7u8; block_bytes as usize * n as usize];
    let source = Contiguous::new(bytes, block_bytes as usize);
    store.put(&ns, &keys, source, &PutOptions::default()).expect("open").wait();
    (store, ns, keys)
}

fn metadata(c: &mut Criterion) {
    let (store, ns, keys) = store(16 << 10, 64);
    let mut group = c.benchmark_group("64 blocks");
    group.throughput(Throughput::Elements(64));
    group.bench_function("lookup", |b| {
        b.iter(|| black_box(store.lookup(&ns, &keys, LookupMode::Prefix).hits));
    });
    group.bench_function("lease", |b| {
        let options = GetOptions { in_request: true, ..GetOptions::default() };
        b.iter(|| store.get(&ns, &keys, &options).expect("open").wait().hits());
    });
    group.finish();
}

fn copies(c: &mut Criterion) {
    let mut group = c.benchmark_group("1 GiB of memory");
    for block in [256usize << 10, 1 << 20, 4 << 20] {
        let n = (128 << 20) / block;
        let (store, ns, keys) = store(block as u64, n as u32);
        group.throughput(Throughput::Bytes((block * n) as u64));
        let mut buffers = vec![vec![0u8; block]; n];
        group.bench_function(BenchmarkId::new("get_into, checked", block), |b| {
            b.iter(|| {
                let taken = std::mem::take(&mut buffers);
                let options = GetOptions::default();
                let report = store.get_into(&ns, &keys, taken, &options).expect("open").wait();
                assert_eq!(report.hits(), n);
                buffers = report.buffers;
            });
        });
        let source = buffers.clone();
        group.bench_function(BenchmarkId::new("plain copy", block), |b| {
            b.iter(|| {
                for (to, from) in buffers.iter_mut().zip(&source) {
                    to.copy_from_slice(black_box(from));
                }
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = metadata, copies
}
criterion_main!(benches);
