//! The PJRT runtime against real plugins: the CPU's runs programs, the TPU's compiles them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{cpu_client, cpu_plugin, cpu_session, tpu_plugin};
use maxdiff::pjrt::{
    Arg, Buffer, Client, CompileOptions, DeviceAssignment, ElementType, ErrorCode,
    LoadedExecutable, NamedValue, OptimizationLevel, PjrtError, Topology,
};

const AXPY: &str = r#"module @axpy {
  func.func public @main(%a: tensor<f32>, %x: tensor<2x3xf32>, %y: tensor<2x3xf32>)
      -> (tensor<2x3xf32>, tensor<f32>) {
    %0 = stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> tensor<2x3xf32>
    %1 = stablehlo.multiply %0, %x : tensor<2x3xf32>
    %2 = stablehlo.add %1, %y : tensor<2x3xf32>
    return %2, %a : tensor<2x3xf32>, tensor<f32>
  }
}"#;

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|chunk| f32::from_ne_bytes(chunk.try_into().unwrap()))
        .collect()
}

fn array(client: &Client, values: &[f32], dims: &[i64], device: usize) -> Buffer {
    let device = &client.addressable_devices()[device];
    Buffer::from_host(client, &bytes(values), ElementType::F32, dims, device).unwrap()
}

fn compile(client: &Client, text: &str) -> LoadedExecutable {
    client.compile(text, &CompileOptions::new(1, 1)).unwrap()
}

#[test]
fn the_cpu_plugin_says_what_it_is() {
    let plugin = cpu_plugin();
    assert_eq!(plugin.api_version().major, 0);
    assert!(plugin.api_version().minor >= 57);
    assert!(
        plugin.attributes().contains_key("xla_version"),
        "{:?}",
        plugin.attributes()
    );
    // The same file is the same plugin, initialized once.
    assert_eq!(plugin.path(), cpu_plugin().path());

    let client = cpu_client(3);
    assert_eq!(client.platform_name(), "cpu");
    assert_eq!(client.process_index().unwrap(), 0);
    assert_eq!(client.devices().len(), 3);
    assert_eq!(client.addressable_devices(), client.devices());
    let ids: Vec<_> = client.devices().iter().map(|device| device.id()).collect();
    assert_eq!(ids, [0, 1, 2]);
    let description = client.devices()[1].description();
    assert_eq!(description.kind, "cpu");
    assert_eq!(description.process_index, 0);
    assert_eq!(client.devices()[2].local_hardware_id().unwrap(), 2);
}

#[test]
fn an_unknown_client_option_is_refused() {
    let options = [("no_such_option".to_string(), NamedValue::Bool(true))];
    let error = Client::create(&cpu_plugin(), &options).unwrap_err();
    assert!(error.to_string().contains("no_such_option"), "{error}");
    assert_eq!(error.code(), Some(ErrorCode::InvalidArgument));
}

#[test]
fn text_compiles_and_runs() {
    let client = cpu_client(1);
    let program = compile(&client, AXPY);
    let executable = program.executable();
    assert_eq!(executable.name().unwrap(), "axpy");
    assert_eq!(executable.num_outputs().unwrap(), 2);
    assert_eq!(executable.num_replicas().unwrap(), 1);
    assert_eq!(executable.num_partitions().unwrap(), 1);
    assert_eq!(executable.output_types().unwrap(), [ElementType::F32; 2]);
    assert_eq!(executable.output_dims().unwrap(), [vec![2, 3], vec![]]);

    let a = array(&client, &[2.0], &[], 0);
    let x = array(&client, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3], 0);
    let y = array(&client, &[0.5; 6], &[2, 3], 0);
    let arguments = vec![vec![Arg::Borrow(&a), Arg::Borrow(&x), Arg::Borrow(&y)]];
    let execution = program.execute(arguments).unwrap();
    let outputs = execution.wait().unwrap();
    assert_eq!(outputs[0][0].dims().unwrap(), [2, 3]);
    assert_eq!(outputs[0][0].element_type().unwrap(), ElementType::F32);
    assert_eq!(outputs[0][0].device().unwrap(), client.devices()[0]);
    let result = floats(&outputs[0][0].to_host().unwrap());
    assert_eq!(result, [2.5, 4.5, 6.5, 8.5, 10.5, 12.5]);
    // Borrowed arguments are as they were.
    assert_eq!(
        floats(&x.to_host().unwrap()),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    );
}

#[test]
fn outputs_are_row_major_whatever_the_device_has() {
    let client = cpu_client(1);
    let text = r#"module {
      func.func public @main(%x: tensor<2x3xf32>) -> (tensor<3x2xf32> {mhlo.layout_mode = "{0,1}"}) {
        %0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
        return %0 : tensor<3x2xf32>
      }
    }"#;
    let x = array(&client, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3], 0);
    let execution = compile(&client, text)
        .execute(vec![vec![Arg::Borrow(&x)]])
        .unwrap();
    let result = floats(&execution.outputs[0][0].to_host().unwrap());
    assert_eq!(result, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

#[test]
fn buffers_go_there_and_back() {
    let client = cpu_client(2);
    let values: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    let buffer = array(&client, &values, &[32, 32], 0);
    buffer.wait().unwrap();
    assert!(buffer.ready().unwrap().is_ready().unwrap());
    assert_eq!(buffer.on_device_size().unwrap(), 4096);
    assert_eq!(floats(&buffer.to_host().unwrap()), values);
    assert_eq!(
        floats(&buffer.to_host_async().unwrap().wait().unwrap()),
        values
    );
    // A transfer that nobody waits for is waited for when it is dropped.
    drop(buffer.to_host_async().unwrap());

    let copy = buffer.copy_to_device(&client.devices()[1]).unwrap();
    assert_eq!(copy.device().unwrap(), client.devices()[1]);
    assert_eq!(floats(&copy.to_host().unwrap()), values);

    buffer.delete().unwrap();
    assert!(buffer.is_deleted().unwrap());
    assert!(buffer.to_host().is_err());
    assert!(!copy.is_deleted().unwrap());

    for (element_type, host, dims) in [
        (ElementType::Bf16, vec![0x80, 0x3f, 0x00, 0x40], vec![2]),
        (ElementType::S8, vec![255, 1, 127], vec![3, 1]),
        (ElementType::S4, vec![7, 1, 0], vec![3]),
        (ElementType::F8E4M3Fn, vec![0x38, 0x40], vec![2]),
        (ElementType::Pred, vec![1, 0, 1, 1], vec![2, 2]),
        (ElementType::F32, vec![], vec![0, 4]),
    ] {
        let buffer =
            Buffer::from_host(&client, &host, element_type, &dims, &client.devices()[0]).unwrap();
        assert_eq!(buffer.element_type().unwrap(), element_type);
        assert_eq!(buffer.to_host().unwrap(), host, "{element_type}");
    }
}

/// Host bytes that say when they are let go of.
struct Watched {
    bytes: Vec<u8>,
    dropped: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.bytes.fill(0xff);
        self.dropped.store(true, Ordering::Release);
    }
}

#[test]
fn an_async_transfer_keeps_its_source_until_it_is_read() {
    let client = cpu_client(1);
    let values: Vec<f32> = (0..1 << 20).map(|i| i as f32).collect();
    let dropped = Arc::new(AtomicBool::new(false));
    let source = Watched {
        bytes: bytes(&values),
        dropped: dropped.clone(),
    };
    let device = &client.devices()[0];
    let buffer =
        Buffer::from_host_async(&client, source, ElementType::F32, &[1 << 20], device).unwrap();
    assert_eq!(floats(&buffer.to_host().unwrap()), values);
    // The callback runs on a thread of the runtime, soon after the transfer.
    let deadline = Instant::now() + Duration::from_secs(10);
    while !dropped.load(Ordering::Acquire) {
        assert!(Instant::now() < deadline, "the source was never dropped");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The source's memory was overwritten when it was dropped: the buffer does not share it.
    assert_eq!(floats(&buffer.to_host().unwrap()), values);

    let dropped = Arc::new(AtomicBool::new(false));
    let short = Watched {
        bytes: vec![0; 5],
        dropped: dropped.clone(),
    };
    let error =
        Buffer::from_host_async(&client, short, ElementType::F32, &[2], device).unwrap_err();
    assert!(
        matches!(
            error,
            PjrtError::HostSize {
                expected: 8,
                found: 5,
                ..
            }
        ),
        "{error}"
    );
    assert!(dropped.load(Ordering::Acquire));
}

#[test]
fn host_bytes_of_the_wrong_length_are_refused() {
    let client = cpu_client(1);
    let device = &client.devices()[0];
    let error = Buffer::from_host(&client, &[0; 7], ElementType::F32, &[2], device).unwrap_err();
    assert_eq!(
        error.to_string(),
        "f32 with dimensions [2] takes 8 bytes on the host, found 7"
    );
    let buffer = array(&client, &[1.0, 2.0], &[2], 0);
    let other = cpu_client(1);
    let error = Buffer::from_host(
        &client,
        &[0; 4],
        ElementType::F32,
        &[1],
        &other.devices()[0],
    )
    .unwrap_err();
    assert!(matches!(error, PjrtError::ForeignDevice { .. }), "{error}");
    let error = buffer.copy_to_device(&other.devices()[0]).unwrap_err();
    assert!(matches!(error, PjrtError::ForeignDevice { .. }), "{error}");
}

#[test]
fn four_devices_reduce_together() {
    // Shardy: rows of `x` on 4 devices, their sum on each: an all-reduce.
    let text = r#"module @sum {
      sdy.mesh @mesh = <["data"=4]>
      func.func public @main(%x: tensor<8x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>})
          -> (tensor<3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
            : (tensor<8x3xf32>, tensor<f32>) -> tensor<3xf32>
        return %0 : tensor<3xf32>
      }
    }"#;
    let client = cpu_client(4);
    let assignment = DeviceAssignment::partitions(vec![0, 1, 2, 3]);
    let options = CompileOptions::new(1, 4).device_assignment(&assignment);
    let program = client.compile(text, &options).unwrap();
    assert_eq!(program.executable().num_partitions().unwrap(), 4);
    assert_eq!(program.devices(), client.devices());
    let module = program.executable().optimized_hlo().unwrap();
    let opcodes: Vec<_> = module
        .computations
        .iter()
        .flat_map(|computation| &computation.instructions)
        .map(|instruction| instruction.opcode.as_str())
        .collect();
    assert!(opcodes.contains(&"all-reduce"), "{opcodes:?}");

    let shards: Vec<Buffer> = (0..4)
        .map(|device| array(&client, &[device as f32; 6], &[2, 3], device))
        .collect();
    let arguments = shards
        .iter()
        .map(|shard| vec![Arg::Borrow(shard)])
        .collect();
    let outputs = program.execute(arguments).unwrap().wait().unwrap();
    assert_eq!(outputs.len(), 4);
    for (device, list) in outputs.iter().enumerate() {
        assert_eq!(
            floats(&list[0].to_host().unwrap()),
            [12.0; 3],
            "device {device}"
        );
        assert_eq!(list[0].device().unwrap(), client.devices()[device]);
    }
}

const STEP: &str = r#"module @step {
  func.func public @main(%state: tensor<256xf32> {tf.aliasing_output = 0 : i32}, %x: tensor<256xf32>)
      -> tensor<256xf32> {
    %0 = stablehlo.add %state, %x : tensor<256xf32>
    return %0 : tensor<256xf32>
  }
}"#;

#[test]
fn a_donated_state_is_carried_and_a_borrowed_one_kept() {
    let client = cpu_client(1);
    let program = compile(&client, STEP);
    assert_eq!(program.executable().memory_stats().unwrap().alias, 1024);
    let x = array(&client, &[1.0; 256], &[256], 0);
    let start = array(&client, &[0.0; 256], &[256], 0);
    let mut state = {
        let arguments = vec![vec![Arg::Borrow(&start), Arg::Borrow(&x)]];
        program
            .execute(arguments)
            .unwrap()
            .wait()
            .unwrap()
            .remove(0)
            .remove(0)
    };
    assert!(!start.is_deleted().unwrap());
    assert_eq!(floats(&start.to_host().unwrap()), [0.0; 256]);
    for _ in 0..3 {
        let execution = program
            .execute(vec![vec![state.into(), (&x).into()]])
            .unwrap();
        state = execution.wait().unwrap().remove(0).remove(0);
    }
    assert_eq!(floats(&state.to_host().unwrap()), [4.0; 256]);
    assert_eq!(floats(&x.to_host().unwrap()), [1.0; 256]);
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let client = cpu_client(2);
    let program = compile(&client, STEP);
    let x = array(&client, &[1.0; 256], &[256], 0);
    let refused = |arguments: Vec<Vec<Arg<'_>>>| match program.execute(arguments) {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    };

    let text = refused(vec![]);
    assert!(
        text.contains("step") && text.contains("1 devices"),
        "{text}"
    );
    let text = refused(vec![vec![Arg::Borrow(&x)], vec![Arg::Borrow(&x)]]);
    assert!(text.contains("found arguments for 2"), "{text}");
    // The number of arguments and their shapes are the plugin's to check.
    let text = refused(vec![vec![Arg::Borrow(&x)]]);
    assert!(text.contains('2') && text.contains('1'), "{text}");
    let short = array(&client, &[1.0; 4], &[4], 0);
    refused(vec![vec![Arg::Borrow(&x), Arg::Borrow(&short)]]);
    let other = cpu_client(1);
    let foreign = array(&other, &[1.0; 256], &[256], 0);
    let text = refused(vec![vec![Arg::Borrow(&x), Arg::Borrow(&foreign)]]);
    assert!(
        text.contains("argument 1") && text.contains("another client"),
        "{text}"
    );
}

#[test]
fn donation_is_the_same_on_every_device() {
    let text = r#"module @twice {
      sdy.mesh @mesh = <["data"=2]>
      func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>})
          -> (tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>}) {
        %0 = stablehlo.add %x, %x : tensor<4xf32>
        return %0 : tensor<4xf32>
      }
    }"#;
    let client = cpu_client(2);
    let program = client.compile(text, &CompileOptions::new(1, 2)).unwrap();
    let here = array(&client, &[1.0, 2.0], &[2], 0);
    let there = array(&client, &[3.0, 4.0], &[2], 1);
    let arguments = vec![vec![Arg::Borrow(&here)], vec![Arg::Donate(there)]];
    let Err(error) = program.execute(arguments) else {
        panic!("accepted")
    };
    assert!(
        error
            .to_string()
            .contains("argument 0 is donated on one of devices 0 and 1"),
        "{error}"
    );
}

#[test]
fn a_program_that_does_not_parse_is_refused_with_line_and_column() {
    let client = cpu_client(1);
    let text = AXPY.replace(
        "stablehlo.multiply %0, %x",
        "stablehlo.multiply %0, %nowhere",
    );
    let error = client
        .compile(&text, &CompileOptions::new(1, 1))
        .unwrap_err();
    let PjrtError::Plugin {
        function, message, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(*function, "PJRT_Client_Compile");
    // The undeclared value is on the fifth line, at the 34th character.
    let column = text.lines().nth(4).unwrap().find("%nowhere").unwrap() + 1;
    assert!(message.contains(&format!("5:{column}")), "{message}");
    assert!(message.contains("undeclared"), "{message}");
}

#[test]
fn options_the_compiler_does_not_know_are_refused() {
    let client = cpu_client(1);
    let options = CompileOptions::new(1, 1).set("xla_no_such_flag", true.into());
    let error = client.compile(AXPY, &options).unwrap_err();
    assert!(error.to_string().contains("xla_no_such_flag"), "{error}");
    let options = CompileOptions::new(1, 1)
        .set("xla_cpu_enable_fast_math", false.into())
        .optimization_level(OptimizationLevel::O1);
    client.compile(AXPY, &options).unwrap();
}

#[test]
fn a_program_is_analysed() {
    let client = cpu_client(1);
    let text = r#"module @dot {
      func.func public @main(%x: tensor<8x16xf32>, %w: tensor<16x32xf32>) -> tensor<8x32xf32> {
        %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
            : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32> loc("unet/conv_in")
        return %0 : tensor<8x32xf32>
      }
    }"#;
    let program = compile(&client, text);
    let executable = program.executable();
    let memory = executable.memory_stats().unwrap();
    assert_eq!(memory.argument, (8 * 16 + 16 * 32) * 4);
    assert_eq!(memory.output, 8 * 32 * 4);
    assert_eq!(memory.alias, 0);
    assert!(memory.peak.unwrap() >= memory.argument, "{memory:?}");
    let cost = executable.cost_analysis().unwrap();
    assert_eq!(
        cost.get("flops"),
        Some(&(2.0 * 8.0 * 16.0 * 32.0)),
        "{cost:?}"
    );
    assert!(executable.code_size().is_ok());
    let fingerprint = executable.fingerprint().unwrap();
    assert!(!fingerprint.is_empty());
    assert_eq!(
        compile(&client, text).executable().fingerprint().unwrap(),
        fingerprint
    );
    assert_ne!(
        compile(&client, AXPY).executable().fingerprint().unwrap(),
        fingerprint
    );

    let module = executable.optimized_hlo().unwrap();
    assert_eq!(module.name, "dot");
    let entry = module
        .computations
        .iter()
        .find(|computation| computation.id == module.entry_computation_id)
        .unwrap();
    let parameters: Vec<_> = entry
        .instructions
        .iter()
        .filter(|i| i.opcode == "parameter")
        .collect();
    assert_eq!(parameters.len(), 2);
    let dims = |number: i64| {
        let parameter = parameters
            .iter()
            .find(|p| p.parameter_number == number)
            .unwrap();
        parameter.shape.as_ref().unwrap().dimensions.clone()
    };
    assert_eq!((dims(0), dims(1)), (vec![8, 16], vec![16, 32]));
    let names: Vec<_> = module
        .computations
        .iter()
        .flat_map(|computation| &computation.instructions)
        .filter_map(|instruction| instruction.metadata.as_ref())
        .map(|metadata| metadata.op_name.as_str())
        .collect();
    assert!(names.contains(&"unet/conv_in"), "{names:?}");
}

#[test]
fn a_serialized_program_runs_as_the_original() {
    let client = cpu_client(1);
    let serialized = compile(&client, STEP).executable().serialize().unwrap();
    assert!(!serialized.is_empty());
    let loaded = cpu_client(1);
    let program = loaded.load(&serialized).unwrap();
    assert_eq!(program.executable().name().unwrap(), "step");
    let state = array(&loaded, &[2.0; 256], &[256], 0);
    let x = array(&loaded, &[3.0; 256], &[256], 0);
    let execution = program
        .execute(vec![vec![state.into(), (&x).into()]])
        .unwrap();
    assert_eq!(
        floats(&execution.outputs[0][0].to_host().unwrap()),
        [5.0; 256]
    );

    let error = loaded.load(b"not a program").unwrap_err();
    assert!(matches!(error, PjrtError::Plugin { .. }), "{error}");
}

#[test]
fn objects_are_shared_between_threads_and_outlive_their_client() {
    let (program, x) = {
        let client = cpu_client(1);
        (
            compile(&client, STEP),
            Arc::new(array(&client, &[1.0; 256], &[256], 0)),
        )
    };
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let (program, x) = (program.clone(), x.clone());
            std::thread::spawn(move || {
                for _ in 0..50 {
                    let execution = program
                        .execute(vec![vec![(&*x).into(), (&*x).into()]])
                        .unwrap();
                    let sum = floats(&execution.outputs[0][0].to_host().unwrap());
                    assert_eq!(sum, [2.0; 256], "thread {thread}");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(floats(&x.to_host().unwrap()), [1.0; 256]);
}

/// Each client counts for itself, so what other tests hold does not matter.
#[test]
fn device_memory_is_told_or_said_not_to_be() {
    const SIZE: i64 = 8 << 20;
    let client = cpu_client(1);
    let in_use = || client.devices()[0].memory_stats().unwrap().bytes_in_use;
    let before = in_use();
    let buffer = array(&client, &vec![1.0; SIZE as usize / 4], &[SIZE / 4], 0);
    buffer.wait().unwrap();
    let held = in_use();
    assert!(
        (SIZE..2 * SIZE).contains(&(held - before)),
        "{before} {held}"
    );
    drop(buffer);
    // The last reference may be one that a thread of the runtime is about to let go of.
    let deadline = Instant::now() + Duration::from_secs(10);
    while in_use() > before {
        assert!(Instant::now() < deadline, "{} of {held} remain", in_use());
        std::thread::sleep(Duration::from_millis(1));
    }
    let peak = client.devices()[0]
        .memory_stats()
        .unwrap()
        .peak_bytes_in_use;
    assert!(peak.is_some_and(|peak| peak >= held), "{peak:?}");

    // Virtual devices share the host's memory.
    for device in cpu_client(2).devices() {
        let error = device.memory_stats().unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::Unimplemented), "{error}");
    }
}

/// No array is rounded up by more than 64 KiB, so that weights take what they need.
#[test]
fn large_arrays_take_little_more_than_their_bytes() {
    let client = cpu_client(1);
    let in_use = || client.devices()[0].memory_stats().unwrap().bytes_in_use;
    let before = in_use();
    let sizes = [
        (2 << 20) + 4,
        (2 << 20) - 4,
        3 << 20,
        (9 << 20) + 4,
        (5 << 20) + (64 << 10),
    ];
    let mut bytes = 0;
    let mut kept = Vec::new();
    for size in sizes {
        let buffer = array(&client, &vec![1.0; size / 4], &[size as i64 / 4], 0);
        buffer.wait().unwrap();
        bytes += size as i64;
        kept.push(buffer);
    }
    let rounded = in_use() - before - bytes;
    let most = sizes.len() as i64 * (64 << 10);
    assert!((0..=most).contains(&rounded), "{rounded} of {bytes} bytes");
    for (buffer, size) in kept.iter().zip(sizes) {
        assert_eq!(floats(&buffer.to_host().unwrap()), vec![1.0; size / 4]);
    }
}

/// What a GPU's compiler needs reaches every program of a session; others are compiled as ever.
#[test]
fn sessions_pass_the_folder_of_cudas_tools_on() {
    let session = cpu_session(2);
    let plain = session.compile_options();
    assert_eq!(
        *plain,
        maxdiff::runtime::compile_options(session.mesh(), session.backend())
    );
    assert!(plain.overrides().is_empty());
    let session = session.with_cuda_data_dir(Some(Path::new("/opt/plugins/cuda")));
    let overrides: Vec<_> = session.compile_options().overrides().into_iter().collect();
    assert_eq!(
        overrides,
        [("xla_gpu_cuda_data_dir", "/opt/plugins/cuda".to_string())]
    );
}

#[test]
fn a_topology_of_two_slices_is_described_and_compiled_for() {
    let plugin = tpu_plugin();
    let options = [("num_slices".to_string(), NamedValue::Int64(2))];
    let topology = Topology::create(&plugin, "v5e:2x2", &options).unwrap();
    assert_eq!(topology.platform_name(), "tpu");
    // A v5e has 16 GiB, of which the runtime keeps a little; how much depends on the slice.
    let limit = topology.device_memory_limit().unwrap();
    assert!(limit < 16 << 30 && limit > 15 << 30, "{limit}");
    let devices = topology.devices();
    assert_eq!(devices.len(), 8);
    for device in devices {
        let slice = device.slice_index().unwrap();
        assert!(device.id >= 100_000 * (slice + 1) && device.id < 100_000 * (slice + 1) + 4);
        assert_eq!(device.coords().unwrap().len(), 3);
        assert_eq!(device.kind, "TPU v5 lite");
    }

    // Each slice sums its half of the batch, then the slices sum: a transfer between slices.
    let text = r#"module @gradient {
      sdy.mesh @mesh = <["slice"=2, "data"=4]>
      func.func public @main(%x: tensor<64x128xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"slice", "data"}, {}]>},
                             %g: tensor<64x256xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"slice", "data"}, {}]>})
          -> (tensor<128x256xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
        %0 = stablehlo.dot_general %x, %g, contracting_dims = [0] x [0]
            : (tensor<64x128xbf16>, tensor<64x256xbf16>) -> tensor<128x256xf32> loc("unet/proj/drhs")
        return %0 : tensor<128x256xf32>
      }
    }"#;
    let ids: Vec<i64> = devices.iter().map(|device| device.id).collect();
    let options = CompileOptions::new(1, 8).device_assignment(&DeviceAssignment::partitions(ids));
    let executable = topology.compile(text, &options).unwrap();
    // The executable is the program of one slice; the slices run it together.
    assert_eq!(executable.num_partitions().unwrap(), 4);
    assert_eq!(executable.output_dims().unwrap(), [[128, 256]]);
    assert_eq!(executable.output_types().unwrap(), [ElementType::F32]);
    let memory = executable.memory_stats().unwrap();
    assert!(memory.generated_code > 0, "{memory:?}");
    assert!(memory.argument >= 8 * (128 + 256) * 2, "{memory:?}");
    assert!(memory.output >= 128 * 256 * 4, "{memory:?}");
    assert!(memory.peak.is_some_and(|peak| peak > 0), "{memory:?}");
    assert!(executable.cost_analysis().unwrap()["flops"] > 0.0);
    assert!(executable.serialize().unwrap().len() > 1000);

    let module = executable.optimized_hlo().unwrap();
    let instructions: Vec<_> = module
        .computations
        .iter()
        .flat_map(|computation| &computation.instructions)
        .collect();
    let across: Vec<_> = instructions
        .iter()
        .filter(|instruction| instruction.opcode == "send" && instruction.is_host_transfer)
        .collect();
    assert!(!across.is_empty(), "no transfer between slices");
    for send in across {
        let attributes = &send.frontend_attributes.as_ref().unwrap().map;
        assert_eq!(
            attributes
                .get("_xla_host_transfer_handler_name")
                .map(String::as_str),
            Some("xla_megascale_runtime"),
            "{attributes:?}"
        );
    }
    // The compiler's prediction of time, and the program's own names, survive to the report.
    let predicted = instructions.iter().filter(|instruction| {
        String::from_utf8_lossy(&instruction.backend_config).contains("estimated_cycles")
    });
    assert!(predicted.count() > 0, "no estimated_cycles");
    let named = instructions
        .iter()
        .filter_map(|instruction| instruction.metadata.as_ref());
    assert!(
        named
            .into_iter()
            .any(|metadata| metadata.op_name.contains("unet/proj/drhs"))
    );
}

#[test]
fn a_topology_that_does_not_exist_is_refused_with_its_name() {
    let plugin = tpu_plugin();
    let error = Topology::create(&plugin, "v5e-16", &[]).unwrap_err();
    assert!(error.to_string().contains("v5e-16"), "{error}");
    let options = [("no_such_option".to_string(), NamedValue::Int64(1))];
    let error = Topology::create(&plugin, "v5e:2x2", &options).unwrap_err();
    assert!(error.to_string().contains("no_such_option"), "{error}");
}

#[test]
fn the_tpu_compiler_refuses_what_it_does_not_know() {
    let topology = Topology::create(&tpu_plugin(), "v5e:1x1", &chips_per_host(&[1, 1, 1])).unwrap();
    let options = CompileOptions::new(1, 1).set("xla_no_such_flag", true.into());
    let error = topology.compile(AXPY, &options).unwrap_err();
    assert!(error.to_string().contains("xla_no_such_flag"), "{error}");
    let text = AXPY.replace("tensor<2x3xf32>, tensor<f32>\n", "tensor<2x3xf32>\n");
    let error = topology
        .compile(&text, &CompileOptions::new(1, 1))
        .unwrap_err();
    let PjrtError::Plugin {
        function: "PJRT_Compile",
        message,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert!(message.contains("7:"), "{message}");
}

fn chips_per_host(bounds: &[i64]) -> Vec<(String, NamedValue)> {
    vec![(
        "chips_per_host_bounds".to_string(),
        NamedValue::Int64List(bounds.to_vec()),
    )]
}
