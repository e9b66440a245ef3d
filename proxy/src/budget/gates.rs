//! Gates: for each key, a few at a time. They let one request dial for those that can share its connection, and keep
//! one sandbox from filling the processor's queue with expensive work.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A gate for each key that is in use.
#[derive(Clone, Debug)]
pub(crate) struct Gates<K> {
    /// How many may pass a gate at a time.
    width: usize,
    gates: Arc<Mutex<HashMap<K, Arc<Semaphore>>>>,
}

/// A turn at a gate. Dropping it lets the next one in.
#[derive(Debug)]
pub(crate) struct Turn<K: Clone + Eq + Hash> {
    gates: Gates<K>,
    key: K,
    gate: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

impl<K: Clone + Eq + Hash> Gates<K> {
    pub(crate) fn new(width: usize) -> Self {
        Gates { width, gates: Arc::default() }
    }

    /// Waits for a turn at the gate of `key`.
    pub(crate) async fn turn(&self, key: K) -> Turn<K> {
        let fresh = || Arc::new(Semaphore::new(self.width));
        let gate = sys::lock(&self.gates).entry(key.clone()).or_insert_with(fresh).clone();
        // Made before the wait, so that one that is cancelled leaves no gate behind.
        let mut turn = Turn { gates: self.clone(), key, gate, permit: None };
        turn.permit = turn.gate.clone().acquire_owned().await.ok(); // closed: open to all
        turn
    }
}

impl<K: Clone + Eq + Hash> Turn<K> {
    /// Lets all who wait at this gate pass at once.
    pub(crate) fn open_to_all(self) {
        self.gate.close();
    }

    /// Runs work that takes long, while other tasks move to other threads.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
            Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
            Ok(_) | Err(_) => work(),
        }
    }
}

impl<K: Clone + Eq + Hash> Drop for Turn<K> {
    fn drop(&mut self) {
        let mut gates = sys::lock(&self.gates.gates);
        drop(self.permit.take()); // it holds the gate, too
        // Two are left, the table's and ours: nobody waits. A closed gate serves nobody new.
        let last = Arc::strong_count(&self.gate) <= 2 || self.gate.is_closed();
        if last && gates.get(&self.key).is_some_and(|gate| Arc::ptr_eq(gate, &self.gate)) {
            gates.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    fn wait(gates: &Gates<u64>) -> JoinHandle<Turn<u64>> {
        let gates = gates.clone();
        tokio::spawn(async move { gates.turn(1).await })
    }

    #[tokio::test]
    async fn as_many_pass_as_the_gate_is_wide() {
        let gates = Gates::new(1);
        let first = gates.turn(1).await;
        let waits = wait(&gates);
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        drop(gates.turn(2).await); // another key does not wait
        drop(first);
        drop(waits.await.unwrap());
        assert!(sys::lock(&gates.gates).is_empty(), "nothing stays behind");
    }

    #[tokio::test]
    async fn who_stops_waiting_leaves_nothing_behind() {
        let gates = Gates::new(1);
        let first = gates.turn(1).await;
        let waits = wait(&gates);
        tokio::task::yield_now().await;
        drop(first);
        waits.abort();
        drop(waits.await);
        assert!(sys::lock(&gates.gates).is_empty());
    }

    #[tokio::test]
    async fn an_open_gate_holds_up_nobody() {
        let gates = Gates::new(1);
        let first = gates.turn(1).await;
        let waits = [wait(&gates), wait(&gates), wait(&gates)];
        tokio::task::yield_now().await;
        first.open_to_all();
        let mut turns = Vec::new();
        for wait in waits {
            turns.push(wait.await.unwrap()); // all at the same time
        }
        drop(turns);
        assert!(sys::lock(&gates.gates).is_empty());
    }
}
