//! The types of the schema's values that are not plain numbers and texts.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use serde_json::{Map, Value};

use crate::data::shapes::ShapeWord;
use crate::dtype::DType;
use crate::shard::{Axis, LogicalAxisRule, LogicalAxisRules};
use crate::util::named;
use crate::util::names::nearest;

use super::error::{Problem, Problems};
use super::field::{Field, refuse, wrong_type};
use super::key::{Range, Ty};
use super::text::{describe, show};
use super::yaml::join;

named! {
    /// A quantization mode.
    pub enum Quantization {
        /// Float throughout.
        Off = "",
        /// 8-bit integers on dots and convolutions.
        Int8 = "int8",
        /// Weights of dots and convolutions in 8-bit integers, activations in float.
        Int8W8A16 = "int8_w8a16",
        /// Weights of dots and convolutions in 4-bit integers, activations in float.
        W4A16 = "w4a16",
        /// 8-bit floats on dots and convolutions, with scales that are found at run time.
        Fp8 = "fp8",
        /// As fp8, and in the gradients of dots.
        Fp8Full = "fp8_full",
        /// Weights of dots and convolutions in 8-bit floats, activations in wider floats.
        Fp8W8A16 = "fp8_w8a16",
        /// Weights of dots and convolutions in bitsandbytes' NF4, a scale for 64 input features; activations in float.
        Nf4 = "nf4",
        /// Weights in OCP's MXFP4, a power of two for 32 input features; activations in float.
        MxFp4 = "mxfp4",
        /// Weights in OCP's MXFP6 with `f6E2M3FN`, a power of two for 32 input features; activations in float.
        MxFp6E2M3 = "mxfp6_e2m3",
        /// The same with `f6E3M2FN`.
        MxFp6E3M2 = "mxfp6_e3m2",
        /// Weights in OCP's MXFP8 (`f8E4M3FN`), a power of two for 32 input features; activations in float.
        MxFp8 = "mxfp8",
        /// Weights in NVIDIA's NVFP4, a scale in fp8 for 16 input features; activations in float.
        NvFp4 = "nvfp4",
        /// 8-bit integers on dots and convolutions, with scales of activations that calibration finds.
        Int8W8A8Static = "int8_w8a8_static",
        /// 8-bit floats on dots and convolutions, with scales of activations that calibration finds.
        Fp8W8A8Static = "fp8_w8a8_static",
        /// As w4a16, of what a low-rank product in float beside each linear layer leaves.
        SvdQuantW4A16 = "svdquant_w4a16",
        /// 4-bit integers on dots and convolutions, for weights and activations with a scale for as many input features.
        W4A4 = "w4a4",
        /// As w4a4, of what a low-rank product in float beside each linear layer leaves.
        SvdQuantW4A4 = "svdquant_w4a4",
    }
}

named! {
    /// Which layers stay in float, and what calibration runs with.
    pub enum QuantPreset {
        /// Those that are small and sensitive in the model's family; the recipe's guidance and size.
        Family = "family",
        /// Those of AMD Quark's guide, and its arguments.
        Quark = "quark",
    }
}

named! {
    /// How the weights of linear layers are rounded to integers.
    pub enum WeightAlgorithm {
        /// Each to the nearest integer.
        Nearest = "nearest",
        /// Column by column, those that follow making up for the error of each, by what calibration sees.
        Gptq = "gptq",
        /// Each to the nearest integer, after features of large activations are multiplied by factors, which activations are
        /// divided by.
        Awq = "awq",
        /// Each to the nearest code, with a float that is added to `code * scale` and chosen for what rounding leaves.
        Hqq = "hqq",
    }
}

named! {
    /// What decides the scales of rounded weights while they are trained.
    pub enum QatObserver {
        /// The lowest and the highest value, anew in every step.
        MinMax = "min_max",
        /// They are trained with the weights (learned step size quantization).
        Lsq = "lsq",
    }
}

named! {
    /// Where the factors of SVDQuant go that features are weighted with before a weight is decomposed.
    pub enum SvdOrder {
        /// They are divided out of the weight again: they say which features the low-rank product fits best.
        Quark = "quark",
        /// Activations are divided by them before they are multiplied, with the weight and with the low-rank product.
        Paper = "paper",
    }
}

named! {
    /// An element type of weights or activations.
    pub enum FloatType {
        Float32 = "float32",
        Bfloat16 = "bfloat16",
    }
}

impl From<FloatType> for DType {
    fn from(ty: FloatType) -> DType {
        match ty {
            FloatType::Float32 => DType::F32,
            FloatType::Bfloat16 => DType::BF16,
        }
    }
}

named! {
    /// How attention is computed. The other kernels of MaxDiffusion compute the same function.
    pub enum Attention {
        DotProduct = "dot_product",
    }
    not_yet [
        "flash", "tokamax_flash", "tokamax_ring", "tokamax_ring_custom", "ulysses",
        "ulysses_custom", "ulysses_custom_fixed_m", "ulysses_ring", "ulysses_ring_custom",
        "ulysses_ring_custom_fixed_m", "ulysses_ring_custom_bidir", "cudnn_flash_te",
    ]
}

named! {
    /// The hardware that the program runs on, or is compiled for.
    pub enum Hardware {
        /// The best plugin that is installed and finds a device; the log names it.
        Auto = "auto",
        Cpu = "cpu",
        Tpu = "tpu",
        Gpu = "gpu",
    }
}

named! {
    /// Where the training examples come from.
    pub enum DatasetType {
        /// Images of coloured shapes, made by the program.
        Shapes = "shapes",
        /// A folder of images with captions.
        Folder = "folder",
        /// A folder of tar archives of images with captions.
        Webdataset = "webdataset",
        /// Parquet files, as Hugging Face's `datasets` writes them.
        Hf = "hf",
        /// TFRecord files, as TensorFlow writes them.
        Tfrecord = "tfrecord",
        Tf = "tf",
        Grain = "grain",
        Synthetic = "synthetic",
    }
}

named! {
    /// How weights follow their gradients, by kohya's names.
    pub enum OptimizerType {
        AdamW = "AdamW",
        /// AdamW with moments of 8 bits, in blocks of 256, as bitsandbytes.
        AdamW8bit = "AdamW8bit",
        /// Mean squares of rows and columns instead of moments, as transformers' Adafactor with a learning rate.
        Adafactor = "Adafactor",
        /// One moment, of which the sign counts.
        Lion = "Lion",
        /// Finds its learning rate: give learning_rate=1.
        Prodigy = "Prodigy",
    }
}

named! {
    /// How much the error of a sample counts at its timestep.
    pub enum LossWeighting {
        /// As it is, or by min-SNR where `snr_gamma` is given.
        None = "none",
        /// `min(SNR, snr_gamma) + 1` times the error of the clean sample (Salimans and Ho 2022).
        SnrPlusOne = "snr_plus_one",
        /// `1 / sqrt(SNR)` times the error of the noise, `1 / (SNR + 1)` times that of the velocity (Yu et al. 2024).
        Debiased = "debiased",
    }
}

named! {
    /// Which mask weighs the places of a picture in the loss.
    pub enum MaskedLoss {
        /// None: all places count alike.
        None = "none",
        /// Its alpha channel.
        Alpha = "alpha",
        /// The picture of its name in `conditioning_data_dir`.
        Folder = "folder",
    }
}

named! {
    /// Which noise levels training by flow matching draws how often, and how much each counts.
    pub enum WeightingScheme {
        /// All alike.
        None = "none",
        /// All alike; errors count `1 / sigma^2` times.
        SigmaSqrt = "sigma_sqrt",
        /// The logistic function of a normal draw.
        LogitNormal = "logit_normal",
        /// A density with its mode in the middle.
        Mode = "mode",
        /// All alike; errors count `2 / (pi (1 - 2 sigma + 2 sigma^2))` times.
        Cosmap = "cosmap",
    }
}

named! {
    /// Which timesteps training draws more often.
    pub enum BiasStrategy {
        None = "none",
        /// The first `portion`: little noise.
        Earlier = "earlier",
        /// The last `portion`: much noise.
        Later = "later",
        /// From `begin` up to `end`, without `end`.
        Range = "range",
    }
}

named! {
    /// What training does with existing checkpoints.
    pub enum Resume {
        /// Continues from the newest, starts anew if there is none.
        Auto = "auto",
        /// Starts anew; refuses a checkpoint folder that holds any.
        Never = "never",
        /// Continues; refuses to start anew.
        Must = "must",
    }
}

/// A seed. -1 draws one when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seed(pub u64);

impl Field for Seed {
    const TY: Ty = Ty::Int;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        match value.as_i64() {
            // As many bits as web interfaces have. The standard library keys its hash maps with random numbers.
            Some(-1) => Some(Seed(RandomState::new().build_hasher().finish() >> 32)),
            _ => u64::parse(value, path, problems).map(Seed),
        }
    }
    fn show(&self) -> Value {
        Value::from(self.0)
    }
}

/// One or several prompts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompts(pub Vec<String>);

impl Field for Prompts {
    const TY: Ty = Ty::Texts;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let texts = match value {
            Value::String(s) if s.is_empty() => Some(Vec::new()),
            Value::String(s) => Some(vec![s.clone()]),
            Value::Array(items) => items
                .iter()
                .map(|v| v.as_str().map(str::to_owned))
                .collect(),
            _ => None,
        };
        let prompts = texts.map(Prompts);
        prompts.or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        match self.0.as_slice() {
            [] => Value::String(String::new()),
            [one] if !one.is_empty() => Value::String(one.clone()),
            many => Value::from(many),
        }
    }
}

/// One value for all of several things, or a list with one for each. Never empty.
#[derive(Debug, Clone, PartialEq)]
pub struct OneOrMore<T>(pub Vec<T>);

impl<T> From<T> for OneOrMore<T> {
    fn from(value: T) -> Self {
        OneOrMore(vec![value])
    }
}

impl<T: Default> Default for OneOrMore<T> {
    fn default() -> Self {
        T::default().into()
    }
}

impl<T> OneOrMore<T> {
    /// The value of thing `index`, if there are as many: a single value is that of all.
    pub fn get(&self, index: usize) -> Option<&T> {
        match self.0.as_slice() {
            [one] => Some(one),
            many => many.get(index),
        }
    }
}

impl<T: Field> Field for OneOrMore<T> {
    const TY: Ty = Ty::OneOrMore(&T::TY);

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let items = match value {
            Value::Array(items) if items.is_empty() => return refuse(value, path, problems),
            Value::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        parse_all(items, path, problems).map(OneOrMore)
    }
    fn show(&self) -> Value {
        match self.0.as_slice() {
            [one] => one.show(),
            many => many.iter().map(Field::show).collect(),
        }
    }
}

/// Every item of a list; records the problems of all of them.
fn parse_all<T: Field>(items: &[Value], path: &str, problems: &mut Problems) -> Option<Vec<T>> {
    let read: Vec<_> = items
        .iter()
        .map(|item| T::parse(item, path, problems))
        .collect();
    read.into_iter().collect()
}

/// The mesh axes in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MeshAxes(pub Vec<Axis>);

impl Field for MeshAxes {
    const TY: Ty = Ty::List("list of mesh axes");

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        match value.as_array() {
            Some(items) => parse_all(items, path, problems).map(MeshAxes),
            None => refuse(value, path, problems),
        }
    }
    fn show(&self) -> Value {
        self.0.iter().map(|a| Value::from(a.name())).collect()
    }
}

/// How the dimensions of the input data lie on the mesh: for each dimension its axes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DataSharding(pub Vec<Vec<Axis>>);

impl Field for DataSharding {
    const TY: Ty = Ty::List("list of lists of mesh axes");

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let lists: Option<Vec<&Vec<Value>>> = value
            .as_array()
            .and_then(|items| items.iter().map(Value::as_array).collect());
        let Some(lists) = lists else {
            return refuse(value, path, problems);
        };
        let read: Vec<_> = lists.iter().map(|l| parse_all(l, path, problems)).collect();
        read.into_iter().collect::<Option<_>>().map(DataSharding)
    }
    fn show(&self) -> Value {
        self.0
            .iter()
            .map(|d| d.iter().map(|a| Value::from(a.name())).collect::<Value>())
            .collect()
    }
}

fn parse_axis_rule(item: &Value, path: &str, problems: &mut Problems) -> Option<LogicalAxisRule> {
    let Some([Value::String(logical), on]) = item.as_array().map(Vec::as_slice) else {
        let problem = wrong_type("a pair [logical axis, mesh axes]", item);
        problems.push((path.to_owned(), problem));
        return None;
    };
    let mesh = match on {
        Value::Null => Vec::new(),
        // Python's None, which is a plain string to YAML.
        Value::String(s) if s == "None" => Vec::new(),
        Value::Array(names) => parse_all(names, path, problems)?,
        one => vec![Axis::parse(one, path, problems)?],
    };
    Some(LogicalAxisRule {
        logical: logical.clone(),
        mesh,
    })
}

impl Field for LogicalAxisRules {
    const TY: Ty = Ty::List("list of [logical axis, mesh axis or list of mesh axes or null]");

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let Some(items) = value.as_array() else {
            return refuse(value, path, problems);
        };
        let read: Vec<_> = items
            .iter()
            .map(|item| parse_axis_rule(item, path, problems))
            .collect();
        read.into_iter()
            .collect::<Option<_>>()
            .map(LogicalAxisRules)
    }
    fn show(&self) -> Value {
        self.0
            .iter()
            .map(|rule| {
                let mesh = match rule.mesh.as_slice() {
                    [] => Value::Null,
                    [one] => Value::from(one.name()),
                    many => many.iter().map(|a| Value::from(a.name())).collect(),
                };
                Value::Array(vec![Value::from(rule.logical.as_str()), mesh])
            })
            .collect()
    }
}

/// The file of a textual inversion, and its token where that is not the file's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextualInversionFile {
    pub path: String,
    pub token: Option<String>,
}

/// The files of textual inversions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextualInversionFiles(pub Vec<TextualInversionFile>);

impl TextualInversionFile {
    fn parse(item: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        if let Value::String(file) = item {
            return Some(TextualInversionFile {
                path: file.clone(),
                token: None,
            });
        }
        let Some(map) = item.as_object() else {
            let problem = wrong_type("a file, or a dict {path: file, token: word}", item);
            problems.push((path.to_owned(), problem));
            return None;
        };
        let before = problems.len();
        let known = ["path", "token"];
        for name in map.keys().filter(|name| !known.contains(&name.as_str())) {
            let nearest = nearest(name, known);
            problems.push((join(path, name), Problem::UnknownKey { nearest }));
        }
        let file = map.get("path").unwrap_or(&Value::Null);
        let file = String::parse(file, &join(path, "path"), problems);
        let token = map.get("token").unwrap_or(&Value::Null);
        let token = Option::parse(token, &join(path, "token"), problems);
        let read = TextualInversionFile {
            path: file?,
            token: token?,
        };
        (problems.len() == before).then_some(read)
    }

    fn show(&self) -> Value {
        match &self.token {
            None => Value::from(self.path.as_str()),
            Some(token) => serde_json::json!({"path": self.path, "token": token}),
        }
    }
}

impl Field for TextualInversionFiles {
    const TY: Ty = Ty::OneOrMore(&Ty::Model("file, dict {path: file, token: word},"));

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let items = match value {
            Value::String(file) if file.is_empty() => &[],
            Value::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        let read: Vec<_> = items
            .iter()
            .map(|item| TextualInversionFile::parse(item, path, problems))
            .collect();
        let read: Option<_> = read.into_iter().collect();
        read.map(TextualInversionFiles)
    }
    fn show(&self) -> Value {
        match self.0.as_slice() {
            [] => Value::from(""),
            [one] => one.show(),
            many => many.iter().map(TextualInversionFile::show).collect(),
        }
    }
}

/// Other words for colours and kinds of `dataset_type: shapes`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ShapeNames(pub Vec<(ShapeWord, String)>);

impl Field for ShapeNames {
    const TY: Ty = Ty::Free;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let Some(dict) = value.as_object() else {
            return refuse(value, path, problems);
        };
        let entry = |(word, other): (&String, &Value)| {
            let other = String::parse(other, &join(path, word), problems)?;
            let word = ShapeWord::parse(&Value::from(word.as_str()), path, problems)?;
            Some((word, other))
        };
        let read: Vec<_> = dict.iter().map(entry).collect();
        read.into_iter().collect::<Option<_>>().map(ShapeNames)
    }
    fn show(&self) -> Value {
        let words = self.0.iter();
        let words = words.map(|(word, other)| (word.name().to_owned(), other.as_str().into()));
        Value::Object(words.collect())
    }
}

/// Folders, by their paths, with their weights.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FolderWeights(pub BTreeMap<String, u64>);

impl Field for FolderWeights {
    const TY: Ty = Ty::Free;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        const RANGE: Range = Range::Between(1.0, 10_000.0);
        let Some(dict) = value.as_object() else {
            return refuse(value, path, problems);
        };
        let entry = |(folder, weight): (&String, &Value)| {
            let at = join(path, folder);
            let read = i64::parse(weight, &at, problems)?;
            match u64::try_from(read) {
                Ok(weight) if RANGE.contains(read as f64) => Some((folder.clone(), weight)),
                _ => {
                    let problem = Problem::OutOfRange {
                        found: show(weight),
                        range: RANGE.to_string(),
                    };
                    problems.push((at, problem));
                    None
                }
            }
        };
        let read: Vec<_> = dict.iter().map(entry).collect();
        read.into_iter().collect::<Option<_>>().map(FolderWeights)
    }
    fn show(&self) -> Value {
        let folders = self.0.iter();
        Value::Object(folders.map(|(k, v)| (k.clone(), Value::from(*v))).collect())
    }
}

/// A free dict of a feature that does not exist here.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FreeDict(pub Map<String, Value>);

impl Field for FreeDict {
    const TY: Ty = Ty::Free;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let dict = value.as_object().cloned().map(FreeDict);
        dict.or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        Value::Object(self.0.clone())
    }
}

/// A list of anything, of a feature that does not exist here.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FreeList(pub Vec<Value>);

impl Field for FreeList {
    const TY: Ty = Ty::List("list");

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let list = value.as_array().cloned().map(FreeList);
        list.or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        Value::Array(self.0.clone())
    }
}

/// A model's `config.json`: written in the configuration, or the path of the file.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ModelConfig {
    /// Not given: the architecture is that of `pretrained_model_name_or_path`.
    #[default]
    Unset,
    /// A JSON file. A path from a configuration file is relative to that file's folder.
    Path(String),
    /// The dict itself.
    Inline(Map<String, Value>),
}

impl ModelConfig {
    fn parse_known(
        what: &'static str,
        known: &[&str],
        value: &Value,
        path: &str,
        problems: &mut Problems,
    ) -> Option<Self> {
        match value {
            Value::Null => Some(ModelConfig::Unset),
            Value::String(s) if s.is_empty() => Some(ModelConfig::Unset),
            Value::String(s) => Some(ModelConfig::Path(s.clone())),
            Value::Object(map) => {
                for name in map.keys().filter(|n| !known.contains(&n.as_str())) {
                    let nearest = nearest(name, known.iter().copied());
                    problems.push((join(path, name), Problem::UnknownKey { nearest }));
                }
                Some(ModelConfig::Inline(map.clone()))
            }
            other => {
                let problem = Problem::WrongType {
                    expected: what.to_owned(),
                    found: describe(other),
                };
                problems.push((path.to_owned(), problem));
                None
            }
        }
    }

    fn shown(&self) -> Value {
        match self {
            ModelConfig::Unset => Value::String(String::new()),
            ModelConfig::Path(path) => Value::String(path.clone()),
            ModelConfig::Inline(map) => Value::Object(map.clone()),
        }
    }
}

/// Declares a `ModelConfig` whose dict has the given keys.
macro_rules! model_config {
    ($(#[$meta:meta])* $name:ident, $what:literal, $known:expr) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Default)]
        pub struct $name(pub ModelConfig);

        impl Field for $name {
            const TY: Ty = Ty::Model($what);

            fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
                ModelConfig::parse_known($what, $known, value, path, problems).map($name)
            }
            fn show(&self) -> Value {
                self.0.shown()
            }
        }
    };
}

model_config!(
    /// A UNet by the names of diffusers' `UNet2DConditionModel`.
    UNetConfig,
    "dict of UNet2DConditionModel's config.json, or the path of such a file",
    UNET_KEYS
);

model_config!(
    /// A text encoder by the names of transformers' `CLIPTextConfig`.
    TextEncoderConfig,
    "dict of CLIPTextConfig's config.json, or the path of such a file",
    TEXT_ENCODER_KEYS
);

/// The parameters of `UNet2DConditionModel.__init__` (diffusers 0.35) and what its files add.
const UNET_KEYS: &[&str] = &[
    "_class_name",
    "_diffusers_version",
    "_name_or_path",
    "act_fn",
    "addition_embed_type",
    "addition_embed_type_num_heads",
    "addition_time_embed_dim",
    "attention_head_dim",
    "attention_type",
    "block_out_channels",
    "center_input_sample",
    "class_embed_type",
    "class_embeddings_concat",
    "conv_in_kernel",
    "conv_out_kernel",
    "cross_attention_dim",
    "cross_attention_norm",
    "down_block_types",
    "downsample_padding",
    "dropout",
    "dual_cross_attention",
    "encoder_hid_dim",
    "encoder_hid_dim_type",
    "flip_sin_to_cos",
    "freq_shift",
    "in_channels",
    "layers_per_block",
    "mid_block_only_cross_attention",
    "mid_block_scale_factor",
    "mid_block_type",
    "norm_eps",
    "norm_num_groups",
    "num_attention_heads",
    "num_class_embeds",
    "only_cross_attention",
    "out_channels",
    "projection_class_embeddings_input_dim",
    "resnet_out_scale_factor",
    "resnet_skip_time_act",
    "resnet_time_scale_shift",
    "reverse_transformer_layers_per_block",
    "sample_size",
    "time_cond_proj_dim",
    "time_embedding_act_fn",
    "time_embedding_dim",
    "time_embedding_type",
    "timestep_post_act",
    "transformer_layers_per_block",
    "up_block_types",
    "upcast_attention",
    "use_linear_projection",
];

/// The parameters of `CLIPTextConfig` and what its files add.
const TEXT_ENCODER_KEYS: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dropout",
    "eos_token_id",
    "hidden_act",
    "hidden_size",
    "initializer_factor",
    "initializer_range",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "pad_token_id",
    "projection_dim",
    "torch_dtype",
    "transformers_version",
    "vocab_size",
];
