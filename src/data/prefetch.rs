//! A thread that makes what training steps take ahead of time.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::DataError;

/// A thread that makes what steps take ahead of the training loop, in order.
#[derive(Debug)]
pub struct Prefetcher<T, E> {
    receiver: Option<Receiver<Result<T, E>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T, E> Prefetcher<T, E>
where
    T: Send + 'static,
    E: From<DataError> + Send + 'static,
{
    /// Starts at `first_step`; at most `depth` finished results of `make` wait.
    ///
    /// # Errors
    /// [`DataError::Loader`] if the thread cannot be started.
    pub fn spawn(
        first_step: u64,
        depth: usize,
        make: impl Fn(u64) -> Result<T, E> + Send + 'static,
    ) -> Result<Self, DataError> {
        let (sender, receiver) = sync_channel(depth.max(1));
        let thread = std::thread::Builder::new()
            .name("prefetch".into())
            .spawn(move || produce(first_step, &make, &sender))
            .map_err(|e| DataError::Loader {
                message: format!("cannot start its thread: {e}"),
            })?;
        Ok(Self {
            receiver: Some(receiver),
            thread: Some(thread),
        })
    }

    /// The next result, waiting for it if need be.
    ///
    /// # Errors
    /// The error of `make`; [`DataError::Loader`] with the panic's message if it panicked, and on
    /// every call after an error.
    #[allow(
        clippy::should_implement_trait,
        reason = "it never ends but by an error"
    )]
    pub fn next(&mut self) -> Result<T, E> {
        match self.receiver.as_ref().map(Receiver::recv) {
            Some(Ok(result)) => result,
            Some(Err(_)) | None => Err(E::from(DataError::Loader {
                message: "it ended after the error reported before".into(),
            })),
        }
    }
}

fn produce<T, E: From<DataError>>(
    first_step: u64,
    make: &dyn Fn(u64) -> Result<T, E>,
    sender: &SyncSender<Result<T, E>>,
) {
    for step in first_step.. {
        // Unwind safety: after a panic this thread uses nothing of `make` again, and what others share
        // of it is behind locks.
        let result = catch_unwind(AssertUnwindSafe(|| make(step))).unwrap_or_else(|panic| {
            Err(E::from(DataError::Loader {
                message: panic_message(&*panic),
            }))
        });
        let failed = result.is_err();
        // A closed channel means that the training loop has ended.
        if sender.send(result).is_err() || failed {
            return;
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("without a message"))
}

impl<T, E> Drop for Prefetcher<T, E> {
    fn drop(&mut self) {
        // The thread may wait for room in the channel: close it before joining.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic was already turned into an error inside the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_and_errors_of_the_thread_reach_the_caller() {
        let mut loader = Prefetcher::<u64, DataError>::spawn(0, 2, |step| {
            assert!(step < 1, "broken at {step}");
            Ok(step)
        })
        .unwrap();
        assert_eq!(loader.next().unwrap(), 0);
        let message = loader.next().unwrap_err().to_string();
        assert!(message.contains("broken at 1"), "{message}");
        assert!(
            loader
                .next()
                .unwrap_err()
                .to_string()
                .contains("reported before")
        );

        let mut loader = Prefetcher::<u64, DataError>::spawn(3, 2, |index| {
            Err(DataError::Index {
                index: index as usize,
                len: 0,
            })
        })
        .unwrap();
        assert!(matches!(
            loader.next(),
            Err(DataError::Index { index: 3, .. })
        ));
    }
}
