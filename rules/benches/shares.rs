//! Benchmarks what the quotas cost one request: a place among the requests, memory for its head and both bodies, and all
//! of it given back.

use std::hint::black_box;
use std::sync::{Mutex, MutexGuard, PoisonError};

use criterion::Criterion;
use rules::ids::SandboxId;
use rules::share::{ShareTerms, SharedTotal};

fn main() {
    let mut criterion = Criterion::default().configure_from_args().without_plots();
    for sandboxes in [1, 1000] {
        let ids: Vec<SandboxId> = (0..sandboxes).map(|at| id(&format!("sandbox-{at}"))).collect();
        let terms = |total| ShareTerms::halved(total, total, sandboxes);
        let requests = Mutex::new(SharedTotal::new(terms(50_000), sandboxes));
        let buffers = Mutex::new(SharedTotal::new(terms(1 << 30), sandboxes));
        for id in &ids {
            take(&buffers, id, 64 << 10); // its connection
        }
        let mut at = 0;
        criterion.bench_function(&format!("a request's quota, {sandboxes} sandboxes"), |bencher| {
            bencher.iter(|| {
                at = (at + 1) % ids.len();
                let Some(id) = ids.get(at) else { return };
                take(&requests, id, 1);
                for bytes in [33 << 10, 0, 1 << 10] {
                    take(&buffers, id, bytes);
                }
                lock(&buffers).give_back(id, 34 << 10);
                lock(&requests).give_back(id, 1);
            });
        });
    }
    criterion.final_summary();
}

fn id(text: &str) -> SandboxId {
    SandboxId::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

fn take(total: &Mutex<SharedTotal>, id: &SandboxId, amount: u64) {
    let taken = lock(total).take(id, amount);
    black_box(taken).unwrap_or_else(|exhausted| panic!("{exhausted}"));
}

fn lock(total: &Mutex<SharedTotal>) -> MutexGuard<'_, SharedTotal> {
    total.lock().unwrap_or_else(PoisonError::into_inner)
}
