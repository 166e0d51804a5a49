//! Training steps compiled ahead of time by libtpu for several slices, and asked what they move and in what they
//! compute. Without the TPU plugin these tests fail; none is skipped.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::tpu_plugin;
use maxdiff::aot::Compiled;
use maxdiff::backend::tpu::SUM_OF_ROWS;
use maxdiff::bundle::{Bundle, PayloadKind};
use maxdiff::config::{Config, Verb};
use maxdiff::dtype::DType;
use maxdiff::pjrt::OptimizationLevel;
use maxdiff::pjrt::install::Trial;
use maxdiff::proto::xla::PrimitiveType;
use maxdiff::recipe::{self, RecipeError, Step};
use maxdiff::report::Link;

/// A UNet of one level, with the transformer in its middle: every kind of layer that quantization meets, and few
/// enough to compile in seconds.
const TINY: &str = "
unet_config:
  sample_size: 8
  in_channels: 3
  out_channels: 3
  block_out_channels: [32]
  layers_per_block: 1
  down_block_types: [DownBlock2D]
  up_block_types: [UpBlock2D]
  cross_attention_dim: 32
  attention_head_dim: 2
  norm_num_groups: 8
pretrained_model_name_or_path: ''
resolution: 8
activations_dtype: bfloat16
per_device_batch_size: 1
";

const TWO_SLICES: [&str; 2] = ["compile_topology=v5e-16", "compile_topology_num_slices=2"];

fn config_file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.yml");
    std::fs::write(&path, TINY).unwrap();
    (folder, path)
}

fn compiled(overrides: &[&str]) -> Compiled {
    step_compiled(Step::Train, overrides)
}

fn step_compiled(step: Step, overrides: &[&str]) -> Compiled {
    // Loads the plugin that MAXDIFF_PLUGIN_DIR names, or fails.
    tpu_plugin();
    let (_folder, path) = config_file();
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    let loaded = Config::load(&path, &overrides, Some(Verb::Compile)).unwrap();
    compile(step, &loaded.config).unwrap_or_else(|error| panic!("{error}"))
}

fn compile(step: Step, config: &Config) -> Result<Compiled, RecipeError> {
    // What is asked of these programs does not depend on how well each operation is compiled, which takes most of the time.
    let compiler = recipe::compiler(config, &|_| Trial::Unknown, &mut |_| {})?
        .with_optimization_level(OptimizationLevel::O0);
    let traced = recipe::trace(config, step, compiler.mesh())?;
    let options = recipe::compile_options(config, step, &traced);
    Ok(compiler.compile(&traced, &options, &mut |_| {})?)
}

/// Weights of every format, on every chip: the compiled programs take the integers of each layer as they are stored.
#[test]
fn weights_alone_are_stored_as_integers_on_every_chip() {
    let rules = r"quant_rules=[{path: '.*\.ff\..*', mode: int8_w8a16, granularity: 8}, {path: '.*attn1.*', mode: w4a16, numerics: quark, symmetric: False, granularity: channel}, {path: '.*proj_out', mode: fp8_w8a16}, {path: '.*proj_in', mode: none}]";
    for topology in ["v5e-1", "v6e-1", "tpu7x-2"] {
        let topology = format!("compile_topology={topology}");
        let words = [
            "quantization=w4a16",
            "quantization_granularity=8",
            rules,
            &topology,
        ];
        let compiled = step_compiled(Step::Denoise, &words);
        let mut counts: BTreeMap<PrimitiveType, usize> = BTreeMap::new();
        for program in [&compiled.step].into_iter().chain(&compiled.request) {
            let module = program.executable.optimized_hlo().unwrap();
            let mut computations = module.computations.iter();
            let entry = computations.find(|c| c.id == module.entry_computation_id);
            let instructions = entry.unwrap().instructions.iter();
            for parameter in instructions.filter(|i| i.opcode == "parameter") {
                let element = parameter.shape.as_ref().unwrap().element_type();
                *counts.entry(element).or_default() += 1;
            }
        }
        let formats = compiled.decisions.iter().filter_map(|d| d.formats?.weight);
        let count = |element: DType| formats.clone().filter(|f| f.element == element).count();
        let zero_points = formats.clone().filter(|f| f.zero_point).count();
        assert!(zero_points > 0 && count(DType::S8) > 0);
        assert_eq!(
            counts[&PrimitiveType::S4],
            count(DType::S4),
            "{topology}: {counts:?}"
        );
        assert!(count(DType::F8E4M3Fn) > 0);
        assert_eq!(
            counts[&PrimitiveType::F8e4m3fn],
            count(DType::F8E4M3Fn),
            "{topology}: {counts:?}"
        );
        // Zero points are of int8.
        let of_int8 = count(DType::S8) + zero_points;
        assert_eq!(
            counts[&PrimitiveType::S8],
            of_int8,
            "{topology}: {counts:?}"
        );
    }
}

fn int8(more: &[&str]) -> Compiled {
    let mut overrides = vec!["quantization=int8"];
    overrides.extend(TWO_SLICES);
    overrides.extend(more);
    compiled(&overrides)
}

/// Dots of one kind (forward, `dlhs`, `drhs`) by their module's path, with the element types of their operands and
/// result in the optimized program; kernels whose operands are rounded inside with the types that they multiply.
fn contractions(compiled: &Compiled) -> Vec<(String, [PrimitiveType; 3])> {
    let module = compiled.step.executable.optimized_hlo().unwrap();
    let mut found = Vec::new();
    for computation in &module.computations {
        let types: BTreeMap<i64, PrimitiveType> = computation
            .instructions
            .iter()
            .filter_map(|i| Some((i.id, i.shape.as_ref()?.element_type())))
            .collect();
        for instruction in &computation.instructions {
            let name = instruction
                .metadata
                .as_ref()
                .map_or_else(String::new, |m| m.op_name.clone());
            if instruction.opcode == "custom-call" && name.contains("int8") {
                let types = [PrimitiveType::S8, PrimitiveType::S8, PrimitiveType::S32];
                found.push((name, types));
                continue;
            }
            if !matches!(instruction.opcode.as_str(), "dot" | "convolution") {
                continue;
            }
            // The gradient of a bias, which is one of ones and has no format.
            if name.contains(SUM_OF_ROWS) {
                continue;
            }
            let operand = |n: usize| types[&instruction.operand_ids[n]];
            found.push((name, [operand(0), operand(1), types[&instruction.id]]));
        }
    }
    found
}

/// What `quantization=fp8_full` multiplies on a chip with fp8, and that slices find its ranges for themselves, although a tensor
/// has one scale.
#[test]
fn dots_of_the_training_step_are_fp8_and_find_their_range_inside_a_slice() {
    let words = [
        "quantization=fp8_full",
        "compile_topology=tpu7x-8",
        "compile_topology_num_slices=2",
    ];
    let compiled = compiled(&words);
    let report = &compiled.step.report;
    assert_eq!(report.dcn_bytes.range_finding, 0, "{report}");
    assert!(report.ici_bytes.range_finding > 0, "{report}");
    let (e4m3, e5m2) = (PrimitiveType::F8e4m3fn, PrimitiveType::F8e5m2);
    let mut counts = [0; 2];
    let contractions = contractions(&compiled);
    let dots = compiled.decisions.iter().filter(|d| d.quantized());
    for decision in dots.filter(|d| d.op == "dot_general") {
        let path = format!("unet/{}/", decision.path);
        for (name, [lhs, rhs, _]) in contractions.iter().filter(|(name, _)| name.contains(&path)) {
            let is_backward = name.starts_with("backward/");
            let expected = [if is_backward { e5m2 } else { e4m3 }, e4m3];
            let mut found = [*lhs, *rhs];
            found.sort_by_key(|of| *of as i32 != expected[0] as i32);
            assert_eq!(found, expected, "{name}");
            counts[usize::from(is_backward)] += 1;
        }
    }
    assert_eq!(counts, [10, 18], "dots, and their derivatives");
}

/// One test, because each test is a process of its own and would compile the step again.
#[test]
fn every_eligible_dot_of_the_training_step_is_int8_and_finds_its_range_inside_a_slice() {
    // With the derivatives of convolutions, which are dots of patches then.
    let of_convolutions = "quantization_convolution_gradients=True";
    let compiled = int8(&[of_convolutions]);
    assert_every_eligible_dot_is_int8(&compiled);
    assert_range_finding_stays_inside_a_slice(&compiled, of_convolutions);
}

fn assert_range_finding_stays_inside_a_slice(compiled: &Compiled, option: &str) {
    let report = &compiled.step.report;
    assert_eq!(report.dcn_bytes.range_finding, 0, "{report}");
    assert!(
        report.ici_bytes.range_finding > 0,
        "each slice finds the range of its part of the batch: {report}"
    );

    // Each gradient crosses once. The slices exchange shards of the large ones, so a device sends between a
    // sixteenth of them and all of them; the loss and the norm of the gradient are all else there is.
    let gradients = 4 * report.parameters;
    let crossing = report.dcn_bytes.gradient;
    assert!(
        (gradients / 16..=gradients + gradients / 10).contains(&crossing),
        "{crossing} bytes cross for gradients of {gradients}: {report}"
    );
    let rest = report.dcn_bytes.total() - crossing;
    assert!(rest < gradients / 10, "{rest} other bytes cross: {report}");

    // Asked to find one range for the whole batch, the slices have to exchange their largest values.
    let global = int8(&["quantization_local_shard_count=1", option]);
    let report = &global.step.report;
    assert!(report.dcn_bytes.range_finding > 0, "{report}");
    // Parts that stay in their slices cost the gradients nothing: each device sends its share of the sum.
    assert!(
        crossing <= report.dcn_bytes.gradient,
        "{crossing} bytes of gradients cross by default: {report}"
    );
    let maxima = report
        .collectives
        .iter()
        .filter(|c| c.link == Link::Dcn && c.op_name.contains("range_finding"));
    assert!(maxima.count() > 0, "{report}");
}

/// The training step for `chips` as text.
fn lowered(chips: usize, more: &[&str]) -> String {
    let (_folder, path) = config_file();
    let topology = format!("compile_topology=v5e-{chips}");
    let split = format!("ici_fsdp_parallelism={chips}");
    let wide = "unet_config.block_out_channels=[128]";
    let output = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .arg("lower")
        .arg(&path)
        .args(["--step", "train", &topology, &split, wide])
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Products of a training step that give bfloat16, which all gradients of weights may be and nothing else is.
fn narrow_products(program: &str) -> usize {
    let products = program.lines().filter(|line| line.contains("dot_general"));
    let results = products.filter_map(|line| line.rsplit_once("-> "));
    results
        .filter(|(_, result)| result.contains("bf16>"))
        .count()
}

#[test]
fn devices_add_up_gradients_in_bfloat16_where_the_compiler_can() {
    let asked = ["gradient_reduce_dtype=bfloat16"];
    let narrow = narrow_products(&lowered(8, &asked));
    assert!(narrow > 10, "{narrow}");
    // Each of 16 devices has 8 of 128 rows, which fill no tile.
    let few = narrow_products(&lowered(16, &asked));
    assert!(few < narrow / 2, "{few} {narrow}");
}

/// One device rounds its gradients to the type of the activations. Of several, the compiler would round what each found before it
/// adds that up.
#[test]
fn devices_add_up_gradients_in_float32_by_default() {
    let asked = ["gradient_reduce_dtype=float32"];
    let program = lowered(8, &[]);
    assert_eq!(narrow_products(&program), 0);
    assert!(program == lowered(8, &asked));
    assert!(lowered(1, &[]) != lowered(1, &asked));
}

fn assert_every_eligible_dot_is_int8(compiled: &Compiled) {
    let report = &compiled.step.report;
    let contractions = contractions(compiled);
    let (mut forward, mut dlhs, mut drhs) = (0, 0, 0);
    let quantized: Vec<_> = compiled
        .decisions
        .iter()
        .filter(|d| d.quantized())
        .collect();
    assert!(quantized.iter().any(|d| d.op == "convolution"));
    for decision in quantized {
        let path = format!("unet/{}/", decision.path);
        for (name, types) in contractions.iter().filter(|(name, _)| name.contains(&path)) {
            let is_backward = name.starts_with("backward/");
            assert_eq!(
                *types,
                [PrimitiveType::S8, PrimitiveType::S8, PrimitiveType::S32],
                "{name}"
            );
            match (is_backward, name.contains("/gradient/")) {
                (false, _) => forward += 1,
                (true, false) => dlhs += 1,
                (true, true) => drhs += 1,
            }
        }
    }
    let count = |op| {
        let quantized = compiled.decisions.iter().filter(|d| d.quantized());
        quantized.filter(|d| d.op == op).count()
    };
    let dots = count("dot_general");
    assert_eq!(dots, 10, "the linear layers of one transformer block");
    let all = dots + count("convolution");
    assert_eq!(forward, all);
    assert_eq!(drhs, all);
    // The cross attention's keys and values come from the prompt, which has no gradient.
    assert_eq!(dlhs, all - 2);
    let share = report.int8_flops_share;
    assert!((0.2..1.0).contains(&share), "{share}");
}

fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .arg("compile")
        .args(arguments)
        .output()
        .unwrap()
}

fn refused(arguments: &[&str], code: i32) -> String {
    let output = program(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty());
    // libtpu's own log is not for users.
    assert!(!error.contains("hugepage"), "{error}");
    error
}

/// libtpu takes SIGTERM for a crash, of which it writes a trace.
#[test]
fn a_stop_ends_the_compiler_without_a_trace() {
    tpu_plugin();
    let folder = tempfile::tempdir().unwrap();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/base15.yml");
    let mut child = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .args(["compile", recipe, "compile_topology=v5e-1"])
        .current_dir(folder.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.starts_with("memory of each device: weights"), "{line}");
    let id = child.id().to_string();
    assert!(Command::new("kill").arg(id).status().unwrap().success());
    assert_eq!(child.wait().unwrap().signal(), Some(15));
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[test]
fn devices_that_are_not_here_are_refused_with_a_remedy() {
    if maxdiff::pjrt::has_tpu() {
        return;
    }
    let (_folder, config) = config_file();
    let error = refused(&[config.to_str().unwrap(), "hardware=tpu"], 1);
    for part in ["hardware=tpu: this machine has none", "compile_topology"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn the_report_and_the_bundle_are_written() {
    let (folder, config) = config_file();
    let bundle = folder.path().join("step.bundle");
    let arguments = [
        config.to_str().unwrap(),
        "compile_topology=v5e-4",
        "compile_topology_num_slices=2",
        "--step=train",
        "--json",
        "--output",
        bundle.to_str().unwrap(),
    ];
    let output = program(&arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for pointer in [
        "/parameters",
        "/flops",
        "/memory/argument",
        "/memory/output",
        "/memory/temp",
        "/memory/code",
        "/memory/peak",
        "/memory/hbm_limit",
        "/ici_bytes/range_finding",
        "/dcn_bytes/gradient",
        "/dcn_bytes/parameter",
        "/dcn_bytes/activation",
        "/dcn_bytes/other",
        "/collectives/0/kind",
        "/collectives/0/bytes",
        "/collectives/0/link",
        "/collectives/0/purpose",
        "/collectives/0/op_name",
        "/predicted_ms/total",
        "/predicted_ms/by_kind",
        "/compile_seconds",
    ] {
        let value = report.pointer(pointer);
        assert!(value.is_some_and(|v| !v.is_null()), "{pointer}: {report}");
    }
    assert_eq!(report["fits"], true);
    assert_eq!(report["topology"]["num_devices"], 8);
    // Nothing is computed twice, so the program does what the model needs, less what the compiler finds to be known.
    let flops = report["flops"].as_object().unwrap().values();
    let flops: f64 = flops.map(|flops| flops.as_f64().unwrap()).sum();
    let training = |name: &str| report["training"][name].as_f64().unwrap();
    let share = training("model_flops") / flops;
    assert!((0.8..1.25).contains(&share), "{share}: {report}");
    let seconds = report["predicted_ms"]["total"].as_f64().unwrap() / 1e3;
    let utilization = training("model_flops") / 197e12 / seconds;
    let found = training("model_flops_utilization");
    assert!(
        (found / utilization - 1.0).abs() < 1e-6,
        "{found}: {report}"
    );
    assert_eq!(
        report["estimated_memory"]["activations"]
            .as_u64()
            .map(|bytes| bytes > 0),
        Some(true)
    );

    let read = Bundle::read(&bundle).unwrap();
    let [step] = &read.header.programs[..] else {
        panic!("a training step is one program");
    };
    assert_eq!(step.payload, PayloadKind::Executable);
    assert_eq!(read.header.target.num_slices, 2);
    assert_eq!(read.header.target.device_assignment.len(), 8);
    assert!(read.payload.len() > 1000);
    let weights = step.inputs.iter();
    assert!(
        weights
            .clone()
            .any(|i| i.name == "unet/conv_in.weight" && i.alias.is_some())
    );
    assert!(
        weights
            .clone()
            .any(|i| i.sharding[..] == [vec!["data", "fsdp"], vec![], vec![], vec![]])
    );

    // A second run replaces nothing, and says so before it compiles.
    let before = std::fs::read(&bundle).unwrap();
    let error = refused(&arguments, 2);
    assert!(error.contains("exists already"), "{error}");
    assert_eq!(std::fs::read(&bundle).unwrap(), before);
}

#[test]
fn what_cannot_be_compiled_for_is_refused_with_advice() {
    let (folder, config) = config_file();
    let config = config.to_str().unwrap();
    let output = folder.path().join("step.bundle");
    let refuse = |more: &[&str], code| {
        let mut arguments = vec![config, "--output", output.to_str().unwrap()];
        arguments.extend(more);
        let error = refused(&arguments, code);
        assert!(!Path::exists(&output), "{more:?}");
        error
    };
    let error = refuse(&["compile_topology=v5e-17"], 2);
    assert!(
        error.contains("v5e-16") && error.contains("v5e-17"),
        "{error}"
    );
    let error = refuse(&["compile_topology=tpu7x-8", "quantization=int8"], 2);
    assert!(error.contains("int8") && error.contains("fp8"), "{error}");
    let error = refuse(&["compile_topology=v5e-16", "ici_tensor_parallelism=3"], 2);
    assert!(error.contains("16") && error.contains('3'), "{error}");
    let error = refuse(&["compile_topology=v5e-16", "ici_context_parallelism=4"], 2);
    assert!(
        error.contains("mesh axis context (4) would all do the same work"),
        "{error}"
    );
    let error = refuse(
        &[
            "compile_topology=v5e-16",
            "quantization=int8",
            "quantization_local_shard_count=3",
            "--step=train",
        ],
        2,
    );
    assert!(error.contains("quantization_local_shard_count"), "{error}");
    let error = refuse(&["compile_topology=v5e-16", "hardware=cpu"], 2);
    assert!(error.contains("hardware=cpu"), "{error}");
    let error = refuse(&["compile_topology=v5e-16", "num_devices=4"], 2);
    assert!(error.contains("num_devices=4"), "{error}");
    let error = refuse(&["compile_topology_num_slices=2"], 2);
    assert!(error.contains("compile_topology"), "{error}");
}

#[test]
fn recomputation_takes_less_memory() {
    // Scores of several layers, too large for the memory on the chip, are what there is to keep.
    let layers = [
        "compile_topology=v5e-1",
        "resolution=64",
        "unet_config.attention_head_dim=16",
        "unet_config.transformer_layers_per_block=3",
    ];
    let temp = |policy: &str| {
        let compiled = compiled(&[&layers[..], &[policy]].concat());
        compiled.step.report.memory.temp
    };
    let (kept, recomputed) = (temp("remat_policy=NONE"), temp("remat_policy=FULL"));
    assert!(
        2 * recomputed < kept,
        "{recomputed} bytes with recomputation, {kept} without"
    );
}

#[test]
fn a_mesh_axis_takes_part_of_a_physical_one_if_allowed() {
    let axes = ["compile_topology=v5e-256", "ici_fsdp_parallelism=4"];
    let (folder, config) = config_file();
    let output = folder.path().join("step.bundle");
    let mut arguments = vec![
        config.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ];
    arguments.extend(axes);
    let error = refused(&arguments, 2);
    assert!(error.contains("allow_split_physical_axes=True"), "{error}");
    let allowed = compiled(&[&axes[..], &["allow_split_physical_axes=True"]].concat());
    assert_eq!(allowed.header.target.mesh["fsdp"], 4);
    assert_eq!(allowed.header.target.device_assignment.len(), 256);
}

/// What `compile` says of a tiny denoising step whose configuration is changed so that it fits no v5e.
fn too_large(change: [&str; 2], more: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("big.yml");
    std::fs::write(&config, TINY.replace(change[0], change[1])).unwrap();
    let output = folder.path().join("step.bundle");
    let words = ["--step=denoise", "--output"];
    let arguments = [
        &[config.to_str().unwrap()],
        &words[..],
        &[output.to_str().unwrap()],
        more,
    ];
    let error = refused(&arguments.concat(), 1);
    assert!(!output.exists());
    for part in [
        "does not fit v5e-",
        "which has 15.75 GiB",
        "weights_dtype=bfloat16",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    error
}

#[test]
fn a_program_whose_weights_do_not_fit_is_not_compiled() {
    // The cross attention's two projections take 16 GiB each.
    let error = too_large(
        ["[32]", "[4096]"],
        &[
            "compile_topology=v5e-1",
            "unet_config.cross_attention_dim=1048576",
        ],
    );
    for part in [
        "the program that prepares weights for the denoise program",
        "needs at least 16.00 GiB",
        "weights take 16.00 GiB",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("The compiler says"), "{error}");
}

/// Scores of attention over 65,536 positions, which programs over several devices keep.
#[test]
fn a_program_too_large_for_its_device_says_so() {
    let error = too_large(
        ["resolution: 8", "resolution: 256"],
        &["compile_topology=v5e-4"],
    );
    for part in ["the denoise program may not fit", "The compiler says"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// SDXL's training step over 1,024 chips, in the layout that MaxDiffusion's recipe asks for.
#[test]
fn state_that_no_chip_holds_is_refused_with_a_layout_that_fits() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/base_xl.yml");
    let error = refused(
        &[
            recipe,
            "compile_topology=v5e-64",
            "compile_topology_num_slices=16",
            "--step=train",
        ],
        1,
    );
    for part in [
        "the train program does not fit 16 slices of v5e-64",
        "weights take 9.56 GiB and optimizer state 19.13 GiB",
        "Try ici_fsdp_parallelism=64 (weights and state then take",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}
