//! A thread for calls that may never return, such as those of a file system whose server is gone.
//!
//! The runtime's own pool for blocking calls is the wrong place for them: each would hold one of its threads for good, and the
//! runtime waits for all of them when it ends. A [`Worker`] is one thread, which runs one job at a time. Whoever
//! submits a job decides how long to wait for it. A job that nobody waits for any more is skipped.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Jobs that wait for the thread.
const QUEUE: usize = 4096;

type Job = Box<dyn FnOnce() + Send>;

/// One thread and its queue. The thread ends with the last job after this is dropped.
#[derive(Clone, Debug)]
pub struct Worker {
    jobs: SyncSender<Job>,
}

/// The queue is full, or the job panicked.
#[derive(Debug, PartialEq, Eq)]
pub struct JobLost;

impl Worker {
    pub fn start(name: &str) -> io::Result<Self> {
        let (jobs, queue) = sync_channel(QUEUE);
        std::thread::Builder::new().name(name.to_owned()).spawn(move || run_jobs(&queue))?;
        Ok(Worker { jobs })
    }

    /// Runs `job` and returns its result.
    ///
    /// # Errors
    ///
    /// Returns [`JobLost`] if the job does not run to its end.
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JobLost> {
        let (reply, result) = oneshot::channel();
        self.post(move || {
            if !reply.is_closed() {
                drop(reply.send(job())); // fails if the caller has stopped waiting meanwhile
            }
        })?;
        result.await.map_err(|_| JobLost)
    }

    /// Runs `job` without waiting for it. The job may use the runtime of the caller.
    ///
    /// # Errors
    ///
    /// Returns [`JobLost`] if the queue is full.
    pub fn post(&self, job: impl FnOnce() + Send + 'static) -> Result<(), JobLost> {
        let runtime = Handle::try_current().ok();
        let job = move || {
            let _entered = runtime.as_ref().map(Handle::enter);
            job();
        };
        self.jobs.try_send(Box::new(job)).map_err(|_| JobLost)
    }
}

fn run_jobs(queue: &Receiver<Job>) {
    for job in queue {
        drop(catch_unwind(AssertUnwindSafe(job))); // the caller gets `JobLost`; the hook has reported the panic
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_job_that_hangs_delays_only_its_own_thread_and_abandoned_jobs_are_skipped() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let worker = Worker::start("test").unwrap();
        let (release, hang) = channel::<()>();
        worker.post(move || assert!(hang.recv().is_err())).unwrap();
        let (ran, runs) = channel();
        let abandoned = ran.clone();
        runtime.block_on(async {
            let mut job = Box::pin(worker.run(move || abandoned.send("abandoned")));
            tokio::select! {
                biased;
                _ = &mut job => panic!("the thread hangs"),
                () = std::future::ready(()) => {}
            }
            drop(job);
        });
        drop(release);
        assert_eq!(runtime.block_on(worker.run(move || ran.send("wanted").is_ok())), Ok(true));
        assert_eq!(runs.iter().collect::<Vec<_>>(), ["wanted"]);
    }

    #[test]
    fn a_panic_costs_one_job() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let worker = Worker::start("test").unwrap();
        let lost: Result<(), JobLost> = runtime.block_on(worker.run(|| panic!("on purpose")));
        assert_eq!(lost, Err(JobLost));
        assert_eq!(runtime.block_on(worker.run(|| 1)), Ok(1));
    }

    #[test]
    fn p17_the_queue_is_bounded() {
        let worker = Worker::start("test").unwrap();
        let (release, hang) = channel::<()>();
        worker.post(move || assert!(hang.recv().is_err())).unwrap();
        let taken = (0..2 * QUEUE).filter(|_| worker.post(|| {}).is_ok()).count();
        assert!((QUEUE - 1..=QUEUE).contains(&taken), "{taken}"); // the first job may still be in the queue
        drop(release);
    }
}
