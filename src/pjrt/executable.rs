//! Compiled programs: their properties, and running them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use prost::Message;

use super::buffer::Buffer;
use super::client::{Client, Device};
use super::compile_options::CompileOptions;
use super::error::PjrtError;
use super::ffi::{
    BufferHandle, CheckedExecutable, EventHandle, ExecutableHandle, LoadedExecutableHandle,
};
use super::values::{CompiledMemoryStats, ElementType, NamedValue};
use crate::proto::xla;

/// A compiled program, for devices that are here or not. Clones are the same program.
#[derive(Clone)]
pub struct Executable {
    handle: Arc<ExecutableHandle>,
}

impl Client {
    /// Compiles a StableHLO module for the devices of `options`' device assignment, or the
    /// client's own choice.
    ///
    /// # Errors
    /// The compiler's, with its text: for a module that does not parse it has line and column.
    pub fn compile(
        &self,
        stablehlo: &str,
        options: &CompileOptions,
    ) -> Result<LoadedExecutable, PjrtError> {
        let loaded = self.handle().compile(stablehlo, &options.to_bytes())?;
        LoadedExecutable::new(loaded, self.launches())
    }

    /// Loads what [`Executable::serialize`] wrote, with this same plugin.
    ///
    /// The bytes are machine code: load only what this user's own compilation wrote.
    ///
    /// # Errors
    /// The plugin's, for bytes of another platform or version.
    pub fn load(&self, serialized: &[u8]) -> Result<LoadedExecutable, PjrtError> {
        let loaded = self.handle().deserialize_and_load(serialized)?;
        LoadedExecutable::new(loaded, self.launches())
    }
}

impl Executable {
    pub(super) fn new(handle: Arc<ExecutableHandle>) -> Self {
        Self { handle }
    }

    /// The module's name.
    pub fn name(&self) -> Result<String, PjrtError> {
        self.handle.name()
    }

    /// Copies of the program.
    pub fn num_replicas(&self) -> Result<usize, PjrtError> {
        self.handle.num_replicas()
    }

    /// Devices that one replica is partitioned over; of several TPU slices, those of one.
    pub fn num_partitions(&self) -> Result<usize, PjrtError> {
        self.handle.num_partitions()
    }

    /// Outputs on each device.
    pub fn num_outputs(&self) -> Result<usize, PjrtError> {
        self.handle.num_outputs()
    }

    /// Element types of the outputs.
    pub fn output_types(&self) -> Result<Vec<ElementType>, PjrtError> {
        self.handle.output_types()
    }

    /// Dimensions of each output on one device.
    pub fn output_dims(&self) -> Result<Vec<Vec<i64>>, PjrtError> {
        self.handle.output_dims()
    }

    /// Bytes of machine code.
    pub fn code_size(&self) -> Result<i64, PjrtError> {
        self.handle.code_size()
    }

    /// The compiler's own estimates for one run on one device: `flops`, `bytes accessed`,
    /// `transcendentals`, `optimal_seconds` and more.
    pub fn cost_analysis(&self) -> Result<BTreeMap<String, f64>, PjrtError> {
        let properties = self.handle.cost_analysis()?;
        Ok(properties
            .into_iter()
            .filter_map(|(name, value)| match value {
                NamedValue::Float(value) => Some((name, value.into())),
                NamedValue::Int64(value) => Some((name, value as f64)),
                NamedValue::String(_) | NamedValue::Int64List(_) | NamedValue::Bool(_) => None,
            })
            .collect())
    }

    /// The memory the program takes on each device.
    pub fn memory_stats(&self) -> Result<CompiledMemoryStats, PjrtError> {
        self.handle.memory_stats()
    }

    /// The program after the compiler's passes, for one device.
    ///
    /// Contents that the compiler keeps in the module's table of payloads are put back in their
    /// instructions.
    ///
    /// # Errors
    /// [`PjrtError::OptimizedProgram`] for a format that is not HLO, or bytes that do not decode.
    pub fn optimized_hlo(&self) -> Result<xla::HloModuleProto, PjrtError> {
        let (format, bytes) = self.handle.optimized_program()?;
        decode_hlo(format, &bytes)
    }

    /// The program as bytes that [`super::Client::load`] reads, with the same plugin.
    pub fn serialize(&self) -> Result<Vec<u8>, PjrtError> {
        self.handle.serialize()
    }

    /// A fingerprint of the program, the compiler and its options, where the plugin makes one:
    /// bytes of the plugin's choice, not text.
    pub fn fingerprint(&self) -> Result<Vec<u8>, PjrtError> {
        self.handle.fingerprint()
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executable({})", self.name().unwrap_or_default())
    }
}

fn decode_hlo(format: String, bytes: &[u8]) -> Result<xla::HloModuleProto, PjrtError> {
    let module = match format.as_str() {
        "hlo" => xla::HloModuleProto::decode(bytes).map_err(|error| error.to_string()),
        "hlo_with_config" => xla::HloModuleProtoWithConfig::decode(bytes)
            .map_err(|error| error.to_string())
            .and_then(|message| message.hlo_module.ok_or("no module".to_string())),
        _ => Err("the format is not hlo or hlo_with_config".to_string()),
    };
    module
        .and_then(|mut module| resolve_payloads(&mut module).map(|()| module))
        .map_err(|reason| PjrtError::OptimizedProgram { format, reason })
}

/// Puts what is kept in the module's table of payloads back in its instructions.
fn resolve_payloads(module: &mut xla::HloModuleProto) -> Result<(), String> {
    use xla::payload::PayloadSource;
    let table = std::mem::take(&mut module.payloads);
    let find = |payload: xla::Payload| match payload.payload_source {
        None => Ok(None),
        Some(PayloadSource::Value(bytes)) => Ok(Some(bytes)),
        Some(PayloadSource::Id(id)) => usize::try_from(id)
            .ok()
            .and_then(|index| table.get(index))
            .map(|bytes| Some(bytes.clone()))
            .ok_or_else(|| format!("payload {id} of {} is missing", table.len())),
    };
    let instructions = module
        .computations
        .iter_mut()
        .flat_map(|c| c.instructions.iter_mut());
    for instruction in instructions {
        if let Some(payload) = instruction.backend_config_payload.take()
            && let Some(bytes) = find(payload)?
        {
            instruction.backend_config = bytes;
        }
        if let Some(metadata) = &mut instruction.metadata
            && let Some(payload) = metadata.metadata_payload.take()
            && let Some(bytes) = find(payload)?
        {
            *metadata = xla::OpMetadata::decode(bytes.as_slice())
                .map_err(|error| format!("metadata of {}: {error}", instruction.name))?;
        }
    }
    Ok(())
}

/// A program on the devices of this process, ready to run. Clones are the same program.
#[derive(Clone)]
pub struct LoadedExecutable {
    inner: Arc<Inner>,
}

struct Inner {
    program: CheckedExecutable,
    executable: Executable,
    devices: Vec<Device>,
    launches: Arc<AtomicI32>,
}

/// An argument of [`LoadedExecutable::execute`].
pub enum Arg<'a> {
    /// The program reads the buffer and leaves it as it is.
    Borrow(&'a Buffer),
    /// The program may use the buffer's memory for an output, if it was compiled to; the buffer is
    /// gone in any case.
    Donate(Buffer),
}

impl Arg<'_> {
    fn handle(&self) -> &BufferHandle {
        match self {
            Self::Borrow(buffer) => &buffer.handle,
            Self::Donate(buffer) => &buffer.handle,
        }
    }
}

impl<'a> From<&'a Buffer> for Arg<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Self::Borrow(buffer)
    }
}

impl From<Buffer> for Arg<'_> {
    fn from(buffer: Buffer) -> Self {
        Self::Donate(buffer)
    }
}

/// One run of a program, under way or done.
#[must_use = "errors of the run are known from `wait`, or from its outputs"]
pub struct Execution {
    /// For each device, in the order of [`LoadedExecutable::devices`], its outputs. They may be
    /// used at once: what uses them waits for them.
    pub outputs: Vec<Vec<Buffer>>,
    done: Vec<EventHandle>,
}

impl LoadedExecutable {
    pub(super) fn new(
        loaded: LoadedExecutableHandle,
        launches: Arc<AtomicI32>,
    ) -> Result<Self, PjrtError> {
        let program = CheckedExecutable::new(loaded)?;
        let executable = Executable::new(program.executable().clone());
        let devices = program
            .devices()
            .iter()
            .cloned()
            .map(Device::new)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            inner: Arc::new(Inner {
                program,
                executable,
                devices,
                launches,
            }),
        })
    }

    /// The properties of the program.
    pub fn executable(&self) -> &Executable {
        &self.inner.executable
    }

    /// The devices of this process that the program runs on, in the order of its arguments.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// Starts the program, with a list of arguments for each of [`Self::devices`]. Returns when
    /// it is started, not when it is done.
    ///
    /// Processes that work together start the same programs in the same order: launches are
    /// numbered within a client, and the numbers must agree.
    ///
    /// # Errors
    /// [`PjrtError::Arguments`] when there are not as many lists as devices, lists differ in
    /// length, a buffer is of another client, or an argument is donated on one device and borrowed
    /// on another; the plugin's, when number or size of the arguments is not the program's. Donated
    /// buffers are gone then too.
    pub fn execute(&self, arguments: Vec<Vec<Arg<'_>>>) -> Result<Execution, PjrtError> {
        let borrowed = self.borrowed_arguments(&arguments)?;
        let handles: Vec<Vec<&BufferHandle>> = arguments
            .iter()
            .map(|list| list.iter().map(Arg::handle).collect())
            .collect();
        self.launch(&handles, &borrowed)
    }

    fn launch(
        &self,
        arguments: &[Vec<&BufferHandle>],
        non_donatable: &[i64],
    ) -> Result<Execution, PjrtError> {
        let id = self.inner.launches.fetch_add(1, Ordering::Relaxed);
        let launch = self.inner.program.launch(arguments, non_donatable, id)?;
        let outputs = launch
            .outputs
            .into_iter()
            .map(|list| list.into_iter().map(|handle| Buffer { handle }).collect())
            .collect();
        Ok(Execution {
            outputs,
            done: launch.done,
        })
    }

    /// Indices of the arguments that are borrowed: the interface takes one list for all devices.
    fn borrowed_arguments(&self, arguments: &[Vec<Arg<'_>>]) -> Result<Vec<i64>, PjrtError> {
        let is_borrowed = |arg: &Arg<'_>| matches!(arg, Arg::Borrow(_));
        let first = arguments.first().map_or(&[][..], Vec::as_slice);
        for (device, list) in arguments.iter().enumerate() {
            for (index, (one, other)) in first.iter().zip(list).enumerate() {
                if is_borrowed(one) != is_borrowed(other) {
                    return Err(PjrtError::Arguments {
                        executable: self.inner.executable.name()?,
                        what: format!(
                            "argument {index} is donated on one of devices 0 and {device} and borrowed on the other"
                        ),
                    });
                }
            }
        }
        Ok(first
            .iter()
            .enumerate()
            .filter(|(_, arg)| is_borrowed(arg))
            .map(|(index, _)| index as i64)
            .collect())
    }
}

impl fmt::Debug for LoadedExecutable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedExecutable")
            .field("executable", &self.inner.executable)
            .field("devices", &self.inner.devices)
            .finish()
    }
}

impl Execution {
    /// Waits for all devices, and returns the outputs, or the error of the first device that has
    /// one.
    pub fn wait(self) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        // Every device is waited for before an error is returned: none runs on behind it.
        let results: Vec<_> = self.done.iter().map(EventHandle::wait).collect();
        results.into_iter().collect::<Result<(), _>>()?;
        Ok(self.outputs)
    }

    /// Whether all devices are done.
    pub fn is_done(&self) -> Result<bool, PjrtError> {
        for event in &self.done {
            if !event.is_ready()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pjrt::install::PluginKind;
    use crate::pjrt::{Client, CompileOptions, Plugin, plugins};

    fn module() -> xla::HloModuleProto {
        let metadata = xla::OpMetadata {
            op_name: "unet/conv_in".to_string(),
            ..Default::default()
        };
        let by_id = |id| xla::Payload {
            payload_source: Some(xla::payload::PayloadSource::Id(id)),
        };
        xla::HloModuleProto {
            name: "step".to_string(),
            computations: vec![xla::HloComputationProto {
                instructions: vec![
                    xla::HloInstructionProto {
                        backend_config_payload: Some(by_id(0)),
                        metadata: Some(xla::OpMetadata {
                            metadata_payload: Some(by_id(1)),
                            ..Default::default()
                        }),
                        ..Default::default()
                    },
                    xla::HloInstructionProto {
                        backend_config: b"in place".to_vec(),
                        ..Default::default()
                    },
                ],
                ..Default::default()
            }],
            payloads: vec![b"{}".to_vec(), metadata.encode_to_vec()],
            ..Default::default()
        }
    }

    /// From the outside a donated buffer is gone, so only here can be seen that the runtime took
    /// it, and that it leaves one that is listed as borrowed.
    #[test]
    fn a_buffer_is_deleted_when_donated_and_only_then() {
        let path = plugins::plugin_path(PluginKind::Cpu);
        let client = Client::create(&Plugin::load(path).unwrap(), &[]).unwrap();
        let text =
            "func.func @main(%x: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4xf32> {
            %0 = stablehlo.add %x, %x : tensor<4xf32>
            return %0 : tensor<4xf32>
        }";
        let program = client.compile(text, &CompileOptions::new(1, 1)).unwrap();
        let device = &client.devices()[0];
        let state = Buffer::from_host(&client, &[0; 16], ElementType::F32, &[4], device).unwrap();
        program
            .launch(&[vec![&state.handle]], &[0])
            .unwrap()
            .wait()
            .unwrap();
        assert!(!state.is_deleted().unwrap());
        program
            .launch(&[vec![&state.handle]], &[])
            .unwrap()
            .wait()
            .unwrap();
        assert!(state.is_deleted().unwrap());
    }

    #[test]
    fn payloads_are_put_back() {
        let decoded = decode_hlo("hlo".to_string(), &module().encode_to_vec()).unwrap();
        let instructions = &decoded.computations[0].instructions;
        assert_eq!(instructions[0].backend_config, b"{}");
        assert_eq!(
            instructions[0].metadata.as_ref().unwrap().op_name,
            "unet/conv_in"
        );
        assert_eq!(instructions[1].backend_config, b"in place");
        assert!(decoded.payloads.is_empty());
    }

    #[test]
    fn both_hlo_formats_are_read() {
        let with_config = xla::HloModuleProtoWithConfig {
            hlo_module: Some(module()),
        };
        let decoded =
            decode_hlo("hlo_with_config".to_string(), &with_config.encode_to_vec()).unwrap();
        assert_eq!(decoded.name, "step");
        let error = decode_hlo("mlir".to_string(), b"module {}").unwrap_err();
        assert!(error.to_string().contains("mlir"), "{error}");
        let error = decode_hlo("hlo".to_string(), &[0xff; 4]).unwrap_err();
        assert!(
            matches!(error, PjrtError::OptimizedProgram { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_payload_that_is_not_there_is_an_error() {
        let mut module = module();
        module.payloads.pop();
        let error = decode_hlo("hlo".to_string(), &module.encode_to_vec()).unwrap_err();
        assert!(error.to_string().contains("payload 1 of 1"), "{error}");
    }
}
