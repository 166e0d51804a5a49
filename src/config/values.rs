//! The types of the schema's values that are not plain numbers and texts.

use serde_json::{Map, Value};

use super::error::Problem;
use super::field::{Field, Problems, Ty, choices, describe, nearest, wrong_type};
use super::yaml::join;

choices! {
    /// A quantization mode.
    pub enum Quantization {
        /// Float throughout.
        #[default]
        Off = "",
        /// 8-bit integers on dots and convolutions.
        Int8 = "int8",
    }
    not_yet ["fp8", "fp8_full"]
}

choices! {
    /// An element type of weights or activations.
    pub enum FloatType {
        #[default]
        Float32 = "float32",
        Bfloat16 = "bfloat16",
    }
}

choices! {
    /// `jax.lax.Precision` of dots and convolutions.
    pub enum Precision {
        #[default]
        Default = "DEFAULT",
        High = "HIGH",
        Highest = "HIGHEST",
    }
}

choices! {
    /// How attention is computed. The other kernels of MaxDiffusion compute the same function.
    pub enum Attention {
        #[default]
        DotProduct = "dot_product",
    }
    not_yet [
        "flash", "tokamax_flash", "tokamax_ring", "tokamax_ring_custom", "ulysses",
        "ulysses_custom", "ulysses_custom_fixed_m", "ulysses_ring", "ulysses_ring_custom",
        "ulysses_ring_custom_fixed_m", "ulysses_ring_custom_bidir", "cudnn_flash_te",
    ]
}

choices! {
    /// What the program runs on, or is made for.
    pub enum Hardware {
        /// The best plugin that is installed and finds a device; said at the start.
        #[default]
        Auto = "auto",
        Cpu = "cpu",
        Tpu = "tpu",
        Gpu = "gpu",
    }
}

choices! {
    /// A family of published models.
    pub enum ModelFamily {
        #[default]
        Any = "",
        Sd1 = "sd1",
        Sd2 = "sd2",
        Sdxl = "sdxl",
        SdxlRefiner = "sdxl_refiner",
    }
}

choices! {
    /// How prompts are read.
    pub enum PromptSyntax {
        /// `(word:1.2)`, `[word]`, `BREAK`, and as many chunks of 75 tokens as the prompt needs.
        #[default]
        Weighted = "weighted",
        /// Brackets are text, and what does not fit into one chunk is dropped.
        Plain = "plain",
    }
}

choices! {
    /// An axis of the device mesh.
    pub enum MeshAxis {
        #[default]
        Data = "data",
        Fsdp = "fsdp",
        Context = "context",
        Tensor = "tensor",
    }
}

choices! {
    /// Where the training examples come from. `Shapes` and `Folder` exist here.
    pub enum DatasetType {
        /// Pictures of coloured shapes, made by the program.
        Shapes = "shapes",
        /// A folder of images with captions.
        Folder = "folder",
        #[default]
        Tf = "tf",
        Hf = "hf",
        Tfrecord = "tfrecord",
        Grain = "grain",
        Synthetic = "synthetic",
    }
}

choices! {
    /// The sampler that turns noise to images. diffusers' and MaxDiffusion's class names are
    /// accepted too.
    pub enum Sampler {
        #[default]
        Ddim = "ddim" | "DDIMScheduler" | "FlaxDDIMScheduler",
        Ddpm = "ddpm" | "DDPMScheduler" | "FlaxDDPMScheduler",
        Pndm = "pndm" | "PNDMScheduler" | "FlaxPNDMScheduler",
        Euler = "euler" | "EulerDiscreteScheduler" | "FlaxEulerDiscreteScheduler",
        EulerAncestral = "euler_ancestral" | "EulerAncestralDiscreteScheduler",
        Heun = "heun" | "HeunDiscreteScheduler",
        DpmMultistep = "dpm_multistep" | "DPMSolverMultistepScheduler" | "FlaxDPMSolverMultistepScheduler",
        DpmSinglestep = "dpm_singlestep" | "DPMSolverSinglestepScheduler",
        Kdpm2 = "kdpm2" | "KDPM2DiscreteScheduler",
        Kdpm2Ancestral = "kdpm2_ancestral" | "KDPM2AncestralDiscreteScheduler",
        UniPc = "unipc" | "UniPCMultistepScheduler",
        Lms = "lms" | "LMSDiscreteScheduler" | "FlaxLMSDiscreteScheduler",
        Lcm = "lcm" | "LCMScheduler",
        Tcd = "tcd" | "TCDScheduler",
    }
}

impl Sampler {
    /// Whether the sampler reads this key, which is `eta` or one of `diffusion_scheduler_config`. Keys that make the noise
    /// schedule are read by all; for the others this is what diffusers' classes have (`crate::schedulers::SchedulerKind::reads`).
    pub fn reads(self, key: &str) -> bool {
        use Sampler::*;
        match key {
            "use_karras_sigmas" | "use_exponential_sigmas" | "use_beta_sigmas" => matches!(
                self,
                Euler | Heun | Kdpm2 | Kdpm2Ancestral | Lms | DpmMultistep | DpmSinglestep | UniPc
            ),
            "algorithm_type" => matches!(self, DpmMultistep | DpmSinglestep),
            "solver_order" => matches!(self, DpmMultistep | DpmSinglestep | UniPc),
            "final_sigmas_type" => matches!(self, Euler | DpmMultistep | DpmSinglestep | UniPc),
            "set_alpha_to_one" => matches!(self, Ddim | Pndm),
            "timestep_spacing" => !matches!(self, DpmSinglestep | Lcm | Tcd),
            "eta" => matches!(self, Ddim | Tcd),
            _ => true,
        }
    }
}

choices! {
    /// DPM-Solver's equation, by diffusers' names.
    pub enum AlgorithmType {
        #[default]
        DpmSolverPlusPlus = "dpmsolver++",
        /// With fresh noise in each step.
        SdeDpmSolverPlusPlus = "sde-dpmsolver++",
    }
}

choices! {
    /// The noise level that the last step goes to, by diffusers' names.
    pub enum FinalSigmas {
        #[default]
        Zero = "zero",
        /// That of the first training timestep.
        SigmaMin = "sigma_min",
    }
}

choices! {
    /// What the UNet predicts.
    pub enum PredictionType {
        #[default]
        Epsilon = "epsilon",
        VPrediction = "v_prediction",
        /// The clean image itself.
        Sample = "sample",
    }
}

choices! {
    /// Which training timesteps the sampler visits (Lin et al. 2023, table 2).
    pub enum TimestepSpacing {
        #[default]
        Leading = "leading",
        Trailing = "trailing",
        Linspace = "linspace",
    }
}

choices! {
    /// How the variance grows with the timestep, by diffusers' names.
    pub enum BetaSchedule {
        Linear = "linear",
        #[default]
        ScaledLinear = "scaled_linear",
        SquaredcosCapV2 = "squaredcos_cap_v2",
    }
}

choices! {
    /// How much the error of a sample counts at its timestep.
    pub enum LossWeighting {
        /// As it is, or by min-SNR where `snr_gamma` is given.
        #[default]
        None = "none",
        /// `min(SNR, snr_gamma) + 1` times the error of the clean sample (Salimans and Ho 2022).
        SnrPlusOne = "snr_plus_one",
    }
}

choices! {
    /// Which timesteps training draws more often.
    pub enum BiasStrategy {
        #[default]
        None = "none",
        /// The first `portion`: little noise.
        Earlier = "earlier",
        /// The last `portion`: much noise.
        Later = "later",
        /// From `begin` up to `end`, without `end`.
        Range = "range",
    }
}

choices! {
    /// The learning rate after warm-up.
    pub enum LearningRateSchedule {
        #[default]
        Constant = "constant",
        /// Half a cosine down to zero.
        Cosine = "cosine",
        /// A straight line down to zero.
        Linear = "linear",
    }
}

choices! {
    /// What the backward pass recomputes instead of keeping.
    pub enum RematPolicy {
        /// Everything is kept.
        #[default]
        None = "NONE",
        /// Every block is recomputed from its inputs.
        Full = "FULL",
    }
    not_yet [
        "MATMUL_WITHOUT_BATCH", "OFFLOAD_MATMUL_WITHOUT_BATCH", "CUSTOM",
        "HIDDEN_STATE_WITH_OFFLOAD", "FLUX_OPTIMIZED",
    ]
}

choices! {
    /// What training does about checkpoints it finds.
    pub enum Resume {
        /// Continues from the newest, starts anew if there is none.
        #[default]
        Auto = "auto",
        /// Starts anew; refuses a checkpoint folder that holds any.
        Never = "never",
        /// Continues; refuses to start anew.
        Must = "must",
    }
}

choices! {
    /// The element type that a quantization rule gives the contractions it matches.
    pub enum QuantRuleType {
        /// Stays in float.
        #[default]
        None = "none",
        Int8 = "int8",
    }
    not_yet ["fp8", "fp8_full"]
}

/// One or several prompts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompts(pub Vec<String>);

impl Field for Prompts {
    const TY: Ty = Ty::Texts;

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        let texts: Option<Vec<String>> = match value {
            Value::String(s) if s.is_empty() => Some(Vec::new()),
            Value::String(s) => Some(vec![s.clone()]),
            Value::Array(items) => items
                .iter()
                .map(|v| v.as_str().map(str::to_owned))
                .collect(),
            _ => None,
        };
        match texts {
            Some(texts) => self.0 = texts,
            None => problems.push((path.to_owned(), wrong_type(Self::TY, value))),
        }
    }
    fn show(&self) -> Value {
        match self.0.as_slice() {
            [] => Value::String(String::new()),
            [one] => Value::String(one.clone()),
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

impl<T: Field + Default> Field for OneOrMore<T> {
    const TY: Ty = Ty::OneOrMore(&T::TY);

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        let items = match value {
            Value::Array(items) if items.is_empty() => {
                problems.push((path.to_owned(), wrong_type(Self::TY, value)));
                return;
            }
            Value::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        let before = problems.len();
        let read = items.iter().map(|item| {
            let mut read = T::default();
            read.read(item, path, problems);
            read
        });
        let read = read.collect();
        if problems.len() == before {
            self.0 = read;
        }
    }
    fn show(&self) -> Value {
        match self.0.as_slice() {
            [one] => one.show(),
            many => many.iter().map(Field::show).collect(),
        }
    }
}

/// A mesh axis by name, with the problem if there is none of that name.
fn axis(value: &Value, path: &str, problems: &mut Problems) -> Option<MeshAxis> {
    let before = problems.len();
    let mut axis = MeshAxis::default();
    axis.read(value, path, problems);
    (problems.len() == before).then_some(axis)
}

/// Several mesh axes; records every wrong name.
fn axes(values: &[Value], path: &str, problems: &mut Problems) -> Option<Vec<MeshAxis>> {
    let read: Vec<_> = values.iter().map(|v| axis(v, path, problems)).collect();
    read.into_iter().collect()
}

/// The mesh axes in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MeshAxes(pub Vec<MeshAxis>);

impl Field for MeshAxes {
    const TY: Ty = Ty::List("list of mesh axes");

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        let Some(items) = value.as_array() else {
            problems.push((path.to_owned(), wrong_type(Self::TY, value)));
            return;
        };
        if let Some(read) = axes(items, path, problems) {
            self.0 = read;
        }
    }
    fn show(&self) -> Value {
        self.0.iter().map(|a| Value::from(a.name())).collect()
    }
}

/// How the dimensions of the input data lie on the mesh: for each dimension its axes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DataSharding(pub Vec<Vec<MeshAxis>>);

impl Field for DataSharding {
    const TY: Ty = Ty::List("list of lists of mesh axes");

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        let lists: Option<Vec<&Vec<Value>>> = value
            .as_array()
            .and_then(|items| items.iter().map(Value::as_array).collect());
        let Some(lists) = lists else {
            problems.push((path.to_owned(), wrong_type(Self::TY, value)));
            return;
        };
        let read: Vec<_> = lists.iter().map(|l| axes(l, path, problems)).collect();
        if let Some(read) = read.into_iter().collect() {
            self.0 = read;
        }
    }
    fn show(&self) -> Value {
        self.0
            .iter()
            .map(|d| d.iter().map(|a| Value::from(a.name())).collect::<Value>())
            .collect()
    }
}

/// A logical axis and the mesh axes it lies on (none: replicated).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisRule {
    pub logical: String,
    pub mesh: Vec<MeshAxis>,
}

impl AxisRule {
    /// A rule by names.
    pub fn new(logical: &str, mesh: &[MeshAxis]) -> Self {
        AxisRule {
            logical: logical.to_owned(),
            mesh: mesh.to_vec(),
        }
    }
}

/// The rules in order of precedence.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AxisRules(pub Vec<AxisRule>);

impl Field for AxisRules {
    const TY: Ty = Ty::List("list of [logical axis, mesh axis or list of mesh axes or null]");

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        let Some(items) = value.as_array() else {
            problems.push((path.to_owned(), wrong_type(Self::TY, value)));
            return;
        };
        let before = problems.len();
        let mut rules = Vec::with_capacity(items.len());
        for item in items {
            let Some([Value::String(logical), on]) = item.as_array().map(Vec::as_slice) else {
                problems.push((
                    path.to_owned(),
                    wrong_type("a pair [logical axis, mesh axes]", item),
                ));
                continue;
            };
            let mesh = match on {
                Value::Null => Some(Vec::new()),
                // Python's None, which is a plain string to YAML.
                Value::String(s) if s == "None" => Some(Vec::new()),
                Value::Array(names) => axes(names, path, problems),
                one => axis(one, path, problems).map(|a| vec![a]),
            };
            if let Some(mesh) = mesh {
                rules.push(AxisRule {
                    logical: logical.clone(),
                    mesh,
                });
            }
        }
        if problems.len() == before {
            self.0 = rules;
        }
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

/// What the contractions under a path become. The pattern's form is the quantization pass's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantRule {
    pub path: String,
    pub dtype: QuantRuleType,
}

/// Explicit quantization rules; the first that matches wins.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QuantRules(pub Vec<QuantRule>);

impl Field for QuantRules {
    const TY: Ty = Ty::List("list of {path: pattern, dtype: int8 or none}");

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        let Some(items) = value.as_array() else {
            problems.push((path.to_owned(), wrong_type(Self::TY, value)));
            return;
        };
        let before = problems.len();
        let mut rules = Vec::with_capacity(items.len());
        for item in items {
            let Some(map) = item.as_object() else {
                problems.push((
                    path.to_owned(),
                    wrong_type("a dict {path: pattern, dtype: int8 or none}", item),
                ));
                continue;
            };
            for name in map
                .keys()
                .filter(|n| !["path", "dtype"].contains(&n.as_str()))
            {
                let nearest = nearest(name, ["path", "dtype"]);
                problems.push((join(path, name), Problem::UnknownKey { nearest }));
            }
            let missing = Value::Null;
            let mut pattern = String::new();
            pattern.read(
                map.get("path").unwrap_or(&missing),
                &join(path, "path"),
                problems,
            );
            let mut dtype = QuantRuleType::None;
            match map.get("dtype") {
                Some(Value::Null) => {}
                found => dtype.read(found.unwrap_or(&missing), &join(path, "dtype"), problems),
            }
            rules.push(QuantRule {
                path: pattern,
                dtype,
            });
        }
        if problems.len() == before {
            self.0 = rules;
        }
    }
    fn show(&self) -> Value {
        self.0
            .iter()
            .map(|r| serde_json::json!({"path": r.path, "dtype": r.dtype.name()}))
            .collect()
    }
}

/// A free dict of a feature that does not exist here.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FreeDict(pub Map<String, Value>);

impl Field for FreeDict {
    const TY: Ty = Ty::Free;

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        match value {
            Value::Object(map) => map.clone_into(&mut self.0),
            other => problems.push((path.to_owned(), wrong_type(Self::TY, other))),
        }
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

    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        match value {
            Value::Array(items) => items.clone_into(&mut self.0),
            other => problems.push((path.to_owned(), wrong_type(Self::TY, other))),
        }
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
    fn read_known(
        &mut self,
        what: &'static str,
        known: &[&str],
        value: &Value,
        path: &str,
        problems: &mut Problems,
    ) {
        match value {
            Value::Null => *self = ModelConfig::Unset,
            Value::String(s) if s.is_empty() => *self = ModelConfig::Unset,
            Value::String(s) => *self = ModelConfig::Path(s.clone()),
            Value::Object(map) => {
                for name in map.keys().filter(|n| !known.contains(&n.as_str())) {
                    let nearest = nearest(name, known.iter().copied());
                    problems.push((join(path, name), Problem::UnknownKey { nearest }));
                }
                *self = ModelConfig::Inline(map.clone());
            }
            other => problems.push((
                path.to_owned(),
                Problem::WrongType {
                    expected: what.to_owned(),
                    found: describe(other),
                },
            )),
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

            fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
                self.0.read_known($what, $known, value, path, problems);
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
