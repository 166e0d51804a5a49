//! Events: something the runtime has yet to finish.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::api::Api;
use super::handle::EventHandle;
use super::types::*;
use crate::pjrt::error::PjrtError;

/// What an event's callback is given: the table to read an error with, and what to let go of.
struct Release {
    api: Api,
    kept: NonNull<()>,
    drop_kept: unsafe fn(NonNull<()>),
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
        (release.drop_kept)(release.kept);
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

    /// Calls `drop_kept(kept)` once, when the event happened, without waiting here.
    ///
    /// # Safety
    /// `drop_kept(kept)` is sound to call once, from any thread.
    pub unsafe fn release_when_done(self, kept: NonNull<()>, drop_kept: unsafe fn(NonNull<()>)) {
        let user_arg = Box::into_raw(Box::new(Release {
            api: self.api(),
            kept,
            drop_kept,
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
            let _ = self.wait();
            // SAFETY: the call failed, so the callback was not taken and never runs; the event
            // happened, and the caller allows one call.
            unsafe {
                drop(Box::from_raw(user_arg));
                drop_kept(kept);
            }
        }
    }
}
