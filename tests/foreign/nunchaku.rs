//! nunchaku's files of SVDQuant (`scripts/oracles/nunchaku_files.py`): every number of a layer is one of its name, row and column.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{RecordedPipeline, distance, golden};
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention};
use maxdiff::host_tensor::HostTensor;
use maxdiff::shape::Shape;
use maxdiff::weights::{Checkpoint, TensorView, save};

use super::check_products;

const INT4: &str = "pipeline_nunchaku/transformer/diffusion_pytorch_model.safetensors";
const FP4: &str = "nunchaku/fp4.safetensors";
const SDXL: &str = "nunchaku/sdxl.safetensors";
const DOUBLE: &str = "transformer_blocks.0";
const SINGLE: &str = "single_transformer_blocks.0";
const HIDDEN: usize = 128;
const RANK: usize = 16;
const GELU_SHIFT: f64 = 0.171875;
const NUMBERS: [f64; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// A layer as it was packed.
struct Numbers {
    inputs: usize,
    salt: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Int4,
    /// With a scale for each output feature, or with one.
    Fp4 {
        channels: bool,
    },
    Awq,
}

fn numbers(name: &str, inputs: usize, kind: Kind) -> Numbers {
    Numbers {
        inputs,
        salt: name.bytes().map(usize::from).sum(),
        kind,
    }
}

impl Numbers {
    fn code(&self, o: usize, i: usize) -> usize {
        let count = if self.kind == Kind::Int4 { 15 } else { 16 };
        (o * 7 + i * 13 + o * i % 11 + self.salt) % count
    }

    fn scale(&self, o: usize, i: usize) -> f64 {
        let scale = |group: usize| (8 + (o * 5 + i / group * 3 + self.salt) % 8) as f64;
        match self.kind {
            Kind::Int4 | Kind::Awq => scale(64) / 512.0,
            Kind::Fp4 { channels: true } => scale(16) / 8.0 * (1 + o % 4) as f64 / 64.0,
            Kind::Fp4 { channels: false } => scale(16) / 8.0 * (1 + self.salt % 4) as f64 / 64.0,
        }
    }

    fn smooth(&self, i: usize) -> f64 {
        (4 + (i * 3 + self.salt) % 8) as f64 / 8.0
    }

    fn down(&self, r: usize, i: usize) -> f64 {
        ((r * 5 + i * 11 + self.salt) % 17) as f64 / 64.0 - 0.125
    }

    fn up(&self, o: usize, r: usize) -> f64 {
        ((o * 3 + r * 7 + self.salt) % 13) as f64 / 64.0 - 6.0 / 64.0
    }

    fn bias(&self, o: usize) -> f64 {
        ((o * 3 + self.salt) % 9) as f64 / 32.0 - 0.125
    }

    /// What the codes stand for, for what is not divided.
    fn of_codes(&self, o: usize, i: usize) -> f64 {
        let (code, scale) = (self.code(o, i), self.scale(o, i));
        match self.kind {
            Kind::Int4 => (code as f64 - 7.0) * scale / self.smooth(i),
            Kind::Fp4 { .. } => NUMBERS[code] * scale / self.smooth(i),
            Kind::Awq => code as f64 * scale - 7.0 * scale,
        }
    }

    fn weight(&self, o: usize, i: usize) -> f64 {
        let product = |r| self.up(o, r) * self.down(r, i);
        match self.kind {
            Kind::Awq => self.of_codes(o, i),
            Kind::Int4 | Kind::Fp4 { .. } => {
                self.of_codes(o, i) + (0..RANK).map(product).sum::<f64>()
            }
        }
    }

    /// The bias of a layer whose input was GELU's result and a constant.
    fn after_gelu(&self, o: usize) -> f64 {
        let of_constant: f64 = (0..self.inputs).map(|i| self.of_codes(o, i)).sum();
        self.bias(o) + of_constant * GELU_SHIFT
    }
}

fn read(file: &Checkpoint, name: &str) -> HostTensor {
    file.read(name).unwrap_or_else(|e| panic!("{e}"))
}

/// A tensor has these numbers, row after row.
#[track_caller]
fn check(file: &Checkpoint, name: &str, dims: [usize; 2], expected: impl Fn(usize, usize) -> f64) {
    let found = read(file, name);
    let [rows, columns] = dims;
    assert_eq!(
        found.shape.count(),
        rows * columns,
        "{name} {}",
        found.shape
    );
    for (at, found) in found.to_f64_vec().unwrap().into_iter().enumerate() {
        let expected = expected(at / columns, at % columns);
        let error = (found - expected).abs();
        assert!(
            error <= 1e-6 * expected.abs().max(0.1),
            "{name} {at}: {found} {expected}"
        );
    }
}

/// The weight and the bias of the layer `name`, rows from `start` on of the layer that was packed.
#[track_caller]
fn check_rows(file: &Checkpoint, name: &str, layer: &Numbers, start: usize, rows: usize) {
    check(
        file,
        &format!("{name}.weight"),
        [rows, layer.inputs],
        |o, i| layer.weight(start + o, i),
    );
    check(file, &format!("{name}.bias"), [rows, 1], |o, _| {
        layer.bias(start + o)
    });
}

#[test]
fn weights_are_those_that_were_packed() {
    let file = Checkpoint::open(&golden(INT4)).unwrap();
    let of =
        |block: &str, name: &str, inputs| numbers(&format!("{block}.{name}"), inputs, Kind::Int4);
    for (block, packed, names) in [
        (DOUBLE, "qkv_proj", ["to_q", "to_k", "to_v"]),
        (
            DOUBLE,
            "qkv_proj_context",
            ["add_q_proj", "add_k_proj", "add_v_proj"],
        ),
        (SINGLE, "qkv_proj", ["to_q", "to_k", "to_v"]),
    ] {
        let layer = of(block, packed, HIDDEN);
        for (at, name) in names.iter().enumerate() {
            check_rows(
                &file,
                &format!("{block}.attn.{name}"),
                &layer,
                at * HIDDEN,
                HIDDEN,
            );
        }
    }
    for (block, packed, name, outputs) in [
        (DOUBLE, "out_proj", "attn.to_out.0", HIDDEN),
        (DOUBLE, "out_proj_context", "attn.to_add_out", HIDDEN),
        (DOUBLE, "mlp_fc1", "ff.net.0.proj", 4 * HIDDEN),
        (
            DOUBLE,
            "mlp_context_fc1",
            "ff_context.net.0.proj",
            4 * HIDDEN,
        ),
        (SINGLE, "mlp_fc1", "proj_mlp", 4 * HIDDEN),
    ] {
        let layer = of(block, packed, HIDDEN);
        check_rows(&file, &format!("{block}.{name}"), &layer, 0, outputs);
    }
    for (packed, name) in [
        ("mlp_fc2", "ff.net.2"),
        ("mlp_context_fc2", "ff_context.net.2"),
    ] {
        let layer = of(DOUBLE, packed, 4 * HIDDEN);
        let name = format!("{DOUBLE}.{name}");
        check(
            &file,
            &format!("{name}.weight"),
            [HIDDEN, 4 * HIDDEN],
            |o, i| layer.weight(o, i),
        );
        check(&file, &format!("{name}.bias"), [HIDDEN, 1], |o, _| {
            layer.after_gelu(o)
        });
    }
    let first = of(SINGLE, "out_proj", HIDDEN);
    let second = of(SINGLE, "mlp_fc2", 4 * HIDDEN);
    let name = format!("{SINGLE}.proj_out");
    check(
        &file,
        &format!("{name}.weight"),
        [HIDDEN, 5 * HIDDEN],
        |o, i| match i {
            ..HIDDEN => first.weight(o, i),
            _ => second.weight(o, i - HIDDEN),
        },
    );
    check(&file, &format!("{name}.bias"), [HIDDEN, 1], |o, _| {
        first.bias(o) + second.after_gelu(o)
    });
    for (block, name, vectors) in [
        (DOUBLE, "norm1.linear", 6),
        (DOUBLE, "norm1_context.linear", 6),
        (SINGLE, "norm.linear", 3),
    ] {
        let name = format!("{block}.{name}");
        let layer = numbers(&name, HIDDEN, Kind::Awq);
        check_rows(&file, &name, &layer, 0, vectors * HIDDEN);
    }
    // What is stored as it is, under the names of diffusers.
    let names: Vec<&str> = file.names().filter(|name| name.contains("norm_")).collect();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(
        names
            .iter()
            .all(|name| name.contains(".attn.norm_") || name.starts_with("norm_out."))
    );
    let left: Vec<&str> = file
        .names()
        .filter(|name| name.contains("scales") || name.contains("lora"))
        .collect();
    assert_eq!(left, [""; 0]);
}

#[test]
fn weights_are_those_that_were_packed_in_fp4_and_for_a_unet() {
    let block = "single_transformer_blocks.3";
    let file = Checkpoint::open(&golden(FP4)).unwrap();
    let layer = numbers(
        &format!("{block}.attn.to_qkv"),
        HIDDEN,
        Kind::Fp4 { channels: true },
    );
    for (at, name) in ["to_q", "to_k", "to_v"].iter().enumerate() {
        check_rows(
            &file,
            &format!("{block}.attn.{name}"),
            &layer,
            at * HIDDEN,
            HIDDEN,
        );
    }
    let fp4 = Kind::Fp4 { channels: false };
    let first = numbers(&format!("{block}.attn.to_out"), HIDDEN, fp4);
    let second = numbers(&format!("{block}.mlp_fc2"), 2 * HIDDEN, fp4);
    check(
        &file,
        &format!("{block}.proj_out.weight"),
        [HIDDEN, 3 * HIDDEN],
        |o, i| match i {
            ..HIDDEN => first.weight(o, i),
            _ => second.weight(o, i - HIDDEN),
        },
    );
    // fp4 has a sign: nothing is added to what GELU leaves.
    check(
        &file,
        &format!("{block}.proj_out.bias"),
        [HIDDEN, 1],
        |o, _| first.bias(o) + second.bias(o),
    );

    let block = "down_blocks.1.attentions.0.transformer_blocks.0";
    let file = Checkpoint::open(&golden(SDXL)).unwrap();
    let layer = numbers(&format!("{block}.attn1.to_qkv"), HIDDEN, Kind::Int4);
    for (at, name) in ["to_q", "to_k", "to_v"].iter().enumerate() {
        check_rows(
            &file,
            &format!("{block}.attn1.{name}"),
            &layer,
            at * HIDDEN,
            HIDDEN,
        );
    }
    let name = format!("{block}.ff.net.2");
    let layer = numbers(&name, 2 * HIDDEN, Kind::Int4);
    check_rows(&file, &name, &layer, 0, HIDDEN);
}

/// Codes, scales, factors and smoothing stay as they are stored, in this program's own layout.
#[test]
fn parts_are_those_of_this_programs_checkpoints() {
    let mut file = Checkpoint::open(&golden(INT4)).unwrap();
    file.pack();
    let layers = file.quantization().unwrap().layers.clone();
    assert_eq!(layers.len(), 20);
    let layer = numbers(&format!("{DOUBLE}.qkv_proj"), HIDDEN, Kind::Int4);
    let name = format!("{DOUBLE}.attn.to_k");
    let stored = layers[&name];
    assert_eq!(
        (stored.low_rank, stored.smoothed, stored.activation),
        (Some(RANK), true, None)
    );
    assert_eq!(stored.weight.granularity, Granularity::Group(64));
    assert_eq!(stored.weight.convention, NumericsConvention::Quark);
    let at = |leaf: &str| format!("{name}.{leaf}");
    let codes = file.info(&at("weight")).unwrap();
    assert_eq!(codes, &Shape::new(DType::S4, [HIDDEN, HIDDEN]));
    check(&file, &at("weight"), [HIDDEN, HIDDEN], |o, i| {
        layer.code(HIDDEN + o, i) as f64 - 7.0
    });
    check(&file, &at("weight_scale"), [HIDDEN, 2], |o, g| {
        layer.scale(HIDDEN + o, 64 * g)
    });
    check(&file, &at("smooth_factor"), [HIDDEN, 1], |i, _| {
        layer.smooth(i)
    });
    check(&file, &at("svd_down.weight"), [RANK, HIDDEN], |r, i| {
        layer.down(r, i) * layer.smooth(i)
    });
    check(&file, &at("svd_up.weight"), [HIDDEN, RANK], |o, r| {
        layer.up(HIDDEN + o, r)
    });

    let joined = layers[&format!("{SINGLE}.proj_out")];
    assert_eq!(joined.low_rank, Some(2 * RANK));
    let second = numbers(&format!("{SINGLE}.mlp_fc2"), 4 * HIDDEN, Kind::Int4);
    let first = numbers(&format!("{SINGLE}.out_proj"), HIDDEN, Kind::Int4);
    let down = format!("{SINGLE}.proj_out.svd_down.weight");
    check(&file, &down, [2 * RANK, 5 * HIDDEN], |r, i| match (r, i) {
        (..RANK, ..HIDDEN) => first.down(r, i) * first.smooth(i),
        (RANK.., HIDDEN..) => second.down(r - RANK, i - HIDDEN) * second.smooth(i - HIDDEN),
        _ => 0.0,
    });
    let modulation = layers[&format!("{DOUBLE}.norm1.linear")];
    assert_eq!((modulation.low_rank, modulation.smoothed), (None, false));
    assert!(modulation.weight.zero_point && modulation.weight.element == DType::U4);

    let open = || Checkpoint::open(&golden(INT4)).unwrap();
    let weight = format!("{SINGLE}.proj_out.weight");
    let floats = read(&open(), &weight);
    file.widen();
    assert_eq!(read(&file, &weight), floats);
}

#[test]
fn programs_multiply_what_was_packed() {
    let block = "single_transformer_blocks.3";
    let layers = ["attn.to_k", "attn.to_q", "attn.to_v", "proj_out"];
    let layers = layers.map(|name| format!("{block}.{name}"));
    check_products(&golden(FP4), &layers.each_ref().map(String::as_str));
    let block = "down_blocks.1.attentions.0.transformer_blocks.0";
    let layers = ["attn1.to_k", "attn1.to_q", "attn1.to_v", "ff.net.2"];
    let layers = layers.map(|name| format!("{block}.{name}"));
    check_products(&golden(SDXL), &layers.each_ref().map(String::as_str));
}

const FLUX: RecordedPipeline = RecordedPipeline {
    name: "nunchaku",
    recorded: "flux_schnell",
    recipe: "flux-schnell",
    shared: &[
        ("vae", "pipeline_flux_dev/vae"),
        ("text_encoder", "pipeline_flux_dev/text_encoder"),
        ("text_encoder_2", "pipeline_flux_dev/text_encoder_2"),
    ],
    clip_tokenizers: &["tokenizer"],
    t5_tokenizer: Some(("tokenizer_2", "tokenizer.json")),
};

/// A transformer draws from its packed weights what it draws from floats, and with activations in int4 something near.
#[test]
fn a_transformer_draws_from_nunchakus_file() {
    let samples = |words: &[&str]| -> Vec<f64> {
        let made = FLUX.generate(words).unwrap();
        let samples = made.samples.iter();
        samples.flat_map(|s| s.to_f64_vec().unwrap()).collect()
    };
    let packed = samples(&[]);
    let error = distance(&packed, &samples(&["dequantize=True"]));
    assert!(error < 1e-5, "{error:e}");
    let file = format!("denoiser_model_name_or_path={}", golden(INT4).display());
    assert_eq!(packed, samples(&[&file]));
    let rounded = samples(&["quantization=svdquant_w4a4"]);
    let error = distance(&packed, &rounded);
    assert!((1e-4..0.5).contains(&error), "{error:e}");
    FLUX.refuses(&[("quantization=int8", "is stored as int4")]);
}

/// Writes a recorded file, changed by `change`; the error of opening it.
fn error(name: &str, change: impl FnOnce(&mut Tensors)) -> String {
    error_with(name, "int4", change)
}

type Tensors = BTreeMap<String, HostTensor>;

fn error_with(name: &str, dtype: &str, change: impl FnOnce(&mut Tensors)) -> String {
    let bytes = std::fs::read(golden(name)).unwrap();
    let recorded = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str, view: safetensors::tensor::TensorView<'_>| {
        let dtype = match view.dtype() {
            safetensors::Dtype::I8 => DType::S8,
            safetensors::Dtype::I32 => DType::S32,
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::F8_E4M3 => DType::F8E4M3Fn,
            other => panic!("{other:?}"),
        };
        let tensor = HostTensor::new(Shape::new(dtype, view.shape()), view.data().to_vec());
        (name.to_owned(), tensor.unwrap())
    };
    let mut tensors: Tensors = recorded
        .iter()
        .map(|(name, view)| tensor(name, view))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("svdq.safetensors");
    let group = if dtype == "int4" { 64 } else { 16 };
    let described = format!(
        r#"{{"method": "svdquant", "weight": {{"dtype": "{dtype}", "group_size": {group}}}}}"#
    );
    save(
        &path,
        views,
        &BTreeMap::from([("quantization_config".to_owned(), described)]),
    )
    .unwrap();
    opened(&path)
}

fn opened(path: &Path) -> String {
    Checkpoint::open(path).unwrap_err().to_string()
}

#[test]
fn files_that_are_not_whole_are_refused() {
    let at = |leaf: &str| format!("{SINGLE}.{leaf}");
    let moved = |tensors: &mut Tensors, from: &str, to: &str| {
        let tensor = tensors.remove(from).unwrap();
        tensors.insert(to.to_owned(), tensor);
    };
    let without = |name: &str| error(INT4, |tensors| drop(tensors.remove(name).unwrap()));
    for name in [
        "qkv_proj.wscales",
        "qkv_proj.smooth",
        "qkv_proj.lora_up",
        "norm.linear.wzeros",
        "norm.linear.bias",
    ] {
        let found = without(&at(name));
        assert!(found.contains(name.rsplit('.').next().unwrap()), "{found}");
    }
    let half = error(INT4, |tensors| {
        tensors.retain(|name, _| !name.contains("single_transformer_blocks.0.out_proj"))
    });
    assert!(half.contains("one of out_proj and mlp_fc2"), "{half}");
    let other = error(INT4, |tensors| {
        moved(tensors, &at("mlp_fc1.qweight"), &at("img_mlp.qweight"))
    });
    assert!(
        other.contains("img_mlp") && other.contains("of FLUX.1 and of SDXL"),
        "{other}"
    );
    let shapes = [
        ("qkv_proj.qweight", vec![64, 384], "multiples of 128"),
        (
            "qkv_proj.wscales",
            vec![384, 2],
            "expected bf16 or f16 with the dimensions [2, 384]",
        ),
        ("qkv_proj.lora_up", vec![768, 8], "[384, 16]"),
        ("qkv_proj.smooth", vec![1, 128], "[128]"),
        ("norm.linear.qweight", vec![64, 96], "expected"),
        ("norm.linear.wzeros", vec![8, 768], "[8, 384]"),
        ("norm.linear.bias", vec![384, 1], "[384]"),
    ];
    for (name, dims, expected) in shapes {
        let found = error(INT4, |tensors| {
            tensors.get_mut(&at(name)).unwrap().shape.dims = dims;
        });
        assert!(found.contains(expected), "{name}: {found}");
    }
    let disagrees = error_with(INT4, "fp4_e2m1_all", |_| {});
    assert!(
        disagrees.contains("says fp4_e2m1_all in groups of 16"),
        "{disagrees}"
    );
    let channels = error(INT4, |tensors| {
        let bias = tensors[&at("qkv_proj.bias")].clone();
        tensors.insert(at("qkv_proj.wcscales"), bias);
    });
    assert!(
        channels.contains("int4 with scales for channels"),
        "{channels}"
    );
    let method = {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("svdq.safetensors");
        let data = [0; 128 * 64];
        let view = TensorView {
            name: "transformer_blocks.0.qkv_proj.qweight",
            dtype: DType::S8,
            dims: &[128, 64],
            data: &data,
        };
        let described = r#"{"method": "other", "weight": {"dtype": "int4", "group_size": 64}}"#;
        save(
            &path,
            [view],
            &BTreeMap::from([("quantization_config".to_owned(), described.to_owned())]),
        )
        .unwrap();
        opened(&path)
    };
    assert!(method.contains("the method \"other\""), "{method}");
}
