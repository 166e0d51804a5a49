//! AMD Quark's export (`export_safetensors(weight_format="real_quantized")` of amd-quark 0.13), written: names, types and order of
//! packed weights and their scales, and the description in `config.json`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, TensorFormat};
use crate::host_tensor::HostTensor;
use crate::quant::{QuantizedWeight, StoredLayer, scale_dims};
use crate::shape::Shape;
use crate::weights::quantized::Quantization;
use crate::weights::stored::quark::{DOWN, REMAINDER, UP, factor_name};

/// The version that the layout is of.
const VERSION: &str = "0.13";
/// Quark's default of the activations' share in the factors of features.
const DEFAULT_ALPHA: f64 = 0.5;
/// By default Quark decomposes no matrix with a side below this.
const SMALLEST_SIDE: usize = 256;
/// Which of eight values is in each half byte of a word, from the lowest on.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Why a layer has no place in this layout.
///
/// # Errors
/// Says what the layout has instead.
pub fn check_layer(shape: &Shape, layer: &StoredLayer) -> Result<(), String> {
    let weight = layer.weight;
    if kind(weight).is_none() {
        return Err(format!(
            "{} in {}'s numerics is not exported so: exported are in quark's numerics int8 with one scale or one a channel, int4 with one \
             a channel or in groups, and fp8 with one scale; mxfp4; and nvfp4",
            weight.element, weight.convention
        ));
    }
    if shape.rank() != 2 {
        return Err(
            "Quark packs linear layers alone: leave convolutions in float by a rule with mode none"
                .to_owned(),
        );
    }
    if layer.activation.is_some() || layer.smoothed {
        return Err(
            "quantized activations and factors of activations are not written in this layout: take a mode of weights alone, in \
             svd_order=quark"
                .to_owned(),
        );
    }
    let packed = match weight.granularity {
        Granularity::Group(_) => shape.dims[0],
        Granularity::Channel
        | Granularity::Tensor
        | Granularity::Part(_)
        | Granularity::Feature => shape.dims[1],
    };
    if kind(weight) == Some(Kind::Int4) && !packed.is_multiple_of(8) {
        return Err(format!(
            "eight int4 values share a word, and there are {packed}: leave the layer in float by a rule with mode none"
        ));
    }
    Ok(())
}

/// What of Quark's formats it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Int8,
    Int4,
    Fp8,
    MxFp4,
    NvFp4,
}

fn kind(weight: TensorFormat) -> Option<Kind> {
    use Granularity::{Channel, Group, Tensor};
    match (weight.convention, weight.element, weight.granularity) {
        (NumericsConvention::Quark, DType::S8, Tensor | Channel) => Some(Kind::Int8),
        (NumericsConvention::Quark, DType::S4, Channel | Group(_)) => Some(Kind::Int4),
        (NumericsConvention::Quark, DType::F8E4M3Fn, Tensor) => Some(Kind::Fp8),
        (NumericsConvention::Mx, DType::U4, Group(32)) => Some(Kind::MxFp4),
        (NumericsConvention::Nv, DType::U4, Group(16)) => Some(Kind::NvFp4),
        _ => None,
    }
}

/// How a layer's low-rank product was chosen.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decomposition {
    pub rank: usize,
    /// As of [`crate::quant::LowRankOptions`].
    pub alphas: Vec<f64>,
}

/// Whether a low-rank product stands beside the weight of a layer.
fn has_product(stored: &Quantization, layer: &str) -> bool {
    let stored = stored.layers.get(layer);
    stored.is_some_and(|stored| stored.low_rank.is_some())
}

/// The path under which a tensor that is not a quantized weight stands: a bias moves with the weight that a low-rank product is
/// beside.
pub(super) fn path_of<'a>(name: &'a str, stored: &Quantization) -> Cow<'a, str> {
    let layer = name.strip_suffix(".bias");
    match layer.filter(|layer| has_product(stored, layer)) {
        Some(layer) => Cow::Owned(format!("{layer}{REMAINDER}.bias")),
        None => Cow::Borrowed(name),
    }
}

/// The tensors of a layer whose weight has this shape: the weight's in the order of the layout's names, then the factors down and
/// up of a low-rank product of this rank.
pub(super) fn tensors(
    layer: &str,
    shape: &Shape,
    weight: TensorFormat,
    rank: Option<usize>,
) -> Option<Vec<(String, Shape)>> {
    let &[out, inputs] = &shape.dims[..] else {
        return None;
    };
    let Some(rank) = rank else {
        return packed(layer, [out, inputs], weight);
    };
    let mut tensors = packed(&format!("{layer}{REMAINDER}"), [out, inputs], weight)?;
    for (factor, dims) in [(DOWN, [rank, inputs]), (UP, [out, rank])] {
        tensors.push((factor_name(layer, factor), Shape::new(DType::BF16, dims)));
    }
    Some(tensors)
}

/// The tensors of a weight `[out, in]`, in the order of the layout's names.
fn packed(
    layer: &str,
    [out, inputs]: [usize; 2],
    weight: TensorFormat,
) -> Option<Vec<(String, Shape)>> {
    let shape = Shape::new(DType::F32, [out, inputs]);
    let name = format!("{layer}.weight");
    let beside = |leaf: &str| format!("{layer}.weight_quantizer.{leaf}");
    let mut dims = scale_dims(&shape.dims, weight.granularity)?;
    let scale = weight.scale_type_in_files();
    let is_grouped = matches!(weight.granularity, Granularity::Group(_));
    Some(match kind(weight)? {
        Kind::Int8 => vec![
            (name, shape.with_dtype(DType::S8)),
            (beside("scale"), Shape::new(scale, dims.clone())),
            (beside("zero_point"), Shape::new(DType::S8, dims)),
        ],
        Kind::Fp8 => vec![
            (name, shape.with_dtype(DType::F8E4M3Fn)),
            (beside("scale"), Shape::new(scale, dims)),
        ],
        Kind::Int4 => {
            let words = match is_grouped {
                true => [inputs, out.div_ceil(8)],
                false => [out, inputs.div_ceil(8)],
            };
            dims.reverse();
            let mut zero_points = dims.clone();
            if let Some(last) = zero_points.last_mut() {
                *last = last.div_ceil(8);
            }
            vec![
                (name, Shape::new(DType::S32, words)),
                (beside("scale"), Shape::new(scale, dims)),
                (beside("zero_point"), Shape::new(DType::S32, zero_points)),
            ]
        }
        Kind::MxFp4 => vec![
            (name, Shape::new(DType::U8, [out, inputs / 2])),
            (beside("scale"), Shape::new(DType::U8, dims)),
        ],
        Kind::NvFp4 => vec![
            (name, Shape::new(DType::U8, [out, inputs / 2])),
            (beside("0.scale"), Shape::new(DType::F8E4M3Fn, dims)),
            (beside("1.scale"), Shape::scalar(DType::F32)),
        ],
    })
}

/// The bytes of a weight's [`tensors`], in their order.
pub(super) fn bytes(weight: &QuantizedWeight) -> Vec<Vec<u8>> {
    let format = weight.format;
    let zero_points = || match &weight.zero_point {
        Some(zero_point) => zero_point.data.clone(),
        None => vec![0; weight.scale.shape.count()],
    };
    let scale = || weight.scale.data.clone();
    match kind(format) {
        Some(Kind::Int8) => vec![weight.values.data.clone(), scale(), zero_points()],
        Some(Kind::Int4) => {
            let dims = &weight.values.shape.dims;
            let of_scale = &weight.scale.shape.dims;
            let integers = weight.values.whole_bytes();
            match format.granularity {
                Granularity::Group(_) => vec![
                    words(&transposed(&integers, dims, 1), dims[0]),
                    transposed(
                        &scale(),
                        of_scale,
                        weight.scale.shape.dtype.storage_bytes(1),
                    ),
                    words(&transposed(&zero_points(), of_scale, 1), dims[0]),
                ],
                Granularity::Tensor
                | Granularity::Channel
                | Granularity::Feature
                | Granularity::Part(_) => {
                    vec![
                        words(&integers, dims[1]),
                        scale(),
                        words(&zero_points(), dims[0]),
                    ]
                }
            }
        }
        Some(Kind::Fp8 | Kind::MxFp4) | None => vec![weight.values.data.clone(), scale()],
        Some(Kind::NvFp4) => {
            let of_all = weight.tensor_scale.as_ref();
            let of_all = of_all.map_or_else(Vec::new, |scale: &HostTensor| scale.data.clone());
            vec![weight.values.data.clone(), scale(), of_all]
        }
    }
}

/// A matrix `[rows, columns]` of elements of `size` bytes, transposed.
fn transposed(data: &[u8], dims: &[usize], size: usize) -> Vec<u8> {
    let columns = dims.get(1).copied().unwrap_or(1);
    let rows = data.len() / (columns * size).max(1);
    let places = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
    places
        .flat_map(|at| data[at * size..][..size].iter().copied())
        .collect()
}

/// Rows of integers, eight to a word.
fn words(integers: &[u8], row: usize) -> Vec<u8> {
    let rows = integers.chunks(row.max(1));
    let word = |eight: &[u8]| {
        let half = |(at, which): (usize, &usize)| {
            let value = eight.get(*which).copied().unwrap_or(0);
            u32::from(value & 0xf) << (4 * at)
        };
        ORDER
            .iter()
            .enumerate()
            .map(half)
            .fold(0, |word, half| word | half)
    };
    let words = rows.flat_map(|row| row.chunks(8).map(word));
    words.flat_map(u32::to_le_bytes).collect()
}

/// The description: the format of most layers is that of all, others have their own, and layers in float are named. `layers` are all
/// that Quark could quantize, with their shapes, and `decomposition` is that of those with a low-rank product.
pub(super) fn config(
    stored: &Quantization,
    layers: &[(&str, &Shape)],
    decomposition: Option<&Decomposition>,
) -> Value {
    let mut counts: BTreeMap<String, (usize, TensorFormat)> = BTreeMap::new();
    for layer in stored.layers.values() {
        let key = format!("{:?}", layer.weight);
        counts.entry(key).or_insert((0, layer.weight)).0 += 1;
    }
    let most = counts.values().max_by_key(|(count, _)| *count);
    let most = most.map(|(_, format)| *format);
    let own = stored
        .layers
        .iter()
        .filter(|(_, layer)| Some(layer.weight) != most);
    let own = own.map(|(path, layer)| (path.clone(), layer_config(Some(layer.weight))));
    let own: Map<String, Value> = own.collect();
    let names = layers.iter().map(|(layer, _)| *layer);
    let exclude: Vec<&str> = names
        .filter(|layer| !stored.layers.contains_key(*layer))
        .collect();
    let algorithms = decomposition.map(|of| [svdquant(stored, layers, of)]);
    json!({
        "global_quant_config": layer_config(most),
        "exclude": exclude,
        "algo_config": algorithms,
        "softmax_quant_spec": null,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": own,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": false,
        "quant_mode": "eager_mode",
        "version": VERSION,
        "export": {
            "weight_merge_groups": null,
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "weight_format": "real_quantized",
            "pack_method": "reorder",
        },
    })
}

/// Quark's `SVDQuantConfig`, with its defaults where nothing here decides them.
fn svdquant(
    stored: &Quantization,
    layers: &[(&str, &Shape)],
    decomposition: &Decomposition,
) -> Value {
    let (decomposed, others): (Vec<_>, Vec<_>) = layers
        .iter()
        .partition(|(layer, _)| has_product(stored, layer));
    let sides = decomposed.iter().flat_map(|(_, shape)| &shape.dims);
    let others: Vec<&str> = others.into_iter().map(|(layer, _)| layer).collect();
    let (alpha, is_searched) = match decomposition.alphas[..] {
        [alpha] => (alpha, false),
        _ => (DEFAULT_ALPHA, true),
    };
    json!({
        "name": "svdquant",
        "svd_rank": decomposition.rank,
        "smooth_alpha": alpha,
        "search_alpha": is_searched,
        "alpha_candidates": null,
        "alpha_search_max_samples": 8,
        "exclude_patterns": others,
        "min_layer_size": sides.copied().fold(SMALLEST_SIDE, usize::min),
        "use_gptq": false,
        "gptq_n_bits": 4,
        "gptq_symmetric": true,
        "gptq_group_size": -1,
        "gptq_blocksize": 128,
        "gptq_percdamp": 0.01,
        "gptq_actorder": false,
    })
}

fn layer_config(weight: Option<TensorFormat>) -> Value {
    json!({
        "input_tensors": null,
        "output_tensors": null,
        "weight": weight.map(weight_spec),
        "bias": null,
        "target_device": null,
    })
}

/// What Quark says of a weight's format.
fn weight_spec(weight: TensorFormat) -> Value {
    let (scheme, axis, group) = match weight.granularity {
        Granularity::Tensor | Granularity::Feature | Granularity::Part(_) => {
            ("per_tensor", None, None)
        }
        Granularity::Channel => ("per_channel", Some(0), None),
        Granularity::Group(size) => ("per_group", Some(-1), Some(size)),
    };
    let observer = match weight.granularity {
        Granularity::Tensor | Granularity::Feature | Granularity::Part(_) => {
            "PerTensorMinMaxObserver"
        }
        Granularity::Channel => "PerChannelMinMaxObserver",
        Granularity::Group(_) => "PerGroupMinMaxObserver",
    };
    let spec = Spec {
        dtype: "int8",
        symmetric: Some(!weight.zero_point),
        scale_type: Some("float"),
        scale_format: None,
        mode: None,
        observer,
        is_of_scales: false,
    };
    let of_blocks = Spec {
        dtype: "fp4",
        symmetric: None,
        observer: "PerBlockMXObserver",
        ..spec
    };
    let json = |spec: Spec| spec.json(scheme, axis, group);
    match kind(weight) {
        Some(Kind::Int8) | None => json(spec),
        Some(Kind::Int4) => json(Spec {
            dtype: "int4",
            ..spec
        }),
        Some(Kind::Fp8) => json(Spec {
            dtype: "fp8_e4m3",
            scale_type: None,
            ..spec
        }),
        Some(Kind::MxFp4) => json(Spec {
            scale_format: Some("e8m0"),
            mode: Some("even"),
            ..of_blocks
        }),
        Some(Kind::NvFp4) => {
            let of_scales = Spec {
                dtype: "fp8_e4m3",
                symmetric: Some(true),
                scale_type: Some("float32"),
                observer: "PerTensorMinMaxObserver",
                is_of_scales: true,
                ..spec
            };
            json!([
                json(Spec {
                    scale_type: Some("float32"),
                    scale_format: Some("float32"),
                    ..of_blocks
                }),
                of_scales.json("per_tensor", None, None),
            ])
        }
    }
}

/// What differs between Quark's specifications of tensors.
#[derive(Clone, Copy)]
struct Spec {
    dtype: &'static str,
    symmetric: Option<bool>,
    scale_type: Option<&'static str>,
    scale_format: Option<&'static str>,
    /// How the exponent of a power of two is found.
    mode: Option<&'static str>,
    observer: &'static str,
    is_of_scales: bool,
}

impl Spec {
    fn json(self, scheme: &str, axis: Option<i64>, group: Option<usize>) -> Value {
        json!({
            "dtype": self.dtype,
            "is_dynamic": false,
            "qscheme": scheme,
            "ch_axis": axis,
            "group_size": group,
            "block_size": null,
            "symmetric": self.symmetric,
            "round_method": "half_even",
            "scale_type": self.scale_type,
            "zero_point_type": "int32",
            "scale_format": self.scale_format,
            "scale_calculation_mode": self.mode,
            "mx_element_dtype": null,
            "observer_cls": self.observer,
            "is_scale_quant": self.is_of_scales,
            "enable_buffer_reuse": false,
            "max_input_numel": 4_194_304,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;
    use crate::quant::quantize_weight;
    use crate::weights::Checkpoint;

    fn recorded(name: &str) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden/quark")
            .join(name)
    }

    fn format(
        convention: NumericsConvention,
        element: DType,
        granularity: Granularity,
        zero_point: bool,
    ) -> TensorFormat {
        let format = TensorFormat {
            element,
            granularity,
            zero_point,
            ..TensorFormat::int8(convention)
        };
        format.stored(DType::F32)
    }

    /// Every tensor and the description, as amd-quark 0.13 exported them (`scripts/oracles/quark_export.py`).
    #[test]
    fn what_is_written_is_quarks_export() {
        use Granularity::{Channel, Group, Tensor};
        use NumericsConvention::{Mx, Nv, Quark};
        let floats = Checkpoint::open(&recorded("floats.safetensors")).unwrap();
        let weight = floats.read_as("in/weight", DType::F32).unwrap();
        for (case, format) in [
            ("fp8_tensor", format(Quark, DType::F8E4M3Fn, Tensor, false)),
            ("int4_channel", format(Quark, DType::S4, Channel, false)),
            ("int4_group", format(Quark, DType::S4, Group(64), false)),
            (
                "int4_group_asymmetric",
                format(Quark, DType::S4, Group(64), true),
            ),
            ("int8_channel", format(Quark, DType::S8, Channel, false)),
            ("int8_tensor", format(Quark, DType::S8, Tensor, false)),
            (
                "int8_tensor_asymmetric",
                format(Quark, DType::S8, Tensor, true),
            ),
            ("mxfp4", format(Mx, DType::U4, Group(32), false)),
            ("nvfp4", format(Nv, DType::U4, Group(16), false)),
        ] {
            let layer = StoredLayer {
                weight: format,
                activation: None,
                low_rank: None,
                smoothed: false,
            };
            check_layer(&weight.shape, &layer).unwrap();
            let file = Checkpoint::open(&recorded(case)).unwrap();
            let quantized = quantize_weight(&weight, format).unwrap();
            let tensors = tensors("linear", &weight.shape, format, None).unwrap();
            let written: Vec<&str> = tensors.iter().map(|(name, _)| name.as_str()).collect();
            let others = ["head.bias", "head.weight", "linear.bias"];
            let mut names: Vec<&str> = written.iter().copied().chain(others).collect();
            names.sort_unstable();
            assert_eq!(names, file.names().collect::<Vec<_>>(), "{case}");
            for ((name, shape), data) in tensors.iter().zip(bytes(&quantized)) {
                let expected = file.read(name).unwrap();
                assert_eq!(*shape, expected.shape, "{case} {name}");
                assert!(data == expected.data, "{case} {name}");
            }
            let text = fs::read_to_string(recorded(case).join("config.json")).unwrap();
            let recorded: Value = serde_json::from_str(&text).unwrap();
            let stored = Quantization {
                layers: [("linear".to_owned(), layer)].into(),
            };
            let head = Shape::new(DType::F32, [2, 16]);
            let own = config(&stored, &[("head", &head), ("linear", &weight.shape)], None);
            assert_eq!(own, recorded["quantization_config"], "{case}");
        }
    }

    /// SVDQuant's: the same names, types and description (numbers depend on how far a decomposition goes).
    #[test]
    fn low_rank_products_have_the_places_of_quarks() {
        let of_weight = format(
            NumericsConvention::Quark,
            DType::S4,
            Granularity::Group(64),
            false,
        );
        let layer = StoredLayer {
            weight: of_weight.stored(DType::BF16),
            activation: None,
            low_rank: Some(4),
            smoothed: false,
        };
        let shape = Shape::new(DType::F32, [256, 256]);
        check_layer(&shape, &layer).unwrap();
        let file = Checkpoint::open(&recorded("svdquant")).unwrap();
        let stored = Quantization {
            layers: [("linear".to_owned(), layer)].into(),
        };
        let tensors = tensors("linear", &shape, layer.weight, layer.low_rank).unwrap();
        for (name, shape) in &tensors {
            assert_eq!(Some(shape), file.info(name), "{name}");
        }
        let bias = path_of("linear.bias", &stored);
        assert!(file.info(&bias).is_some());
        assert_eq!(path_of("head.bias", &stored), "head.bias");
        assert_eq!(tensors.len() + 3, file.names().count());
        let text = fs::read_to_string(recorded("svdquant").join("config.json")).unwrap();
        let recorded: Value = serde_json::from_str(&text).unwrap();
        let head = Shape::new(DType::F32, [2, 256]);
        let decomposition = Decomposition {
            rank: 4,
            alphas: vec![0.5],
        };
        let own = config(
            &stored,
            &[("head", &head), ("linear", &shape)],
            Some(&decomposition),
        );
        assert_eq!(own, recorded["quantization_config"]);
    }

    #[test]
    fn layers_that_quark_does_not_pack_are_refused() {
        let layer = |weight| StoredLayer {
            weight,
            activation: None,
            low_rank: None,
            smoothed: false,
        };
        let int8 = format(
            NumericsConvention::Quark,
            DType::S8,
            Granularity::Channel,
            false,
        );
        let int4 = format(
            NumericsConvention::Quark,
            DType::S4,
            Granularity::Group(4),
            false,
        );
        let matrix = Shape::new(DType::F32, [12, 16]);
        for (shape, layer, expected) in [
            (
                Shape::new(DType::F32, [8, 8, 3, 3]),
                layer(int8),
                "linear layers alone",
            ),
            (
                matrix.clone(),
                layer(int4),
                "eight int4 values share a word, and there are 12",
            ),
            (
                matrix.clone(),
                layer(format(
                    NumericsConvention::Aqt,
                    DType::S8,
                    Granularity::Channel,
                    false,
                )),
                "s8 in aqt's numerics is not exported so",
            ),
            (
                matrix.clone(),
                StoredLayer {
                    smoothed: true,
                    ..layer(int8)
                },
                "factors of activations are not written",
            ),
        ] {
            let error = check_layer(&shape, &layer).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert!(check_layer(&matrix, &layer(int8)).is_ok());
    }
}
