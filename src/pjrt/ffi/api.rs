//! The function table of a plugin, read so that plugins of other minor versions work.

use std::ptr::NonNull;

use super::types::*;
use super::values::text;
use crate::pjrt::error::{ApiVersion, ErrorCode, PjrtError};

/// The oldest minor version of the interface whose function table is in today's order.
pub const OLDEST_MINOR: i32 = 57;

/// The function table of a loaded plugin.
#[derive(Clone, Copy)]
pub struct Api {
    table: NonNull<PJRT_Api_Head>,
}

// SAFETY: *table*: the table is constant and lives as long as the process.
unsafe impl Send for Api {}
// SAFETY: as above; nothing is written through the pointer.
unsafe impl Sync for Api {}

impl Api {
    /// The table at `table`, or `None` where there is none.
    ///
    /// # Safety
    /// `table` is null, or points to a function table laid out as `PJRT_Api` (at least its head,
    /// and `struct_size` bytes in all) that stays unchanged and mapped until the process ends.
    pub unsafe fn new(table: *const PJRT_Api_Head) -> Option<Self> {
        NonNull::new(table.cast_mut()).map(|table| Self { table })
    }

    fn head(&self) -> &PJRT_Api_Head {
        // SAFETY: *table*: `new` was promised at least a head.
        unsafe { self.table.as_ref() }
    }

    /// The version of the interface the plugin was built with.
    pub fn version(&self) -> ApiVersion {
        ApiVersion {
            major: self.head().major_version,
            minor: self.head().minor_version,
        }
    }

    /// The address of a function of the table.
    fn find(&self, function: Function) -> Result<NonNull<()>, PjrtError> {
        let offset = size_of::<PJRT_Api_Head>() + function.index * size_of::<usize>();
        if offset + size_of::<usize>() > self.head().struct_size {
            return Err(PjrtError::ApiTooOld {
                function: function.name,
                needed: ApiVersion {
                    major: 0,
                    minor: OLDEST_MINOR,
                },
                found: self.version(),
            });
        }
        // SAFETY: *table*: the word at `offset` is inside the `struct_size` bytes of the table,
        // and words of the table after its head are function pointers or null.
        let address = unsafe { self.table.byte_add(offset).cast::<*mut ()>().read() };
        NonNull::new(address).ok_or(PjrtError::MissingFunction {
            function: function.name,
            found: self.version(),
        })
    }

    /// Calls the function that takes `args`, and turns its error into ours.
    ///
    /// # Safety
    /// What `args` points to is valid for what the function does with it, as the header says.
    pub unsafe fn call<A: Args>(&self, args: &mut A) -> Result<(), PjrtError> {
        let address = self.find(A::FUNCTION)?;
        // SAFETY: *table*: a non-null word at this index is the function of this name, whose type
        // is this one for every function but the two of `call_void`. The caller answers for `args`.
        let error = unsafe {
            let function: unsafe extern "C" fn(*mut A) -> *mut PJRT_Error =
                std::mem::transmute(address.as_ptr());
            function(args)
        };
        match NonNull::new(error) {
            None => Ok(()),
            // SAFETY: a call that returns an error gives it to its caller.
            Some(error) => Err(unsafe { self.take_error(A::FUNCTION.name, error) }),
        }
    }

    /// Calls one of the functions that return nothing: `PJRT_Error_Destroy`, `PJRT_Error_Message`.
    ///
    /// # Safety
    /// `A` is the argument struct of one of these two, and what it points to is valid.
    unsafe fn call_void<A: Args>(&self, args: &mut A) -> Result<(), PjrtError> {
        let address = self.find(A::FUNCTION)?;
        // SAFETY: as in `call`; the caller says that the function returns nothing.
        unsafe {
            let function: unsafe extern "C" fn(*mut A) = std::mem::transmute(address.as_ptr());
            function(args)
        }
        Ok(())
    }

    /// Reads an error of the plugin and frees it.
    ///
    /// # Safety
    /// `error` is a live error of this plugin, and the caller owns it.
    pub unsafe fn take_error(
        &self,
        function: &'static str,
        error: NonNull<PJRT_Error>,
    ) -> PjrtError {
        // SAFETY: the error lives until it is destroyed below; its message is copied before that.
        // Its code is asked first: a failure to tell it would itself be an error object.
        unsafe {
            let mut code = PJRT_Error_GetCode_Args {
                error: error.as_ptr(),
                ..PJRT_Error_GetCode_Args::new()
            };
            let code = match self.find(PJRT_Error_GetCode_Args::FUNCTION) {
                Ok(address) => {
                    let get: unsafe extern "C" fn(*mut PJRT_Error_GetCode_Args) -> *mut PJRT_Error =
                        std::mem::transmute(address.as_ptr());
                    match NonNull::new(get(&mut code)) {
                        None => ErrorCode::from_raw(code.code),
                        Some(second) => {
                            self.destroy_error(second);
                            ErrorCode::Unknown
                        }
                    }
                }
                Err(_) => ErrorCode::Unknown,
            };
            let mut message = PJRT_Error_Message_Args {
                error: error.as_ptr(),
                ..PJRT_Error_Message_Args::new()
            };
            let message = match self.call_void(&mut message) {
                Ok(()) => text(message.message, message.message_size),
                Err(missing) => format!("(no message: {missing})"),
            };
            self.destroy_error(error);
            PjrtError::Plugin {
                function,
                code,
                message,
            }
        }
    }

    /// # Safety
    /// `error` is a live error of this plugin, and the caller owns it.
    unsafe fn destroy_error(&self, error: NonNull<PJRT_Error>) {
        let mut args = PJRT_Error_Destroy_Args {
            error: error.as_ptr(),
            ..PJRT_Error_Destroy_Args::new()
        };
        // SAFETY: the caller gives the error up. A plugin without the function leaks it.
        let _ = unsafe { self.call_void(&mut args) };
    }
}

/// The object that a call which succeeded must have made.
pub fn made<T>(function: Function, pointer: *mut T) -> Result<NonNull<T>, PjrtError> {
    NonNull::new(pointer).ok_or_else(|| PjrtError::Protocol {
        function: function.name,
        what: "success without a result".to_string(),
    })
}

/// A function table of `functions` entries that says it is of version 0.`minor`.
#[cfg(test)]
pub fn fabricated(minor: i32, functions: &[usize]) -> Api {
    let head = PJRT_Api_Head {
        struct_size: size_of::<PJRT_Api_Head>() + std::mem::size_of_val(functions),
        extension_start: std::ptr::null_mut(),
        version_struct_size: 24,
        version_extension_start: std::ptr::null_mut(),
        major_version: 0,
        minor_version: minor,
    };
    let words = size_of::<PJRT_Api_Head>() / size_of::<usize>();
    let table = Box::leak(vec![0usize; words + functions.len()].into_boxed_slice());
    table[words..].copy_from_slice(functions);
    // SAFETY: the memory is leaked, aligned for words, and holds a head and the entries.
    unsafe {
        table.as_mut_ptr().cast::<PJRT_Api_Head>().write(head);
        Api::new(table.as_ptr().cast()).expect("not null")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_past_the_end_of_the_table_is_refused() {
        let api = fabricated(30, &[1; 10]);
        let error = api.find(PJRT_Client_Create_Args::FUNCTION).unwrap_err();
        match error {
            PjrtError::ApiTooOld {
                function,
                needed,
                found,
            } => {
                assert_eq!(function, "PJRT_Client_Create");
                assert_eq!(
                    found,
                    ApiVersion {
                        major: 0,
                        minor: 30
                    }
                );
                assert!(needed > found);
            }
            other => panic!("{other}"),
        }
        // The last entry of the same table is found: the guard is not off by one.
        assert!(api.find(PJRT_Event_OnReady_Args::FUNCTION).is_ok());
    }

    #[test]
    fn an_empty_place_in_the_table_is_refused() {
        let api = fabricated(90, &[0; 128]);
        let mut args = PJRT_Client_Create_Args::new();
        // SAFETY: the table has no function, so nothing is called.
        let error = unsafe { api.call(&mut args) }.unwrap_err();
        assert!(
            matches!(
                error,
                PjrtError::MissingFunction {
                    function: "PJRT_Client_Create",
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("0.90"), "{error}");
    }

    extern "C" fn fails(_: *mut PJRT_Event_Await_Args) -> *mut PJRT_Error {
        NonNull::<PJRT_Error>::dangling().as_ptr()
    }
    extern "C" fn ignores(_: *mut PJRT_Error_Destroy_Args) {}
    unsafe extern "C" fn says(args: *mut PJRT_Error_Message_Args) {
        let message = "the plugin's words";
        // SAFETY: called with valid arguments by `take_error`.
        unsafe {
            (*args).message = message.as_ptr().cast();
            (*args).message_size = message.len();
        }
    }
    unsafe extern "C" fn not_found(args: *mut PJRT_Error_GetCode_Args) -> *mut PJRT_Error {
        // SAFETY: called with valid arguments by `take_error`.
        unsafe { (*args).code = 5 };
        std::ptr::null_mut()
    }

    #[test]
    fn an_error_keeps_code_message_and_function() {
        let mut functions = [0; 10];
        functions[0] = ignores as *const () as usize;
        functions[1] = says as *const () as usize;
        functions[2] = not_found as *const () as usize;
        functions[8] = fails as *const () as usize;
        let api = fabricated(90, &functions);
        // SAFETY: the functions of this table read nothing through the event.
        let error = unsafe { api.call(&mut PJRT_Event_Await_Args::new()) }.unwrap_err();
        match error {
            PjrtError::Plugin {
                function,
                code,
                message,
            } => {
                assert_eq!(function, "PJRT_Event_Await");
                assert_eq!(code, ErrorCode::NotFound);
                assert_eq!(message, "the plugin's words");
            }
            other => panic!("{other}"),
        }
    }
}
