//! Events: something the runtime has yet to finish.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::api::Api;
use super::handle::EventHandle;
use super::types::*;
use crate::pjrt::error::PjrtError;

/// The argument of an event's callback: the table to read an error with, and the memory to free.
struct Release {
    api: Api,
    kept: Arc<dyn Send + Sync>,
}

/// Lets go of what was kept for a transfer. Runs once, on a thread of the runtime. A panic in the
/// drop of what was kept ends the process, as for any `extern "C"` function.
unsafe extern "C" fn release(error: *mut PJRT_Error, user_arg: *mut c_void) {
    // SAFETY: `user_arg` is the box given to `PJRT_Event_OnReady`, which calls back once; the
    // error, if any, is given to the callback.
    unsafe {
        let release = Box::from_raw(user_arg.cast::<Release>());
        if let Some(error) = NonNull::new(error) {
            let error = release.api.take_error("PJRT_Event_OnReady", error);
            // The buffer the bytes were for carries the same error to whoever reads it.
            tracing::debug!(%error, "a transfer from the host failed");
        }
        drop(release.kept);
    }
}

impl EventHandle {
    /// Whether it happened, well or badly.
    pub fn is_ready(&self) -> Result<bool, PjrtError> {
        let args = PJRT_Event_IsReady_Args {
            event: self.raw(),
            ..PJRT_Event_IsReady_Args::new()
        };
        // SAFETY: *owned*: the event is live.
        unsafe { self.call(args) }.map(|args| args.is_ready)
    }

    /// Blocks until it happened, and returns its error.
    pub fn wait(&self) -> Result<(), PjrtError> {
        let args = PJRT_Event_Await_Args {
            event: self.raw(),
            ..PJRT_Event_Await_Args::new()
        };
        // SAFETY: *owned*: the event is live.
        unsafe { self.call(args) }.map(|_| ())
    }

    /// Blocks until it happened, and gives back what the runtime used until then, or the event's
    /// error.
    ///
    /// An error may also be one of waiting: then the runtime may use `kept` still. Unless the event
    /// is known to have happened, `kept` is leaked: memory that is lost does less harm than memory
    /// that is written to after it was freed.
    pub fn wait_keeping<T>(&self, kept: T) -> Result<T, PjrtError> {
        // Nothing frees it on the way, not even a panic.
        let kept = ManuallyDrop::new(kept);
        match self.wait() {
            Ok(()) => Ok(ManuallyDrop::into_inner(kept)),
            Err(error) => {
                match self.is_ready() {
                    Ok(true) => drop(ManuallyDrop::into_inner(kept)),
                    Ok(false) | Err(_) => {
                        tracing::warn!(%error, "memory of a transfer is leaked: its end is not known");
                    }
                }
                Err(error)
            }
        }
    }

    /// Drops `kept` when the event happened, on a thread of the runtime, without waiting here.
    pub fn release_when_done(self, kept: Arc<dyn Send + Sync>) {
        let user_arg = Box::into_raw(Box::new(Release {
            api: self.api(),
            kept,
        }));
        let args = PJRT_Event_OnReady_Args {
            event: self.raw(),
            callback: Some(release),
            user_arg: user_arg.cast(),
            ..PJRT_Event_OnReady_Args::new()
        };
        // SAFETY: *owned*: the event is live; `release` takes what `user_arg` points to, and may
        // run after the event is destroyed, for it does not use it.
        if let Err(error) = unsafe { self.call(args) } {
            tracing::debug!(%error, "waiting for a transfer in place of a callback");
            // SAFETY: the call failed, so the callback was not taken and never runs: the box is
            // still ours.
            let release = unsafe { Box::from_raw(user_arg) };
            let _ = self.wait_keeping(release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::api::fabricated;
    use super::super::handle::{ClientHandle, Handle};
    use super::*;

    unsafe extern "C" fn fails(_: *mut PJRT_Event_Await_Args) -> *mut PJRT_Error {
        NonNull::<PJRT_Error>::dangling().as_ptr()
    }
    unsafe extern "C" fn does_not_take(_: *mut PJRT_Event_OnReady_Args) -> *mut PJRT_Error {
        NonNull::<PJRT_Error>::dangling().as_ptr()
    }
    unsafe extern "C" fn succeeds(_: *mut PJRT_Event_Await_Args) -> *mut PJRT_Error {
        std::ptr::null_mut()
    }
    unsafe extern "C" fn is_ready(args: *mut PJRT_Event_IsReady_Args) -> *mut PJRT_Error {
        // SAFETY: called with valid arguments by `EventHandle::is_ready`.
        unsafe { (*args).is_ready = true };
        std::ptr::null_mut()
    }
    unsafe extern "C" fn is_not_ready(_: *mut PJRT_Event_IsReady_Args) -> *mut PJRT_Error {
        std::ptr::null_mut()
    }
    unsafe extern "C" fn ignores(_: *mut PJRT_Error_Destroy_Args) {}
    unsafe extern "C" fn says_nothing(_: *mut PJRT_Error_Message_Args) {}
    unsafe extern "C" fn unknown(_: *mut PJRT_Error_GetCode_Args) -> *mut PJRT_Error {
        std::ptr::null_mut()
    }
    unsafe extern "C" fn destroys(_: *mut PJRT_Event_Destroy_Args) -> *mut PJRT_Error {
        std::ptr::null_mut()
    }
    unsafe extern "C" fn closes(_: *mut PJRT_Client_Destroy_Args) -> *mut PJRT_Error {
        std::ptr::null_mut()
    }

    type Await = unsafe extern "C" fn(*mut PJRT_Event_Await_Args) -> *mut PJRT_Error;
    type IsReady = unsafe extern "C" fn(*mut PJRT_Event_IsReady_Args) -> *mut PJRT_Error;

    /// An event of a plugin whose functions are these; its callbacks are never taken.
    fn event(wait: Await, ready: IsReady) -> EventHandle {
        let mut functions = [0; 12];
        let mut set = |function: Function, address: usize| functions[function.index] = address;
        set(
            PJRT_Error_Destroy_Args::FUNCTION,
            ignores as *const () as usize,
        );
        set(
            PJRT_Error_Message_Args::FUNCTION,
            says_nothing as *const () as usize,
        );
        set(
            PJRT_Error_GetCode_Args::FUNCTION,
            unknown as *const () as usize,
        );
        set(
            PJRT_Event_Destroy_Args::FUNCTION,
            destroys as *const () as usize,
        );
        set(
            PJRT_Client_Destroy_Args::FUNCTION,
            closes as *const () as usize,
        );
        set(
            PJRT_Event_OnReady_Args::FUNCTION,
            does_not_take as *const () as usize,
        );
        set(PJRT_Event_Await_Args::FUNCTION, wait as *const () as usize);
        set(
            PJRT_Event_IsReady_Args::FUNCTION,
            ready as *const () as usize,
        );
        let api = fabricated(90, &functions);
        // SAFETY: the functions of this table use no object.
        unsafe {
            let client: ClientHandle = Handle::new(api, NonNull::dangling(), ());
            Handle::new(api, NonNull::dangling(), Arc::new(client))
        }
    }

    /// Says when it is dropped.
    struct Watched(Arc<AtomicBool>);

    impl Drop for Watched {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn memory_is_freed_only_when_the_event_is_known_to_have_happened() {
        for (wait, ready, is_freed) in [
            (succeeds as Await, is_not_ready as IsReady, true),
            // The event's own error: it happened.
            (fails, is_ready, true),
            (fails, is_not_ready, false),
        ] {
            let dropped = Arc::new(AtomicBool::new(false));
            let waited = event(wait, ready).wait_keeping(Watched(dropped.clone()));
            assert_eq!(
                waited.is_ok(),
                wait as usize == succeeds as *const () as usize
            );
            drop(waited);
            assert_eq!(dropped.load(Ordering::Relaxed), is_freed);

            // In place of a callback that is not taken.
            let dropped = Arc::new(AtomicBool::new(false));
            event(wait, ready).release_when_done(Arc::new(Watched(dropped.clone())));
            assert_eq!(dropped.load(Ordering::Relaxed), is_freed);
        }
    }
}
