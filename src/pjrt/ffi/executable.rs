//! Executables, loaded or not.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::api::made;
use super::client::DeviceHandle;
use super::handle::{
    BufferHandle, Compiler, EventHandle, ExecutableHandle, Handle, LoadedExecutableHandle,
};
use super::types::*;
use super::values::{copied, named_values, text};
use crate::pjrt::error::PjrtError;
use crate::pjrt::values::{CompiledMemoryStats, ElementType, NamedValue};

/// The results of one launch: for each device its outputs, and the event of its end.
pub struct Launch {
    pub outputs: Vec<Vec<BufferHandle>>,
    pub done: Vec<EventHandle>,
}

/// An executable loaded on devices, with what its launches are checked against.
pub struct CheckedExecutable {
    loaded: LoadedExecutableHandle,
    executable: Arc<ExecutableHandle>,
    devices: Vec<DeviceHandle>,
    num_outputs: usize,
}

impl ExecutableHandle {
    pub fn name(&self) -> Result<String, PjrtError> {
        let args = PJRT_Executable_Name_Args {
            executable: self.raw(),
            ..PJRT_Executable_Name_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(text(args.executable_name, args.executable_name_size))
        }
    }

    pub fn num_replicas(&self) -> Result<usize, PjrtError> {
        let args = PJRT_Executable_NumReplicas_Args {
            executable: self.raw(),
            ..PJRT_Executable_NumReplicas_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.num_replicas)
    }

    pub fn num_partitions(&self) -> Result<usize, PjrtError> {
        let args = PJRT_Executable_NumPartitions_Args {
            executable: self.raw(),
            ..PJRT_Executable_NumPartitions_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.num_partitions)
    }

    pub fn num_outputs(&self) -> Result<usize, PjrtError> {
        let args = PJRT_Executable_NumOutputs_Args {
            executable: self.raw(),
            ..PJRT_Executable_NumOutputs_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.num_outputs)
    }

    pub fn code_size(&self) -> Result<i64, PjrtError> {
        let args = PJRT_Executable_SizeOfGeneratedCodeInBytes_Args {
            executable: self.raw(),
            ..PJRT_Executable_SizeOfGeneratedCodeInBytes_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.size_in_bytes)
    }

    pub fn output_types(&self) -> Result<Vec<ElementType>, PjrtError> {
        let args = PJRT_Executable_OutputElementTypes_Args {
            executable: self.raw(),
            ..PJRT_Executable_OutputElementTypes_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        let codes = unsafe {
            let args = self.call(args)?;
            copied(args.output_types, args.num_output_types)
        };
        let function = PJRT_Executable_OutputElementTypes_Args::FUNCTION.name;
        codes
            .into_iter()
            .map(|code| ElementType::from_raw(function, code))
            .collect()
    }

    pub fn output_dims(&self) -> Result<Vec<Vec<i64>>, PjrtError> {
        let args = PJRT_Executable_OutputDimensions_Args {
            executable: self.raw(),
            ..PJRT_Executable_OutputDimensions_Args::new()
        };
        // SAFETY: *owned*, *lent*: a rank for each output, and the dimensions of all of them in
        // one list as long as the ranks together.
        unsafe {
            let args = self.call(args)?;
            let ranks = copied(args.dim_sizes, args.num_outputs);
            let all = copied(args.dims, ranks.iter().sum());
            let mut rest = all.as_slice();
            Ok(ranks
                .into_iter()
                .map(|rank| {
                    let (dims, others) = rest.split_at(rank.min(rest.len()));
                    rest = others;
                    dims.to_vec()
                })
                .collect())
        }
    }

    pub fn cost_analysis(&self) -> Result<BTreeMap<String, NamedValue>, PjrtError> {
        let args = PJRT_Executable_GetCostAnalysis_Args {
            executable: self.raw(),
            ..PJRT_Executable_GetCostAnalysis_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(named_values(args.properties, args.num_properties))
        }
    }

    pub fn memory_stats(&self) -> Result<CompiledMemoryStats, PjrtError> {
        let args = PJRT_Executable_GetCompiledMemoryStats_Args {
            executable: self.raw(),
            ..PJRT_Executable_GetCompiledMemoryStats_Args::new()
        };
        // SAFETY: *owned*.
        let args = unsafe { self.call(args)? };
        let minor = self.api().version().minor;
        Ok(CompiledMemoryStats {
            generated_code: args.generated_code_size_in_bytes,
            argument: args.argument_size_in_bytes,
            output: args.output_size_in_bytes,
            alias: args.alias_size_in_bytes,
            temp: args.temp_size_in_bytes,
            host_generated_code: args.host_generated_code_size_in_bytes,
            host_argument: args.host_argument_size_in_bytes,
            host_output: args.host_output_size_in_bytes,
            host_alias: args.host_alias_size_in_bytes,
            host_temp: args.host_temp_size_in_bytes,
            peak: (minor >= 72).then_some(args.peak_memory_in_bytes),
            total: (minor >= 90).then_some(args.total_size_in_bytes),
        })
    }

    pub fn fingerprint(&self) -> Result<Vec<u8>, PjrtError> {
        let args = PJRT_Executable_Fingerprint_Args {
            executable: self.raw(),
            ..PJRT_Executable_Fingerprint_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(copied(
                args.executable_fingerprint.cast::<u8>(),
                args.executable_fingerprint_size,
            ))
        }
    }

    /// The program after the compiler's passes: its format, and its bytes.
    pub fn optimized_program(&self) -> Result<(String, Vec<u8>), PjrtError> {
        let mut program = PJRT_Program::new();
        let mut args = PJRT_Executable_OptimizedProgram_Args {
            executable: self.raw(),
            program: &mut program,
            ..PJRT_Executable_OptimizedProgram_Args::new()
        };
        // SAFETY: *owned*; the program lives through both calls. The first, with no memory for
        // the code, writes its size; the second writes at most that. *lent*: the format's name.
        unsafe {
            self.api().call(&mut args)?;
            let mut code = vec![0u8; program.code_size];
            program.code = code.as_mut_ptr().cast();
            args.program = &mut program;
            self.api().call(&mut args)?;
            code.truncate(program.code_size);
            Ok((text(program.format, program.format_size), code))
        }
    }

    pub fn serialize(&self) -> Result<Vec<u8>, PjrtError> {
        let args = PJRT_Executable_Serialize_Args {
            executable: self.raw(),
            ..PJRT_Executable_Serialize_Args::new()
        };
        // SAFETY: *owned*; the bytes live until the deleter is called, once, after the copy.
        unsafe {
            let args = self.call(args)?;
            let bytes = copied(
                args.serialized_bytes.cast::<u8>(),
                args.serialized_bytes_size,
            );
            if let Some(delete) = args.serialized_executable_deleter {
                delete(args.serialized_executable);
            }
            Ok(bytes)
        }
    }
}

impl LoadedExecutableHandle {
    pub fn executable(&self) -> Result<ExecutableHandle, PjrtError> {
        let args = PJRT_LoadedExecutable_GetExecutable_Args {
            loaded_executable: self.raw(),
            ..PJRT_LoadedExecutable_GetExecutable_Args::new()
        };
        // SAFETY: *owned*; what is returned is ours to destroy, and shares what it needs of the
        // loaded executable, beside the client.
        unsafe {
            let args = self.call(args)?;
            let executable = made(
                PJRT_LoadedExecutable_GetExecutable_Args::FUNCTION,
                args.executable,
            )?;
            Ok(Handle::new(
                self.api(),
                executable,
                Compiler::Client(self.owner().clone()),
            ))
        }
    }

    pub fn addressable_devices(&self) -> Result<Vec<DeviceHandle>, PjrtError> {
        let args = PJRT_LoadedExecutable_AddressableDevices_Args {
            executable: self.raw(),
            ..PJRT_LoadedExecutable_AddressableDevices_Args::new()
        };
        // SAFETY: *owned*, *lent*: the list is copied; the devices are the client's.
        unsafe {
            let args = self.call(args)?;
            Ok(self
                .owner()
                .device_handles(args.addressable_devices, args.num_addressable_devices))
        }
    }
}

impl CheckedExecutable {
    pub fn new(loaded: LoadedExecutableHandle) -> Result<Self, PjrtError> {
        let executable = Arc::new(loaded.executable()?);
        let devices = loaded.addressable_devices()?;
        let num_outputs = executable.num_outputs()?;
        Ok(Self {
            loaded,
            executable,
            devices,
            num_outputs,
        })
    }

    pub fn executable(&self) -> &Arc<ExecutableHandle> {
        &self.executable
    }

    /// The devices of this process that the program runs on, in the order of its arguments.
    pub fn devices(&self) -> &[DeviceHandle] {
        &self.devices
    }

    /// Starts the program on its devices. `arguments` has a list for each of them.
    ///
    /// A buffer that the program may donate and whose index is not in `non_donatable` is deleted:
    /// the object stays, without its memory.
    pub fn launch(
        &self,
        arguments: &[Vec<&BufferHandle>],
        non_donatable: &[i64],
        launch_id: i32,
    ) -> Result<Launch, PjrtError> {
        self.check(arguments)?;
        let num_devices = arguments.len();
        let raw_arguments: Vec<Vec<*mut PJRT_Buffer>> = arguments
            .iter()
            .map(|list| list.iter().map(|buffer| buffer.raw()).collect())
            .collect();
        let argument_lists: Vec<*const *mut PJRT_Buffer> =
            raw_arguments.iter().map(|list| list.as_ptr()).collect();
        let mut raw_outputs =
            vec![vec![std::ptr::null_mut::<PJRT_Buffer>(); self.num_outputs]; num_devices];
        let output_lists: Vec<*mut *mut PJRT_Buffer> = raw_outputs
            .iter_mut()
            .map(|list| list.as_mut_ptr())
            .collect();
        let mut events = vec![std::ptr::null_mut::<PJRT_Event>(); num_devices];
        let mut options = PJRT_ExecuteOptions {
            launch_id,
            non_donatable_input_indices: non_donatable.as_ptr(),
            num_non_donatable_input_indices: non_donatable.len(),
            ..PJRT_ExecuteOptions::new()
        };
        let args = PJRT_LoadedExecutable_Execute_Args {
            executable: self.loaded.raw(),
            options: &mut options,
            argument_lists: argument_lists.as_ptr(),
            num_devices,
            num_args: arguments.first().map_or(0, Vec::len),
            output_lists: output_lists.as_ptr(),
            device_complete_events: events.as_mut_ptr(),
            ..PJRT_LoadedExecutable_Execute_Args::new()
        };
        // SAFETY: *owned*, the executable and the borrowed arguments; `check` holds every list of
        // arguments to its length, the lists of outputs have the executable's own number, and all
        // live during the call. What is made is ours, and needs the client.
        unsafe {
            self.loaded.call(args)?;
            let api = self.loaded.api();
            let client = self.loaded.owner();
            let done: Vec<EventHandle> = events
                .into_iter()
                .filter_map(NonNull::new)
                .map(|event| Handle::new(api, event, client.clone()))
                .collect();
            let outputs: Vec<Vec<BufferHandle>> = raw_outputs
                .into_iter()
                .map(|list| {
                    list.into_iter()
                        .filter_map(NonNull::new)
                        .map(|buffer| Handle::new(api, buffer, client.clone()))
                        .collect()
                })
                .collect();
            let missing = if outputs.iter().any(|list| list.len() != self.num_outputs) {
                Some("an output is missing")
            } else if done.len() != num_devices {
                // Without it nobody can say when a device is done.
                Some("the event of a device's end is missing")
            } else {
                None
            };
            if let Some(what) = missing {
                return Err(PjrtError::Protocol {
                    function: PJRT_LoadedExecutable_Execute_Args::FUNCTION.name,
                    what: what.to_string(),
                });
            }
            Ok(Launch { outputs, done })
        }
    }

    /// Holds the arguments to what the call reads: a list for each device, all of one length, of
    /// buffers of this client.
    fn check(&self, arguments: &[Vec<&BufferHandle>]) -> Result<(), PjrtError> {
        let refused = |what: String| {
            let executable = self
                .executable
                .name()
                .unwrap_or_else(|_| "a program".to_string());
            Err(PjrtError::Arguments { executable, what })
        };
        if arguments.len() != self.devices.len() {
            return refused(format!(
                "it runs on {} devices of this process, found arguments for {}",
                self.devices.len(),
                arguments.len()
            ));
        }
        let num_args = arguments.first().map_or(0, Vec::len);
        for (device, list) in arguments.iter().enumerate() {
            if list.len() != num_args {
                return refused(format!(
                    "{num_args} arguments for the first device, {} for device {device}",
                    list.len()
                ));
            }
            for (index, buffer) in list.iter().enumerate() {
                if !Arc::ptr_eq(buffer.client(), self.loaded.owner()) {
                    return refused(format!(
                        "argument {index} for device {device} is a buffer of another client"
                    ));
                }
            }
        }
        Ok(())
    }
}
