//! What a stop does, which libtpu changes as it loads.

use std::ffi::c_int;

use signal_hook::consts::SIGTERM;

/// Room for the C library's `struct sigaction`, which is never looked into: glibc's has 152 bytes.
#[repr(C, align(16))]
struct SignalAction([u8; 512]);

unsafe extern "C" {
    fn sigaction(signal: c_int, new: *const SignalAction, old: *mut SignalAction) -> c_int;
}

/// Runs `load`, and lets SIGTERM do afterwards what it did before: libtpu would write a stack trace as of a crash.
pub fn keeping_sigterm<T>(load: impl FnOnce() -> T) -> T {
    let mut before = SignalAction([0; 512]);
    // SAFETY: only reads the action, into a buffer that is larger than it.
    let is_known = unsafe { sigaction(SIGTERM, std::ptr::null(), &raw mut before) } == 0;
    let result = load();
    if is_known {
        // SAFETY: the action is one that this process had already, as the C library wrote it.
        unsafe { sigaction(SIGTERM, &raw const before, std::ptr::null_mut()) };
    }
    result
}
