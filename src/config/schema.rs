//! The schema: every key of a configuration, declared once.
//!
//! Keys marked `Ours` belong to this project; all others are MaxDiffusion's, with its names,
//! meanings and the defaults of its `base_xl.yml`.

use crate::data::shapes::ShapeWord;
use crate::emit::DotPrecision;
use crate::graph::NumericsConvention;
use crate::nn::Remat;
use crate::pipelines::HiresUpscaler;
use crate::pipelines::prompt::PromptSyntax;
use crate::quant::{ObserverCompat, ObserverKind};
use crate::schedulers::{
    AlgorithmType, BetaSchedule, FinalSigmas, PredictionType, SchedulerKind, TimestepSpacing,
};
use crate::shard::{Axis, LogicalAxisRules};
use crate::train::TEXT_PROJECTIONS;
use crate::train::schedule::Decay;
use crate::weights::quantized::QuantizedLayout;

use super::condition::Condition::{
    self, Both, Either, FamilyHas, Given, Is, IsNot, MoreThan, SamplerReads,
};
use super::condition::Trait;
use super::field::schema;
use super::key::Mark::{FixedOnResume, NotAnOption};
use super::key::Range::{
    Above, AboveUpTo, AtLeast, Between, HalfOpen, MinusOneOr, MinusOneOrBetween,
};
use super::key::Status::{IgnoredByMaxDiffusion, NoEffect, NotYet, Ours, Used};
use super::quant::{QuantRules, WeightGranularity};
use super::values::*;
use super::verb::Verb;
use crate::models::Family;

/// Most devices, slices, or examples for a device: more are a slip of the keyboard, and products of them are counted.
const MOST: f64 = 65_536.0;

/// XLA's own default, and JAX's.
pub const DEFAULT_GPU_MEMORY_FRACTION: f64 = 0.75;

/// Most images of one call.
pub const MOST_IMAGES: u64 = 100_000;

const TRAIN: &[Verb] = &[Verb::Train];
const GENERATE: &[Verb] = &[Verb::Generate];
const QUANTIZE: &[Verb] = &[Verb::Quantize];
const TRAIN_GENERATE: &[Verb] = &[Verb::Train, Verb::Generate];
/// Verbs of keys that name the folder of a run.
const RUN: &[Verb] = &[Verb::Train, Verb::Generate, Verb::Compile, Verb::Quantize];
/// Verbs of keys that change the training step's program.
const TRAIN_STEP: &[Verb] = &[Verb::Train, Verb::Compile, Verb::Lower];
const AHEAD: &[Verb] = &[Verb::Compile, Verb::Lower];
/// Verbs of keys that change every program of a model.
const PROGRAM: &[Verb] = &[Verb::Train, Verb::Generate, Verb::Compile, Verb::Lower];
const EVERY: &[Verb] = &Verb::ALL;
/// Verbs of keys that change programs, of a whole model or of a part.
const ANY_PROGRAM: &[Verb] = &[
    Verb::Train,
    Verb::Generate,
    Verb::Compile,
    Verb::Lower,
    Verb::ModuleRun,
];
/// Verbs that run on hardware, or compile for it.
const ON_HARDWARE: &[Verb] = &[
    Verb::Train,
    Verb::Generate,
    Verb::Compile,
    Verb::Lower,
    Verb::Quantize,
    Verb::ModuleRun,
];
/// Verbs that open published models.
const OPENS: &[Verb] = &[Verb::Train, Verb::Generate, Verb::Quantize];
/// Verbs of keys that choose the model.
const MODEL: &[Verb] = &[
    Verb::Train,
    Verb::Generate,
    Verb::Compile,
    Verb::Lower,
    Verb::Quantize,
];
/// Verbs that compile programs, or simulate a compiled one's kernels.
const COMPILES: &[Verb] = &[
    Verb::Train,
    Verb::Generate,
    Verb::ModuleRun,
    Verb::Quantize,
    Verb::Compile,
];
/// Verbs of keys that change only the denoising step's program.
const DENOISE: &[Verb] = &[Verb::Generate, Verb::Compile, Verb::Lower];

const OTHER_DATASETS: &str =
    "only dataset types of MaxDiffusion that are not here yet (tf, grain, synthetic) read it";
const PREPROCESSING: &str = "only the scripts of MaxDiffusion that prepare datasets read it";
const SAFETENSORS: &str =
    "models are read from safetensors, which are the same for PyTorch and Flax";
const FLASH: &str = "kernels of attention choose their own blocks and mask their own padding";
const OWN_ENCODERS: &str = "text encoders and tokenizers are those beside the model";
const CUSTOM_REMAT: &str = "only remat_policy=CUSTOM reads it, which is not here yet";
const PROFILER: &str = "there is no profiler here yet";

/// There are images to draw.
const CALIBRATED: Condition = Either(
    &Given("calibration.prompts"),
    &Given("calibration.prompts_file"),
);
const INT8: Condition = Is("quantization", &["int8"]);
const MODES: &[&str] = &[
    "int8",
    "int8_w8a16",
    "w4a16",
    "fp8",
    "fp8_full",
    "fp8_w8a16",
    "nf4",
    "mxfp4",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp8",
    "nvfp4",
    "int8_w8a8_static",
    "fp8_w8a8_static",
    "svdquant_w4a16",
    "w4a4",
    "svdquant_w4a4",
];
const STATIC: Condition = Is("quantization", &["int8_w8a8_static", "fp8_w8a8_static"]);
/// AQT's int8, whose derivative is in int8 too.
const AQT: Condition = Both(
    &Is("use_qwix_quantization", &["False"]),
    &Is("quantization_numerics", &["", "aqt"]),
);
/// The gradient of a weight is of range that is found in parts of the batch.
const WEIGHT_GRADIENTS: Condition = Either(&Both(&INT8, &AQT), &Is("quantization", &["fp8_full"]));
const QUANTIZED: Condition = Is("quantization", MODES);
/// Weights are quantized once: all modes but int8, which is the first.
const OF_WEIGHTS: Condition = Is("quantization", MODES.split_at(1).1);
/// Modes whose weights have other formats on demand.
const WEIGHTS_ONLY: Condition = Is(
    "quantization",
    &[
        "int8_w8a16",
        "w4a16",
        "fp8",
        "fp8_w8a16",
        "int8_w8a8_static",
        "fp8_w8a8_static",
        "svdquant_w4a16",
        "w4a4",
        "svdquant_w4a4",
    ],
);
const LOW_RANK: Condition = Either(
    &Is("quantization", &["svdquant_w4a16", "svdquant_w4a4"]),
    &Given("quant_rules"),
);
const PERCENTILE: Condition = Either(
    &Is("quantization_observer", &["percentile"]),
    &Either(&Given("quant_rules"), &Given("quantization_candidates")),
);
const CLASSIFIER_FREE: Condition = Is("do_classifier_free_guidance", &["True"]);
/// A step runs the model with and without the prompt.
const GUIDED: Condition = Either(&CLASSIFIER_FREE, &MoreThan("true_cfg_scale", 1));
/// The guidance scale has an effect.
const SCALED: Condition = Either(&CLASSIFIER_FREE, &FamilyHas(Trait::EmbeddedGuidance));
const HIRES: Condition = Given("hires_scale");
const IP_ADAPTER: Condition = Given("ip_adapter_path");
const CONTROLNET: Condition = Is("use_controlnet", &["True"]);
/// Where the family is not said, a file is one of MaxDiffusion's, for UNets.
const CONTROLLED: Condition = Either(
    &CONTROLNET,
    &Is("model_family", &["flux_dev", "flux_schnell"]),
);
const FLOW_MATCHING: Condition = FamilyHas(Trait::FlowMatching);
const LOGIT_NORMAL: Condition = Both(
    &FLOW_MATCHING,
    &Is("weighting_scheme", &["", "logit_normal"]),
);
const FINE_TUNING: Condition = Is("train_new_unet", &["False"]);
const FOLDER_TYPES: Condition = Is("dataset_type", &["folder", "webdataset", "hf", "tfrecord"]);
const DREAMBOOTH: Condition = Given("instance_data_dir");
const FOLDER: Condition = Either(&FOLDER_TYPES, &DREAMBOOTH);
const PRIOR: Condition = Is("with_prior_preservation", &["True"]);
const TABLES: Condition = Is("dataset_type", &["hf"]);
const COLUMNS: Condition = Is("dataset_type", &["hf", "tfrecord"]);
const BUCKETS: Condition = Is("enable_bucket", &["True"]);
const SHUFFLED: Condition = MoreThan("caption_shuffles", 0);
const INVERSION: Condition = Given("placeholder_token");
const LORA_TRAINING: Condition = MoreThan("lora_rank", 0);
const TUNED_TEXT: Condition = Both(&Is("train_text_encoder", &["True"]), &FINE_TUNING);
/// One of the models is, or may be, SDXL's refiner.
const MAY_REFINE: Condition = Either(
    &Given("refiner_model_name_or_path"),
    &FamilyHas(Trait::AestheticScore),
);

schema! {
    /// A whole configuration, every key with its value. [`Config::load`] makes one.
    pub struct Config {
        group "Run and metrics";
        /// Name of the run: a folder inside `output_dir`. Empty: the environment variable
        /// `JOBSET_NAME`, or no folder of its own.
        run_name: String = String::new(), Used, RUN, is [NotAnOption];
        /// Folder for everything that a run writes.
        output_dir: String = "sdxl-model-finetuned".into(), Used, RUN, is [NotAnOption];
        /// Seed of initial weights, data order, noise and stochastic rounding. -1 draws one, which is written into
        /// images and checkpoints.
        seed: Seed = Seed(0), Used, TRAIN_GENERATE, is [FixedOnResume, NotAnOption];
        /// Steps between two log lines (without a progress bar), and between two flushes of the metrics.
        log_period: u64 = 100, Used, TRAIN, in AtLeast(1.0);
        /// Write loss, learning rate and speed as JSON lines and for TensorBoard, and a page with curves and samples, `report.html`.
        write_metrics: bool = true, Used, TRAIN;
        /// File of the JSON lines. Empty: `metrics.jsonl` in the run's folder.
        metrics_file: String = String::new(), Used, TRAIN, when Is("write_metrics", &["True"]);
        /// Folder of the files for TensorBoard. Empty: `tensorboard` in the run's folder, which MaxDiffusion takes wherever there
        /// is a `run_name`.
        tensorboard_dir: String = String::new(), Used, TRAIN, when Is("write_metrics", &["True"]);
        /// File of the durations of the phases of a run.
        timing_metrics_file: String = String::new(), NotYet("a file of phase durations"), TRAIN;
        /// Write the durations of the phases of a run.
        write_timing_metrics: bool = true, NoEffect("without timing_metrics_file there is nothing to write, in MaxDiffusion too"), TRAIN;
        /// Copy metrics to Cloud Storage.
        gcs_metrics: bool = false, NoEffect("metrics are written to the run's folder only"), TRAIN;
        /// Copy the configuration to Cloud Storage.
        save_config_to_gcs: bool = false, NoEffect("the configuration is written to the run's folder only"), TRAIN;
        /// Bucket for `save_config_to_gcs`; nothing else reads it.
        base_output_directory: String = String::new(), IgnoredByMaxDiffusion, TRAIN;
        /// Compile the functions that make the initial state.
        jit_initializers: bool = true, NoEffect("initial state is made on the host"), TRAIN;

        group "Model";
        /// Folder of a model in diffusers' layout, a single file, the folder of a fine-tuning run, or a name on the hub, which
        /// `train`, `generate` and `quantize` download. The architectures of the known models are built in: enough for `lower` and
        /// `compile`, which need no weights.
        pretrained_model_name_or_path: String = "stabilityai/stable-diffusion-xl-base-1.0".into(), Used, MODEL, is [FixedOnResume, NotAnOption];
        /// Required family of the model `pretrained_model_name_or_path`. Empty: any.
        model_family: Option<Family> = None, Ours, MODEL;
        /// Autoencoder in place of the model's own, `AutoencoderKL` or `AutoencoderTiny` (TAESD): a folder in diffusers' layout,
        /// an original file, or a name on the hub. Empty: the model's own.
        vae_model_name_or_path: String = String::new(), Ours, TRAIN_GENERATE, is [FixedOnResume];
        /// Denoiser in place of the model's own, of the same family: a file of the UNet or transformer alone, safetensors or GGUF,
        /// also quantized, or a name on the hub. Empty: the model's own.
        denoiser_model_name_or_path: String = String::new(), Ours, GENERATE;
        /// T5 text encoder in place of the model's own: a file of its own, safetensors or GGUF, a folder in transformers' layout,
        /// or a name on the hub. Empty: the model's own.
        t5_model_name_or_path: String = String::new(), Ours, GENERATE;
        /// Widen weights that files have quantized in other programs' formats to floats while they are read, also where a
        /// program could multiply them as they are stored. LoRAs can then be merged into them.
        dequantize: bool = false, Ours, GENERATE;
        /// A UNet architecture of your own, with the keys of diffusers' config.json: a dict, or the path of
        /// a JSON file (in a configuration file: relative to its folder). Empty: the model named
        /// by `pretrained_model_name_or_path`.
        unet_config: UNetConfig = UNetConfig::default(), Ours, PROGRAM, is [FixedOnResume];
        /// A text encoder of your own, with the keys of transformers' CLIPTextConfig: a dict or the
        /// path of a JSON file.
        text_encoder_config: TextEncoderConfig = TextEncoderConfig::default(), Ours, PROGRAM, is [FixedOnResume];
        /// Folder or file of the tokenizer, or (for `generate`) its name on the hub. Empty: beside the model, or built from the captions
        /// when the text encoder is trained from scratch.
        tokenizer_model_name_or_path: String = String::new(), Used, MODEL, is [FixedOnResume];
        /// Start from random weights, on pixels, instead of fine-tuning `pretrained_model_name_or_path`: a published model in its
        /// latents, or with a `unet_config` the run of one on pixels.
        train_new_unet: bool = false, Used, TRAIN;
        /// The same for FLUX.1.
        train_new_flux: bool = false, NotYet("training FLUX.1 from random weights; it is trained from published ones"), TRAIN;
        /// Train the text encoders with the UNet, or low-rank updates of both. MaxDiffusion never trains those of SDXL.
        train_text_encoder: bool = false, Used, TRAIN_STEP, is [FixedOnResume];
        /// Highest learning rate of published text encoders; that of new ones is `learning_rate`.
        text_encoder_learning_rate: f64 = 4.25e-6, Used, TRAIN, in AtLeast(0.0),
            when TUNED_TEXT, is [FixedOnResume];
        /// That of the second text encoder. Empty: that of the first.
        text_encoder_2_learning_rate: Option<f64> = None, Ours, TRAIN, in AtLeast(0.0),
            when Both(&TUNED_TEXT, &FamilyHas(Trait::SecondTextEncoder)), is [FixedOnResume];
        /// Element type of the weights. `quantize` rounds weights to it first, and stores none in a wider type.
        weights_dtype: FloatType = FloatType::Float32, Used, EVERY, is [FixedOnResume];
        /// Element type of the activations. `quantize` finds scales in it, and stores them so.
        activations_dtype: FloatType = FloatType::Bfloat16, Used, EVERY, is [FixedOnResume];
        /// `jax.lax.Precision` of dots and convolutions in float.
        precision: DotPrecision = DotPrecision::Default, Used, ANY_PROGRAM, is [FixedOnResume];
        /// Tokens that prompts are padded to for T5, and cut at. Empty: the family's, 512 for FLUX.1 dev, 256 for schnell and
        /// Stable Diffusion 3, 120 for PixArt-alpha, 300 for Sigma.
        max_sequence_length: Option<u64> = None, Used, PROGRAM, in Between(3.0, 512.0),
            when FamilyHas(Trait::SequenceLength), is [FixedOnResume];
        /// Read prompts by the third text encoder, T5, too. False: zeros are in the place of its results, as in diffusers with
        /// `text_encoder_3=None`, and its files need not be there.
        use_text_encoder_3: bool = true, Ours, TRAIN_GENERATE, when FamilyHas(Trait::OptionalTextEncoder), is [FixedOnResume];
        /// Groups of the UNet's group norms. Empty: as in the model.
        norm_num_groups: Option<u64> = None, Used, MODEL, in AtLeast(1.0), is [FixedOnResume];
        /// Attention kernel. MaxDiffusion's other kernels compute the same function: a file that
        /// names one is computed as dot_product, with a warning.
        attention: Attention = Attention::DotProduct, Used, PROGRAM;
        /// Compile equal blocks of the denoiser as one loop: a smaller program, sooner compiled. Empty: on TPUs and GPUs, the blocks
        /// of transformers and those of training steps.
        scan_layers: Option<bool> = None, Used, ANY_PROGRAM;
        /// Activations that the backward pass recomputes: FULL recomputes each block, MATMUL_WITHOUT_BATCH what lies between the results
        /// of its linear layers, convolutions and kernels of attention.
        remat_policy: Remat = Remat::None, Used, TRAIN_STEP;
        /// Values that `remat_policy=CUSTOM` keeps.
        names_which_can_be_saved: FreeList = FreeList::default(), NoEffect(CUSTOM_REMAT), TRAIN_STEP;
        /// Values that `remat_policy=CUSTOM` keeps in the host's memory.
        names_which_can_be_offloaded: FreeList = FreeList::default(), NoEffect(CUSTOM_REMAT), TRAIN_STEP;
        /// MaxDiffusion's name of the model.
        flux_name: String = String::new(), NoEffect("the model is the one that pretrained_model_name_or_path names"), PROGRAM;
        /// Repository of CLIP for FLUX.1.
        clip_model_name_or_path: String = String::new(), NoEffect(OWN_ENCODERS), PROGRAM;
        /// Repository of T5 for FLUX.1.
        t5xxl_model_name_or_path: String = String::new(), NoEffect(OWN_ENCODERS), PROGRAM;
        /// Free the text encoders after the prompts are encoded.
        offload_encoders: bool = true, NoEffect("the weights of each program are freed before those of the next are read"), GENERATE;
        /// Checkpoint of the UNet alone.
        unet_checkpoint: String = String::new(), NotYet("loading a UNet checkpoint of MaxDiffusion"), PROGRAM;
        /// Branch, tag or commit of the repository that `pretrained_model_name_or_path` names.
        /// MaxDiffusion's default is SDXL's branch of Flax weights, `refs/pr/95`.
        revision: String = "main".into(), Used, OPENS, is [NotAnOption];
        /// Token for the hub. Empty: `HF_TOKEN`, or the file that `hf auth login` writes.
        hf_access_token: String = String::new(), Used, OPENS, is [NotAnOption];
        /// Convert the weights from PyTorch.
        from_pt: bool = false, NoEffect(SAFETENSORS), TRAIN_GENERATE;
        /// Keep attention heads as a dimension of their own.
        split_head_dim: bool = true, NoEffect("the layout of heads is the compiler's choice"), PROGRAM;
        /// Mask padding tokens in flash attention.
        mask_padding_tokens: bool = true, NoEffect(FLASH), PROGRAM;
        /// Block sizes of flash attention.
        flash_block_sizes: FreeDict = FreeDict::default(), NoEffect(FLASH), PROGRAM;
        /// Compute softmax with powers of 2 in flash attention.
        use_base2_exp: bool = false, NoEffect(FLASH), PROGRAM;
        /// Another scheduler of instructions for flash attention.
        use_experimental_scheduler: bool = false, NoEffect(FLASH), PROGRAM;
        /// Sequence length below which flash attention falls back to dot_product.
        flash_min_seq_length: u64 = 4096, NoEffect(FLASH), PROGRAM;
        /// Shard the sequence in the same way in self and cross attention.
        attention_sharding_uniform: bool = true, NotYet("sharding self attention by heads and cross attention by sequence"), PROGRAM;

        group "Noise schedule and loss";
        /// Noise schedule and sampler; overrides the model's files.
        diffusion_scheduler_config: SchedulerConfig = SchedulerConfig::default(), Used, PROGRAM, is [FixedOnResume];
        /// Short for `diffusion_scheduler_config._class_name`.
        scheduler: Option<SchedulerKind> = None, Ours, TRAIN_GENERATE, is [NotAnOption];
        /// Short for `diffusion_scheduler_config.prediction_type`.
        prediction_type: Option<PredictionType> = None, Ours, PROGRAM;
        /// Cap of the signal-to-noise ratio in the weights of the loss: min-SNR weighting (Hang et al.
        /// 2023), or the cap of `loss_weighting`. -1 is off.
        snr_gamma: f64 = -1.0, Used, TRAIN_STEP, is [FixedOnResume];
        /// Weight of the loss at each timestep: `snr_plus_one` measures the error of the velocity,
        /// whatever the model predicts, with the ratio capped at `snr_gamma`; `debiased` divides that of the noise by the root
        /// of the ratio, and that of the velocity by the ratio and 1 (kohya's debiased_estimation_loss).
        loss_weighting: LossWeighting = LossWeighting::None, Ours, TRAIN_STEP, is [FixedOnResume];
        /// Add a random constant of this deviation to the noise of each channel, so that the model learns to change an image's
        /// brightness (diffusers' and kohya's).
        noise_offset: f64 = 0.0, Ours, TRAIN_STEP, in Between(0.0, 1.0), is [FixedOnResume];
        /// Add noise of this deviation to the noise in the model's input, but not to what it is to predict (Ning et al. 2023;
        /// diffusers').
        input_perturbation: f64 = 0.0, Ours, TRAIN_STEP, in Between(0.0, 1.0), is [FixedOnResume];
        /// For flow matching: which noise levels training draws how often, and how much their errors count, as in diffusers'
        /// scripts. Empty: as there, none for FLUX.1 and logit_normal for Stable Diffusion 3.
        weighting_scheme: Option<WeightingScheme> = None, Ours, TRAIN_STEP, when FLOW_MATCHING, is [FixedOnResume];
        /// Mean of the normal draw of logit_normal; above 0 little noise is drawn more often.
        logit_mean: f64 = 0.0, Ours, TRAIN_STEP, in Between(-5.0, 5.0), when LOGIT_NORMAL, is [FixedOnResume];
        /// Deviation of the normal draw of logit_normal.
        logit_std: f64 = 1.0, Ours, TRAIN_STEP, in AboveUpTo(0.0, 10.0), when LOGIT_NORMAL, is [FixedOnResume];
        /// Scale of mode: how much more often levels in the middle are drawn, or below 0 those at the ends.
        mode_scale: f64 = 1.29, Ours, TRAIN_STEP, in Between(-1.0, 1.75),
            when Both(&FLOW_MATCHING, &Is("weighting_scheme", &["mode"])), is [FixedOnResume];
        /// For flow matching: measure the error of the clean sample instead of the velocity, which counts little noise less. It is
        /// the default of diffusers' scripts for Stable Diffusion 3.
        precondition_outputs: bool = false, Ours, TRAIN_STEP, when FLOW_MATCHING, is [FixedOnResume];
        /// Guidance scale that FLUX.1 dev is told in training. Empty: `guidance_scale`, as in diffusers' scripts and MaxDiffusion.
        train_guidance_scale: Option<f64> = None, Ours, TRAIN_STEP, in Between(0.0, 100.0),
            when FamilyHas(Trait::EmbeddedGuidance), is [FixedOnResume];
        /// Draws some timesteps more often than others.
        timestep_bias: TimestepBias = TimestepBias::default(), Used, TRAIN_STEP, is [FixedOnResume];
        /// Move noise levels by the image's size, for flow matching (`use_dynamic_shifting`). Empty: as in the model's files.
        time_shift: Option<bool> = None, Used, GENERATE, when SamplerReads("use_dynamic_shifting");
        /// How far they move for an image of 256 tokens. Empty: as in the model's files.
        base_shift: Option<f64> = None, Used, GENERATE, in Between(-10.0, 10.0), when SamplerReads("base_shift");
        /// How far they move for an image of 4096 tokens. Empty: as in the model's files.
        max_shift: Option<f64> = None, Used, GENERATE, in Between(-10.0, 10.0), when SamplerReads("max_shift");

        group "Quantization";
        /// Quantization mode; empty is off, and for a checkpoint that `quantize` wrote, the mode that it was given.
        quantization: Quantization = Quantization::Off, Used, EVERY, is [FixedOnResume];
        /// Number of parts, each with its own scale, of the contraction over the batch in the weight
        /// gradient, so that range finding stays inside a slice. -1: the number of slices. 0: the
        /// weight gradient stays in float.
        quantization_local_shard_count: i64 = -1, Used, TRAIN_STEP, in MinusOneOrBetween(0.0, MOST),
            when WEIGHT_GRADIENTS;
        /// Multiply in int8 or fp8 in the derivatives of convolutions too, as products of patches; otherwise those of dots alone.
        quantization_convolution_gradients: bool = false, Ours, TRAIN_STEP, when WEIGHT_GRADIENTS, is [FixedOnResume];
        /// Leave in bfloat16 what int8 does not make faster on the chip at hand, by the time that rounding takes and the product
        /// saves: known of TPUs, and on GPUs all convolutions. `compile` lists what stays.
        int8_where_faster: bool = false, Ours, ANY_PROGRAM, when INT8, is [FixedOnResume];
        /// Round as the mode does, but multiply in float, on any device: what a mode does to quality, where the chip has no
        /// units for it. It saves no time. Also for checkpoints that are quantized.
        quantization_emulate: bool = false, Ours, ANY_PROGRAM, when IsNot("int8_where_faster", "True"), is [FixedOnResume];
        /// Qwix's rules and numerics instead of AQT's.
        use_qwix_quantization: bool = false, Used, EVERY,
            when QUANTIZED, is [FixedOnResume];
        /// How values become integers: AQT's, Qwix's or AMD Quark's conventions, DeepCompressor's and ModelOpt's narrow range of
        /// integers (`narrow`), or with `quantize` llama.cpp's blocks (`gguf`, for int8_w8a16 and w4a16 with a number as
        /// granularity). Empty: AQT's; for the static modes, w4a4 and those of SVDQuant AMD Quark's; fp8, fp8_full, fp8_w8a16, nf4,
        /// nvfp4 and OCP's microscaling formats have their own.
        quantization_numerics: Option<NumericsConvention> = None, Ours, EVERY,
            when Both(&QUANTIZED, &Is("use_qwix_quantization", &["False"])), is [FixedOnResume];
        /// Which elements of a weight share a scale: all (`tensor`), those of an output feature (`channel`), or of it so many
        /// input features. Empty: `channel`; for the other modes of fp8 than itself `tensor`, w4a16, w4a4 and nf4 64, OCP's
        /// microscaling formats 32, nvfp4 16. With fp8, fp8_full and w4a4 also which elements of an activation: all, those of a
        /// token, or of it so many features.
        quantization_granularity: WeightGranularity = WeightGranularity::default(), Ours, EVERY,
            when OF_WEIGHTS, is [FixedOnResume];
        /// Whether integers lie around zero; otherwise each scale of a weight has a zero point, as AMD Quark's have, or a float that is
        /// added, as llama.cpp's Q4_1 has.
        quantization_symmetric: bool = true, Ours, EVERY,
            when Both(&WEIGHTS_ONLY, &Is("quantization_numerics", &["quark", "gguf"])), is [FixedOnResume];
        /// Rules that come before the mode's own: the mode of dots and convolutions whose path matches a pattern, or none for
        /// float. The first match wins. A rule has the mode's own granularity, numerics as above, and is symmetric, unless
        /// it says otherwise. For `quantize` it may also have the observer and the algorithm of its weights. Also the path of a
        /// YAML file that has the list.
        quant_rules: QuantRules = QuantRules::default(), Ours, EVERY,
            when QUANTIZED, is [FixedOnResume];
        /// How `quantize` names and packs quantized weights: this program's way, or that of AMD Quark's export, which Quark and
        /// diffusers with Quark read.
        quantized_layout: QuantizedLayout = QuantizedLayout::Own, Ours, QUANTIZE, when QUANTIZED;
        /// Training whose forward pass rounds: what decides the scales of weights. Learned ones (`lsq`) start from those of the
        /// weights' ranges, and `quantize` takes them.
        qat_observer: QatObserver = QatObserver::MinMax, Ours, TRAIN_STEP,
            when Is("quantization", &["int8_w8a16", "w4a16", "fp8", "fp8_w8a16", "int8_w8a8_static", "fp8_w8a8_static", "w4a4"]),
            is [FixedOnResume];
        /// The share of a batch's range in the moving average that static modes round activations by while a model is trained.
        qat_averaging_constant: f64 = 0.01, Ours, TRAIN_STEP, in AboveUpTo(0.0, 1.0),
            when Either(&STATIC, &Given("quant_rules")), is [FixedOnResume];
        /// Updates after which learned scales and the ranges of activations stay as they are, while weights are trained on. -1:
        /// never.
        qat_freeze_observer_steps: i64 = -1, Ours, TRAIN_STEP, in MinusOneOr(1.0),
            when Either(&Is("qat_observer", &["lsq"]), &Either(&STATIC, &Given("quant_rules"))),
            is [FixedOnResume];
        /// With a budget the formats to choose from, in the form of rules, each for the layers that its pattern matches. Empty: the
        /// mode, int8_w8a16 and none.
        quantization_candidates: QuantRules = QuantRules::default(), Ours, QUANTIZE, when QUANTIZED;
        /// Which layers stay in float where no rule decides, and what calibration runs with where it does not say: the family's
        /// choice, or that of AMD Quark's guide.
        quantization_preset: QuantPreset = QuantPreset::Family, Ours, QUANTIZE, when QUANTIZED;
        /// What decides the range of a weight's scale.
        quantization_observer: ObserverKind = ObserverKind::MinMax, Ours, QUANTIZE, when WEIGHTS_ONLY;
        /// Observers of weights that give another library's results, with its defects, for comparison only. Empty: none.
        observer_compat: Option<ObserverCompat> = None, Ours, QUANTIZE,
            when Is("quantization_observer", &["histogram", "mse", "percentile"]);
        /// Percent of a weight's values that its scale covers.
        quantization_percentile: f64 = 99.99, Ours, QUANTIZE, in AboveUpTo(0.0, 100.0), when PERCENTILE;
        /// SmoothQuant: the share of the activations' range in the factors that weights take over from them. Empty: none.
        quantization_smooth_alpha: Option<f64> = None, Ours, QUANTIZE, in Between(0.0, 1.0),
            when Either(&STATIC, &Given("quant_rules"));
        /// How weights become integers: each to the nearest one; in linear layers by `gptq` or `awq`, which calibration feeds; or by
        /// `hqq`, which needs none.
        quantization_algorithm: WeightAlgorithm = WeightAlgorithm::Nearest, Ours, QUANTIZE, when WEIGHTS_ONLY;
        /// Rank of the product in float beside a layer's quantized weight.
        svd_rank: u64 = 32, Ours, QUANTIZE, in Between(1.0, 1024.0), when LOW_RANK;
        /// The share of the activations' range in what the low-rank product is chosen by. With -1 the best of 1/20 to 19/20 is
        /// taken.
        svd_alpha: f64 = 0.5, Ours, QUANTIZE, in MinusOneOrBetween(0.0, 1.0), when LOW_RANK;
        /// Times that the low-rank product is chosen anew for what quantizing leaves. 1: AMD Quark's.
        svd_iterations: u64 = 1, Ours, QUANTIZE, in Between(1.0, 100.0), when LOW_RANK;
        /// Where the factors go that share ranges between activations and weights: `quark` divides them out of the weight
        /// again, `paper` divides activations by them.
        svd_order: SvdOrder = SvdOrder::Quark, Ours, QUANTIZE, when LOW_RANK;
        /// The pipeline's runs that find the range of activations, and with a budget or `--sensitivity` what errors do.
        calibration: Calibration = Calibration::default(), Ours, QUANTIZE, when QUANTIZED;

        group "Hardware and parallelism";
        /// Hardware to run on, or to compile for. `quantize` calibrates on it.
        hardware: Hardware = Hardware::Auto, Used, ON_HARDWARE, is [NotAnOption];
        /// Number of virtual devices that the CPU is split into. -1: one.
        num_devices: i64 = -1, Ours, &[Verb::Train, Verb::Generate, Verb::Compile, Verb::ModuleRun], in MinusOneOrBetween(1.0, MOST),
            when Is("hardware", &["cpu", "auto"]), is [NotAnOption];
        /// Share of a GPU's memory that is taken at the start, and never exceeded. A smaller one leaves room for other programs on
        /// the same GPU.
        gpu_memory_fraction: f64 = DEFAULT_GPU_MEMORY_FRACTION, Ours, &[Verb::Train, Verb::Generate, Verb::Quantize, Verb::ModuleRun],
            in AboveUpTo(0.0, 1.0),
            when Is("hardware", &["gpu", "auto"]), is [NotAnOption];
        /// Topology to compile for, which need not be here: `v5e-256`, `h200`. Empty: the devices of this
        /// machine.
        compile_topology: String = String::new(), Ours, AHEAD;
        /// Slices of `compile_topology`, joined by the data-centre network. -1: one.
        compile_topology_num_slices: i64 = -1, Used, AHEAD, in MinusOneOrBetween(1.0, MOST);
        /// Axes of the mesh, in this order.
        mesh_axes: MeshAxes = MeshAxes(Axis::ALL.to_vec()), NoEffect("the mesh always has the axes data, fsdp, context and tensor, in this order"), PROGRAM;
        /// The mesh axes of each logical axis; the first rule whose mesh axes are free wins.
        logical_axis_rules: LogicalAxisRules = LogicalAxisRules::default(), Used, PROGRAM;
        /// Mesh axes that the batch is split over.
        data_sharding: DataSharding = DataSharding(vec![Axis::ALL.to_vec()]), NoEffect("the rule for activation_batch in logical_axis_rules splits the batch"), PROGRAM;
        /// Slices along `data`; -1: all that the other axes leave.
        dcn_data_parallelism: i64 = -1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Slices along `fsdp`.
        dcn_fsdp_parallelism: i64 = 1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Slices along `context`.
        dcn_context_parallelism: i64 = 1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Slices along `tensor`.
        dcn_tensor_parallelism: i64 = 1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Devices of a slice along `data`; -1: all that the other axes leave.
        ici_data_parallelism: i64 = -1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Devices of a slice along `fsdp`.
        ici_fsdp_parallelism: i64 = 1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Devices of a slice along `context`.
        ici_context_parallelism: i64 = 1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Devices of a slice along `tensor`.
        ici_tensor_parallelism: i64 = 1, Used, PROGRAM, in MinusOneOrBetween(1.0, MOST);
        /// Allow a mesh axis to use part of a physical axis.
        allow_split_physical_axes: bool = false, Used, PROGRAM;
        /// Skip the start of JAX's distributed system.
        skip_jax_distributed_system: bool = false, NoEffect("there is no JAX here"), EVERY;
        /// Folder of the cache of compiled programs, and of the cycles of kernels that `compile` simulated. auto:
        /// `maxdiff-rs/programs` in the user's cache directory. Empty: no cache, which is MaxDiffusion's default.
        jax_cache_dir: String = "auto".into(), Used, COMPILES, is [NotAnOption];

        group "Data";
        /// Source of the training examples. Supported: shapes (made by the program), folder, webdataset (tar archives), hf
        /// (parquet files on this machine or on the hub), and tfrecord.
        dataset_type: DatasetType = DatasetType::Tf, Used, PROGRAM, is [FixedOnResume];
        /// Folder of images with captions: `NAME.txt` beside each image, or `metadata.jsonl`; for webdataset of `.tar` files, with
        /// `NAME.txt` and the image in the same one; for hf of `.parquet` files, or one such file (empty: those of `dataset_name`);
        /// for tfrecord of `.tfrecord` or `.tfrec` files.
        train_data_dir: String = String::new(), Used, TRAIN_STEP, when FOLDER_TYPES, is [FixedOnResume];
        /// In place of `train_data_dir`, several such folders with their weights: `{pictures: 3, others: 1}`. Of the samples of an
        /// epoch a folder has the share of its weight, up to 1 %. Weights are whole numbers, 1 to 10000.
        train_data_mix: FolderWeights = FolderWeights::default(), Ours, TRAIN_STEP, when FOLDER_TYPES, is [FixedOnResume];
        /// Column of a parquet file with the images: bytes, paths beside it, or both as `datasets` writes them. Of TFRecords the
        /// feature with the bytes of an image file.
        image_column: String = "image".into(), Used, TRAIN, when COLUMNS, is [FixedOnResume];
        /// Column of a parquet file with the captions: texts or lists of texts. Of TFRecords the feature with them.
        caption_column: String = "text".into(), Used, TRAIN, when COLUMNS, is [FixedOnResume];
        /// Side of the images in pixels. A model with four input channels works on latents of an
        /// eighth of that side, any other on pixels.
        resolution: u64 = 1024, Used, PROGRAM, in Between(8.0, 8192.0), is [FixedOnResume];
        /// Side k of the blocks of pixels that a pixel-space model sees as one position with 3 k k channels
        /// (PyTorch's PixelUnshuffle): k = 2 cuts its cost to about a quarter.
        pixel_unshuffle: u64 = 1, Ours, PROGRAM, in Between(1.0, 16.0), is [FixedOnResume];
        /// Fraction of the captions that is held out of training: 0, or 0.01 to 0.9.
        validation_fraction: f64 = 0.0, Ours, TRAIN_GENERATE, in HalfOpen(0.0, 1.0),
            when Is("dataset_type", &["shapes"]), is [FixedOnResume];
        /// Largest number of shapes in an image, 1 or 2; with 2, half of the images show one.
        max_objects: u64 = 2, Ours, TRAIN_GENERATE, in Between(1.0, 2.0),
            when Is("dataset_type", &["shapes"]), is [FixedOnResume];
        /// How far from the middle shapes may lie; 1 is anywhere in the image. The less a model has to learn about
        /// places, the sooner it draws outlines.
        position_spread: f64 = 1.0, Ours, TRAIN, in Between(0.0, 1.0),
            when Is("dataset_type", &["shapes"]), is [FixedOnResume];
        /// Colours and kinds of shapes that no caption has: `[purple, triangle]`. Empty: every caption may be drawn.
        shapes_without: Option<OneOrMore<ShapeWord>> = None, Ours, TRAIN_GENERATE,
            when Is("dataset_type", &["shapes"]), is [FixedOnResume];
        /// Colours and kinds of which every caption has at least one. Empty: no such demand.
        shapes_with: Option<OneOrMore<ShapeWord>> = None, Ours, TRAIN_GENERATE,
            when Is("dataset_type", &["shapes"]), is [FixedOnResume];
        /// Other words that captions have for colours and kinds: `{triangle: <sks>}`.
        shapes_words: ShapeNames = ShapeNames::default(), Ours, TRAIN_GENERATE,
            when Is("dataset_type", &["shapes"]), is [FixedOnResume];
        /// Fraction of captions that training replaces by the empty one, so that the model also learns the
        /// unconditional distribution, which classifier-free guidance needs.
        caption_dropout: f64 = 0.0, Ours, TRAIN, in Between(0.0, 1.0), is [FixedOnResume];
        /// Fraction of images that may be unreadable: each is named and skipped, more are an error.
        max_bad_image_fraction: f64 = 0.01, Ours, TRAIN, in Between(0.0, 1.0),
            when FOLDER, is [FixedOnResume];
        /// Dataset on the hub, whose parquet files are downloaded where there is no `train_data_dir`.
        dataset_name: String = "diffusers/pokemon-gpt4-captions".into(), Used, TRAIN, when TABLES, is [FixedOnResume];
        /// Branch, tag or commit of that dataset. `refs/convert/parquet` has the parquet files that the hub makes of many others.
        dataset_revision: String = "main".into(), Ours, TRAIN, when TABLES, is [FixedOnResume];
        /// Split of the dataset, where the names of parquet files or of their folders tell it: `train-00000-of-00002.parquet`.
        train_split: String = "train".into(), Used, TRAIN, when TABLES, is [FixedOnResume];
        /// Encode images and captions once, before training, and keep latents and text embeddings on disk. False, which
        /// encodes in every step, is not here yet.
        cache_latents_text_encoder_outputs: bool = true, Used, TRAIN, when FINE_TUNING;
        /// Folder of these latents and embeddings; runs may share it. Empty: `encoded` in `output_dir`. MaxDiffusion's
        /// default is a folder in `/tmp`.
        dataset_save_location: String = String::new(), Used, TRAIN, when FINE_TUNING, is [NotAnOption];
        /// Folder of a hub dataset that has the files.
        hf_data_dir: String = String::new(), Used, TRAIN, when TABLES, is [FixedOnResume];
        /// Files of a hub dataset.
        hf_train_files: String = String::new(), NoEffect("dataset_type=hf reads all parquet files of the split"), TRAIN;
        /// ArrayRecord files of a Grain dataset.
        grain_train_files: String = String::new(), NoEffect(OTHER_DATASETS), TRAIN;
        /// Processes that read a Grain dataset.
        grain_worker_count: u64 = 4, NoEffect(OTHER_DATASETS), TRAIN;
        /// Archives to make TFRecords of.
        data_files_pattern: String = String::new(), NoEffect(PREPROCESSING), TRAIN;
        /// Folder for what is extracted from them.
        extracted_files_dir: String = String::new(), NoEffect(PREPROCESSING), TRAIN;
        /// Folder of the TFRecords.
        tfrecords_dir: String = String::new(), NoEffect(PREPROCESSING), TRAIN;
        /// Examples of a TFRecord.
        no_records_per_shard: u64 = 1000, NoEffect(PREPROCESSING), TRAIN;
        /// Number of examples made for `dataset_type=synthetic`.
        synthetic_num_samples: Option<u64> = Some(1000), NoEffect(OTHER_DATASETS), TRAIN;
        /// Train on one batch over and over.
        reuse_example_batch: bool = false, NotYet("training on one batch over and over"), TRAIN;
        /// Configuration of a hub dataset.
        dataset_config_name: String = String::new(), IgnoredByMaxDiffusion, TRAIN;
        /// Keep the middle of an image. False: a part at a place that the seed and the image decide, the
        /// same in every epoch. MaxDiffusion has the key, with the default False, and ignores it.
        center_crop: bool = true, Used, TRAIN, when FOLDER, is [FixedOnResume];
        /// Mirror an image left to right in half of its uses. MaxDiffusion has the key and ignores it.
        random_flip: bool = false, Used, TRAIN, when FOLDER, is [FixedOnResume];
        /// Crop pictures to the nearest of sizes with about the area of `resolution` (aspect-ratio buckets, kohya's rule).
        enable_bucket: bool = false, Ours, TRAIN, when Both(&FINE_TUNING, &FOLDER), is [FixedOnResume];
        /// Shortest side of these sizes; a picture with a shorter one counts as unreadable. Empty: half of `resolution`.
        min_bucket_reso: Option<u64> = None, Ours, TRAIN, in Between(8.0, 8192.0), when BUCKETS, is [FixedOnResume];
        /// Longest side. Empty: twice `resolution`.
        max_bucket_reso: Option<u64> = None, Ours, TRAIN, in Between(8.0, 16384.0), when BUCKETS, is [FixedOnResume];
        /// What their sides are multiples of.
        bucket_reso_steps: u64 = 64, Ours, TRAIN, in Between(8.0, 8192.0), when BUCKETS, is [FixedOnResume];
        /// A folder called `10_name` has its pictures ten times in an epoch, as in kohya's trainers.
        folder_repeats: bool = false, Ours, TRAIN, when Is("dataset_type", &["folder"]), is [FixedOnResume];
        /// Weigh the error at each place of a picture with a mask: `alpha`, its alpha channel, where what is opaque counts, or
        /// `folder`, a picture in `conditioning_data_dir`, where white counts. The mask is cropped and mirrored as its picture, and
        /// averaged to the size of the latents; the loss is the mean over all places, as kohya's `masked_loss` and `alpha_mask`.
        masked_loss: MaskedLoss = MaskedLoss::None, Ours, TRAIN_STEP, when Both(&FINE_TUNING, &FOLDER), is [FixedOnResume];
        /// Folder of masks with the names of the pictures (the extension may differ), each as large as its picture.
        conditioning_data_dir: String = String::new(), Ours, TRAIN_STEP,
            when Is("masked_loss", &["folder"]), is [FixedOnResume];
        /// How many orders of the tags of a caption, which stand between commas, are encoded; each use draws one of them. Kohya's
        /// `shuffle_caption` with kept embeddings. 0: captions as they are written.
        caption_shuffles: u64 = 0, Ours, TRAIN, in Between(0.0, 1000.0),
            when Both(&FINE_TUNING, &FOLDER), is [FixedOnResume];
        /// How many first tags stay in place, and are never left out.
        keep_tokens: u64 = 0, Ours, TRAIN, when SHUFFLED, is [FixedOnResume];
        /// Probability that an order leaves out a tag.
        caption_tag_dropout_rate: f64 = 0.0, Ours, TRAIN, in Between(0.0, 1.0), when SHUFFLED, is [FixedOnResume];
        /// Processes that tokenize.
        tokenize_captions_num_proc: u64 = 4, IgnoredByMaxDiffusion, TRAIN;
        /// Processes that prepare images.
        transform_images_num_proc: u64 = 4, IgnoredByMaxDiffusion, TRAIN;
        /// Shuffle the examples.
        enable_data_shuffling: bool = true, IgnoredByMaxDiffusion, TRAIN;

        group "Training";
        /// Steps to train.
        max_train_steps: u64 = 200, Used, TRAIN, in AtLeast(1.0);
        /// Examples for each device and step; a fraction, if the total over all devices is whole.
        per_device_batch_size: f64 = 2.0, Used, PROGRAM, in AboveUpTo(0.0, MOST);
        /// Batches whose gradients are averaged for one update, which is one step. Each is `per_device_batch_size` on each device.
        gradient_accumulation_steps: u64 = 1, Ours, TRAIN_STEP, in Between(1.0, MOST);
        /// Highest learning rate.
        learning_rate: f64 = 4e-7, Used, TRAIN, in AtLeast(0.0), is [FixedOnResume];
        /// Fraction of the steps over which the learning rate rises from zero.
        warmup_steps_fraction: f64 = 0.0, Used, TRAIN, in Between(0.0, 1.0), is [FixedOnResume];
        /// Steps over which the learning rate rises from zero, in place of `warmup_steps_fraction`. 0: those of the fraction.
        lr_warmup_steps: u64 = 0, Ours, TRAIN, is [FixedOnResume];
        /// The learning rate after warm-up; MaxDiffusion has constant only.
        learning_rate_schedule: Decay = Decay::Constant, Ours, TRAIN, is [FixedOnResume];
        /// Cosines of cosine_with_restarts.
        lr_num_cycles: u64 = 1, Ours, TRAIN, in AtLeast(1.0),
            when Is("learning_rate_schedule", &["cosine_with_restarts"]), is [FixedOnResume];
        /// Exponent of polynomial.
        lr_power: f64 = 1.0, Ours, TRAIN, in Above(0.0), when Is("learning_rate_schedule", &["polynomial"]), is [FixedOnResume];
        /// Length of the schedule in steps. -1: `max_train_steps`.
        learning_rate_schedule_steps: i64 = -1, Used, TRAIN, in MinusOneOr(1.0), is [FixedOnResume];
        /// How weights follow their gradients: AdamW, AdamW8bit (moments of 8 bits, as bitsandbytes), Adafactor, Lion, or
        /// Prodigy, which finds its learning rate itself and takes `learning_rate=1`.
        optimizer_type: OptimizerType = OptimizerType::AdamW, Ours, TRAIN_STEP, is [FixedOnResume];
        /// Element type of the moments of AdamW and Lion. bfloat16 is rounded at random, so that small changes count on average.
        optimizer_state_dtype: FloatType = FloatType::Float32, Ours, TRAIN_STEP,
            when Is("optimizer_type", &["AdamW", "Lion"]), is [FixedOnResume];
        /// Round weights in bfloat16 up or down at random after each update, so that they follow small updates on average.
        stochastic_rounding: bool = false, Ours, TRAIN_STEP, when Is("weights_dtype", &["bfloat16"]), is [FixedOnResume];
        /// Element type in which the products that give gradients sum over the batch, on a device and between devices and slices.
        /// Empty: float32, which a single device then rounds to `activations_dtype`. With bfloat16, gradients whose rows on a TPU are no
        /// multiple of 16 stay in float32, because its compiler aborts on them.
        gradient_reduce_dtype: Option<FloatType> = None, Ours, TRAIN_STEP, is [FixedOnResume];
        /// AdamW, Lion and Prodigy: decay of the mean of gradients.
        adam_b1: f64 = 0.9, Used, TRAIN_STEP, in HalfOpen(0.0, 1.0),
            when IsNot("optimizer_type", "Adafactor"), is [FixedOnResume];
        /// AdamW and Prodigy: decay of the mean of squared gradients. Lion: decay of the mean of gradients that is kept, for
        /// which its authors take 0.99.
        adam_b2: f64 = 0.999, Used, TRAIN_STEP, in HalfOpen(0.0, 1.0),
            when IsNot("optimizer_type", "Adafactor"), is [FixedOnResume];
        /// AdamW and Prodigy: added to the denominator.
        adam_eps: f64 = 1e-8, Used, TRAIN_STEP, in Above(0.0),
            when Is("optimizer_type", &["AdamW", "AdamW8bit", "Prodigy"]), is [FixedOnResume];
        /// Share of the weights, times the learning rate, that every update takes away.
        adam_weight_decay: f64 = 1e-2, Used, TRAIN_STEP, in AtLeast(0.0), is [FixedOnResume];
        /// Whether norms and biases decay as well as all other weights.
        decay_norms_and_biases: bool = true, Ours, TRAIN_STEP, when MoreThan("adam_weight_decay", 0), is [FixedOnResume];
        /// Adafactor: multiply the learning rate with the root mean square of each weight.
        adafactor_scale_parameter: bool = false, Ours, TRAIN_STEP, when Is("optimizer_type", &["Adafactor"]), is [FixedOnResume];
        /// Prodigy: factor of the learning rate that it finds.
        prodigy_d_coef: f64 = 1.0, Ours, TRAIN_STEP, in Above(0.0), when Is("optimizer_type", &["Prodigy"]), is [FixedOnResume];
        /// Prodigy: correct moments for their start at 0, as Adam does.
        prodigy_use_bias_correction: bool = true, Ours, TRAIN_STEP, when Is("optimizer_type", &["Prodigy"]), is [FixedOnResume];
        /// Prodigy: leave the learning rate out of its estimate, so that warm-up does not enlarge it.
        prodigy_safeguard_warmup: bool = true, Ours, TRAIN_STEP, when Is("optimizer_type", &["Prodigy"]), is [FixedOnResume];
        /// Clip each element of the gradient to `max_grad_value`.
        opt_enable_grad_clipping: bool = false, Used, TRAIN_STEP, is [FixedOnResume];
        /// Largest absolute value of an element of the gradient.
        max_grad_value: f64 = 1.0, Used, TRAIN_STEP, in Above(0.0),
            when Is("opt_enable_grad_clipping", &["True"]), is [FixedOnResume];
        /// Scale the gradient down to the norm `max_grad_norm`.
        opt_enable_grad_global_norm_clipping: bool = false, Used, TRAIN_STEP, is [FixedOnResume];
        /// Largest norm of the whole gradient.
        max_grad_norm: f64 = 1.0, Used, TRAIN_STEP, in Above(0.0),
            when Is("opt_enable_grad_global_norm_clipping", &["True"]), is [FixedOnResume];
        /// Decay of the moving average of the weights, which samples use. 0: no average.
        ema_decay: f64 = 0.0, Ours, TRAIN_STEP, in HalfOpen(0.0, 1.0), is [FixedOnResume];
        /// Rank of the low-rank updates (LoRA) that are trained in place of the denoiser's weights. 0: the weights themselves.
        lora_rank: u64 = 0, Ours, TRAIN_STEP, in Between(0.0, 4096.0), is [FixedOnResume];
        /// Updates count `lora_alpha / lora_rank` times. 0: the rank.
        lora_alpha: f64 = 0.0, Ours, TRAIN_STEP, in AtLeast(0.0), when LORA_TRAINING, is [FixedOnResume];
        /// Layers of the denoiser that have an update: regular expressions that match the whole path, or an end of it after a
        /// dot. Empty: those of diffusers' scripts for the family.
        lora_target_modules: Option<OneOrMore<String>> = None, Ours, TRAIN_STEP,
            when LORA_TRAINING, is [FixedOnResume];
        /// The same of the text encoders, with `train_text_encoder`.
        lora_text_encoder_target_modules: OneOrMore<String> = OneOrMore(TEXT_PROJECTIONS.map(str::to_owned).to_vec()), Ours,
            TRAIN_STEP, when Both(&LORA_TRAINING, &TUNED_TEXT), is [FixedOnResume];
        /// Share of the input of updates that each step leaves out at random; what stays counts `1 / (1 - lora_dropout)` times, as with
        /// PEFT's key of this name. Validation and samples leave nothing out.
        lora_dropout: f64 = 0.0, Ours, TRAIN_STEP, in HalfOpen(0.0, 1.0), when LORA_TRAINING, is [FixedOnResume];
        /// The learning rate of the second factor of updates (`up`, PEFT's `lora_B`) is this many times that of the first (LoRA+).
        lora_plus_ratio: f64 = 1.0, Ours, TRAIN_STEP, in Above(0.0), when LORA_TRAINING, is [FixedOnResume];
        /// Train the low-rank factors of a model that `quantize` wrote with `quantization=svdquant_w4a16` or `svdquant_w4a4`, in
        /// place of the denoiser's weights: these stay as they are stored.
        train_low_rank: bool = false, Ours, TRAIN_STEP, when FINE_TUNING, is [FixedOnResume];
        /// Write a file with kohya's names beside that with diffusers', for web interfaces: of Stable Diffusion and SDXL.
        lora_kohya: bool = false, Ours, TRAIN, when LORA_TRAINING;
        /// Number of steps in a row whose loss or gradient may be infinite or NaN; each leaves the weights
        /// unchanged, one more ends the run.
        max_nonfinite_steps: u64 = 10, Ours, TRAIN;
        /// Steps between two grids of sample images. -1: none.
        sample_every: i64 = -1, Ours, TRAIN, in MinusOneOr(1.0);
        /// Pictures that are held out of training, to measure the loss on: each at four noise levels, with noise that is always the
        /// same.
        validation_images: u64 = 0, Ours, TRAIN, in Between(0.0, 100_000.0), when Both(&FINE_TUNING, &FOLDER), is [FixedOnResume];
        /// Steps between two measurements; there is one after the last step too. -1: only that.
        validation_every: i64 = -1, Ours, TRAIN, in MinusOneOr(1.0), when MoreThan("validation_images", 0);
        /// Prompts of the sample images. Empty: captions of the dataset.
        sample_prompts: Prompts = Prompts::default(), Ours, TRAIN, when MoreThan("sample_every", 0);
        /// Scale the learning rate with the batch.
        scale_lr: bool = false, IgnoredByMaxDiffusion, TRAIN;
        /// Examples of the dataset that are used, the first ones. -1: all. MaxDiffusion has the key and ignores it.
        max_train_samples: i64 = -1, Used, TRAIN, in MinusOneOr(1.0), is [FixedOnResume];
        /// Passes over the data; `max_train_steps` decides.
        num_train_epochs: u64 = 1, IgnoredByMaxDiffusion, TRAIN;

        group "Checkpoints";
        /// Steps between two checkpoints, for every model (MaxDiffusion counts examples for SDXL).
        /// -1: only at the end.
        checkpoint_every: i64 = -1, Used, TRAIN, in MinusOneOr(1.0);
        /// Number of its newest checkpoints that a run keeps; it never deletes those of earlier runs. -1: all.
        checkpoints_total_limit: i64 = -1, Ours, TRAIN, in MinusOneOr(1.0);
        /// Folder of the checkpoints. Empty: `checkpoints` in the run's folder.
        checkpoint_dir: String = String::new(), Ours, TRAIN_GENERATE;
        /// Copy what fine-tuning does not change (autoencoder, text encoders, tokenizers) into every checkpoint, instead of
        /// linking the files.
        checkpoint_copies: bool = false, Ours, TRAIN, when FINE_TUNING;
        /// What to do with existing checkpoints.
        resume: Resume = Resume::Auto, Ours, TRAIN;
        /// Write a checkpoint after the last step.
        save_final_checkpoint: bool = false, NoEffect("a run always ends with a checkpoint"), TRAIN;
        /// Read checkpoints on one replica and broadcast.
        enable_single_replica_ckpt_restoring: bool = false, NotYet("restoring on a single replica"), TRAIN;

        group "Generation";
        /// What the images show: one prompt or a list.
        prompt: Prompts = Prompts::default(), Used, GENERATE, is [NotAnOption];
        /// What the second text encoder reads in its place: T5 of FLUX.1, bigG of SDXL and Stable Diffusion 3. Empty: `prompt`.
        prompt_2: String = String::new(), Used, GENERATE,
            when FamilyHas(Trait::SecondTextEncoder);
        /// A file with one prompt in each line, instead of `prompt`. After a prompt may follow `--n negative prompt`,
        /// `--d seed`, `--l guidance scale`, `--s steps`, `--w width` and `--h height`; all lines have one size.
        prompts_file: String = String::new(), Ours, GENERATE, is [NotAnOption];
        /// Number of held-out captions to draw instead of `prompt` (all of them, if there are fewer). A fixed
        /// reader scores the images.
        held_out_prompts: u64 = 0, Ours, GENERATE, in Between(0.0, 10_000.0),
            when Is("dataset_type", &["shapes"]), is [NotAnOption];
        /// What the images should not show.
        negative_prompt: String = String::new(), Used, GENERATE,
            when GUIDED, is [NotAnOption];
        /// Images for each prompt.
        num_images_per_prompt: u64 = 1, Ours, GENERATE, in Between(1.0, MOST_IMAGES as f64), is [NotAnOption];
        /// Classifier-free guidance: run the model with and without the prompt and extrapolate. FLUX.1 was distilled from such
        /// predictions, and has `true_cfg_scale` for it: this key has no effect there, as in MaxDiffusion.
        do_classifier_free_guidance: bool = true, Used, PROGRAM;
        /// True guidance of FLUX.1, with diffusers' name: above 1 it is the factor of the difference between the predictions
        /// with the prompt and with the negative one, beside `guidance_scale`, which both take. A step runs the model twice.
        true_cfg_scale: f64 = 1.0, Ours, PROGRAM, in Between(1.0, 100.0),
            when FamilyHas(Trait::Distilled);
        /// Factor of the difference between the conditional and the unconditional prediction; 1 is the conditional one alone.
        /// FLUX.1 dev takes it as an input instead: it was distilled from such predictions.
        guidance_scale: f64 = 9.0, Used, TRAIN_GENERATE, in AtLeast(0.0),
            when SCALED, is [NotAnOption];
        /// Run the unconditional and the conditional row one after the other instead of as one batch: activations take
        /// half the memory.
        guidance_in_two_passes: bool = false, Ours, DENOISE,
            when GUIDED, is [NotAnOption];
        /// Layers of the transformer that skip-layer guidance leaves out: 7, 8 and 9 for Stable Diffusion 3.5 medium. It leads
        /// samples away from what the model predicts without them, and takes guidance in passes of one row. Empty: off.
        skip_guidance_layers: Option<OneOrMore<u64>> = None, Ours, DENOISE,
            when Both(&CLASSIFIER_FREE, &FamilyHas(Trait::SkipLayers));
        /// How strongly.
        skip_layer_guidance_scale: f64 = 2.8, Ours, GENERATE, in Between(0.0, 100.0),
            when Given("skip_guidance_layers");
        /// Fraction of the steps after which it starts.
        skip_layer_guidance_start: f64 = 0.01, Ours, GENERATE, in Between(0.0, 1.0),
            when Given("skip_guidance_layers");
        /// Fraction of the steps at which it stops.
        skip_layer_guidance_stop: f64 = 0.2, Ours, GENERATE, in Between(0.0, 1.0),
            when Given("skip_guidance_layers");
        /// Draw in the size nearest in shape among those that PixArt was trained with, then scale and crop the image to the size
        /// that is asked for, as diffusers' pipelines do where nothing else is said.
        use_resolution_binning: bool = false, Ours, GENERATE,
            when FamilyHas(Trait::ResolutionBins);
        /// Denoising steps.
        num_inference_steps: u64 = 20, Used, TRAIN_GENERATE, in Between(1.0, 1000.0), is [NotAnOption];
        /// Fresh noise that DDIM and TCD add in each step, relative to the amount that keeps the noise level.
        eta: f64 = 0.0, Ours, GENERATE, in Between(0.0, 1.0),
            when SamplerReads("eta");
        /// How far to rescale the standard deviation of the guided prediction to that of the conditional one (Lin et al.
        /// 2023, section 3.4). 0 and -1: not at all.
        guidance_rescale: f64 = 0.0, Used, GENERATE, in MinusOneOrBetween(0.0, 1.0),
            when GUIDED;
        /// Steps between two previews of each image, which show the clean image as predicted by then. 0: none.
        preview_steps: u64 = 0, Ours, GENERATE, in Between(0.0, 1000.0), is [NotAnOption];
        /// Autoencoder that decodes previews, as `vae_model_name_or_path`: TAESD takes a fraction of the time and memory. Empty:
        /// that of the images.
        preview_vae_model_name_or_path: String = String::new(), Ours, GENERATE, when MoreThan("preview_steps", 0), is [NotAnOption];
        /// Write the samples of every step beside each image, as `image-00001.latents.safetensors` with a tensor `latents`
        /// `[steps, channels, rows, columns]`, which `evaluate` compares.
        save_latents: bool = false, Ours, GENERATE, is [NotAnOption];
        /// Height of the images in pixels, for latent models. 0: `resolution`.
        height: u64 = 0, Ours, DENOISE, in Between(0.0, 65536.0), is [NotAnOption];
        /// Width of the images in pixels, for latent models. 0: `resolution`.
        width: u64 = 0, Ours, DENOISE, in Between(0.0, 65536.0), is [NotAnOption];
        /// Image to start from, for latent models: PNG, JPEG or WebP, scaled to the output size. From each of a list every
        /// prompt is drawn, with the same seeds.
        image: OneOrMore<String> = OneOrMore::default(), Ours, GENERATE;
        /// How far the result may differ from `image`: the fraction of the steps that run. 1 runs all.
        strength: f64 = 0.8, Ours, GENERATE, in Between(0.0, 1.0), when Given("image");
        /// Mask of `image`, of each if there are several: white parts are painted anew, black parts are kept.
        mask_image: String = String::new(), Ours, GENERATE, when Given("image");
        /// Hi-res fix: draw at `height` and `width`, enlarge by this factor (rounded down to whole latents), and draw
        /// again. Empty: off.
        hires_scale: Option<f64> = None, Ours, GENERATE, in AboveUpTo(1.0, 8.0);
        /// How far the second drawing may differ from the first: the fraction of its steps that run.
        hires_strength: f64 = 0.7, Ours, GENERATE, in Between(0.0, 1.0), when HIRES;
        /// What enlarges: the latents, as PyTorch's interpolation does, or the decoded image.
        hires_upscaler: HiresUpscaler = HiresUpscaler::Latent, Ours, GENERATE, when HIRES;
        /// Denoising steps of the second drawing, of which `hires_strength` run. 0: `num_inference_steps`.
        hires_steps: u64 = 0, Ours, GENERATE, in Between(0.0, 1000.0), when HIRES;
        /// SDXL's refiner, which takes the last steps: a model in any layout or by its name on the hub. The base model's
        /// weights are freed before the refiner's are read. Empty: none.
        refiner_model_name_or_path: String = String::new(), Ours, GENERATE;
        /// Fraction of the noise schedule after which the base model stops.
        denoising_end: f64 = 0.8, Ours, GENERATE, in Between(0.0, 1.0),
            when Given("refiner_model_name_or_path");
        /// Fraction of the noise schedule after which the refiner starts. Empty: where the base model stops.
        denoising_start: Option<f64> = None, Ours, GENERATE, in Between(0.0, 1.0),
            when Given("refiner_model_name_or_path");
        /// Conditioning of SDXL's refiner: the score of the image by LAION's aesthetic predictor, 1 to 10.
        aesthetic_score: f64 = 6.0, Ours, GENERATE, in Between(0.0, 10.0), when MAY_REFINE;
        /// The same for the unconditional row.
        negative_aesthetic_score: f64 = 2.5, Ours, GENERATE, in Between(0.0, 10.0),
            when Both(&GUIDED, &MAY_REFINE);
        /// How prompts are read: weighted as in web interfaces, with brackets and in as many chunks as they need, or
        /// plain as diffusers reads them.
        prompt_syntax: PromptSyntax = PromptSyntax::Weighted, Ours, GENERATE;
        /// Decode large images in overlapping tiles, which takes less memory.
        vae_tiling: bool = false, Ours, GENERATE;
        /// Number of last layers of the text encoders to skip. For SDXL's two a list of two, of which the refiner has the
        /// second; a single value applies to both.
        clip_skip: OneOrMore<u64> = OneOrMore::from(0), Ours, TRAIN_GENERATE, in Between(0.0, 1000.0), is [FixedOnResume];
        /// File with the initial noise, instead of noise from the seeds: safetensors with a tensor `latents`
        /// of unit normal values, one row for each image.
        latents: String = String::new(), Ours, GENERATE;
        /// Repository on the hub, or folder, of a distilled UNet such as SDXL-Lightning's.
        lightning_repo: String = String::new(), Used, GENERATE;
        /// File of `lightning_repo`: a UNet's weights, which replace those of the model, or a LoRA for them.
        lightning_ckpt: String = String::new(), Used, GENERATE, when Given("lightning_repo");
        /// Whether that file is PyTorch's.
        lightning_from_pt: bool = true, NoEffect("all safetensors are read in the same way"), GENERATE;
        /// LoRA adapters to generate with.
        lora_config: LoraConfig = LoraConfig::default(), Used, GENERATE;
        /// Textual inversions: safetensors files of web interfaces or diffusers, whose tokens prompts may name. The token is
        /// the one given, else the one in diffusers' files, else the file's name.
        textual_inversions: TextualInversionFiles = TextualInversionFiles::default(), Ours, GENERATE;
        /// File of an IP-Adapter (safetensors) for Stable Diffusion 1.5 or SDXL, or of a Plus one. Empty: none.
        ip_adapter_path: String = String::new(), Ours, GENERATE;
        /// Image that the IP-Adapter shows the model: its shorter side is scaled to the image encoder's size, and the middle cut
        /// out.
        ip_adapter_image: String = String::new(), Ours, GENERATE, when IP_ADAPTER;
        /// How much the image counts beside the prompt. 0 is as without.
        ip_adapter_scale: f64 = 1.0, Ours, GENERATE, in Between(0.0, 10.0), when IP_ADAPTER;
        /// Folder of the adapter's image encoder, with `config.json` and safetensors. Empty: `image_encoder` beside the adapter.
        ip_adapter_image_encoder: String = String::new(), Ours, GENERATE, when IP_ADAPTER;
        /// Use a ControlNet, or several whose effects add up.
        use_controlnet: bool = false, Ours, GENERATE;
        /// Conditioning image of the ControlNet, scaled to the output size. For several ControlNets a list, as for the
        /// other keys; a single value applies to all.
        /// FLUX.1 Canny and Depth see it too, without a ControlNet.
        controlnet_image: OneOrMore<String> = OneOrMore::default(), Used, GENERATE,
            when CONTROLLED;
        /// Folder of the ControlNet in diffusers' layout, or its name on the hub, or a list of several.
        controlnet_model_name_or_path: OneOrMore<String> = OneOrMore::from("diffusers/controlnet-canny-sdxl-1.0".to_owned()), Used, GENERATE,
            when CONTROLNET;
        /// Whether the ControlNet's weights are PyTorch's.
        controlnet_from_pt: bool = true, NoEffect("all safetensors are read in the same way"), GENERATE;
        /// Strength of the ControlNet.
        controlnet_conditioning_scale: OneOrMore<f64> = OneOrMore::from(0.5), Used, GENERATE, in Between(0.0, 10.0),
            when CONTROLNET;
        /// Replace `controlnet_image` by its Canny edges, for ControlNets that were trained on them.
        controlnet_canny: OneOrMore<bool> = OneOrMore::default(), Ours, GENERATE, when CONTROLLED;
        /// The kind of `controlnet_image`, for ControlNets of FLUX.1 that know several (`num_mode` in their configuration). In a
        /// list, -1 is for those that know one.
        control_mode: OneOrMore<i64> = OneOrMore::from(-1), Ours, GENERATE, in MinusOneOrBetween(0.0, MOST), when CONTROLNET;
        /// Fraction of the steps after which the ControlNet starts to act.
        control_guidance_start: OneOrMore<f64> = OneOrMore::from(0.0), Ours, GENERATE, in Between(0.0, 1.0),
            when CONTROLNET;
        /// Fraction of the steps after which the ControlNet stops.
        control_guidance_end: OneOrMore<f64> = OneOrMore::from(1.0), Ours, GENERATE, in Between(0.0, 1.0),
            when CONTROLNET;

        group "DreamBooth and textual inversion";
        /// Folder of pictures of the subject, in place of `train_data_dir`. Those without a caption of their own have `instance_prompt`.
        instance_data_dir: String = String::new(), Used, TRAIN, when FINE_TUNING, is [FixedOnResume];
        /// Train on pictures of the class too, so that the model does not forget it: as many as others, in each batch.
        with_prior_preservation: bool = false, Ours, TRAIN, when DREAMBOOTH, is [FixedOnResume];
        /// Folder of pictures of the class; what it lacks is drawn before training. Empty: `class` in `output_dir`.
        class_data_dir: String = String::new(), Used, TRAIN, when PRIOR, is [FixedOnResume];
        /// Caption of the subject: 'a photo of sks dog'.
        instance_prompt: String = String::new(), Used, TRAIN, when DREAMBOOTH, is [FixedOnResume];
        /// Caption of the class: 'a photo of a dog'.
        class_prompt: String = String::new(), Used, TRAIN, when PRIOR, is [FixedOnResume];
        /// How much the error of class pictures counts.
        prior_loss_weight: f64 = 1.0, Used, TRAIN, in AtLeast(0.0), when PRIOR, is [FixedOnResume];
        /// Pictures of the class.
        num_class_images: u64 = 100, Used, TRAIN, in Between(1.0, 100_000.0), when PRIOR, is [FixedOnResume];
        /// Train vectors for a new word, `<cat>`, which captions name (textual inversion). The model's own weights stay as they are; with
        /// `lora_rank` low-rank updates are trained with it (pivotal tuning).
        placeholder_token: String = String::new(), Ours, TRAIN, when FINE_TUNING, is [FixedOnResume];
        /// The word that the vectors start from, one token of the vocabulary: 'cat'.
        initializer_token: String = String::new(), Ours, TRAIN, when INVERSION, is [FixedOnResume];
        /// Vectors that the new word stands for.
        num_vectors: u64 = 1, Ours, TRAIN, in Between(1.0, 75.0), when INVERSION, is [FixedOnResume];
        /// Highest learning rate of the vectors. Empty: `learning_rate`.
        token_learning_rate: Option<f64> = None, Ours, TRAIN, in AtLeast(0.0), when INVERSION, is [FixedOnResume];
        /// Keep the prepared dataset.
        cache_dreambooth_dataset: bool = false, NoEffect("latents are always kept on disk"), TRAIN;

        group "Profiling and diagnostics";
        /// Profile some steps.
        enable_profiler: bool = false, NoEffect(PROFILER), TRAIN_GENERATE;
        /// Steps before profiling starts.
        skip_first_n_steps_for_profiler: u64 = 5, NoEffect(PROFILER), TRAIN_GENERATE;
        /// Steps to profile.
        profiler_steps: u64 = 10, NoEffect(PROFILER), TRAIN_GENERATE;
        /// Which profiler.
        profiler: String = String::new(), NoEffect(PROFILER), TRAIN_GENERATE;
        /// Bucket for profiles.
        profiler_gcs_path: String = String::new(), NoEffect(PROFILER), TRAIN_GENERATE;
        /// Serve profiles on demand.
        enable_ondemand_xprof: bool = false, NoEffect(PROFILER), TRAIN_GENERATE;
        /// Google Cloud ML diagnostics.
        enable_ml_diagnostics: bool = false, NoEffect("there is no connection to Google Cloud diagnostics here"), TRAIN_GENERATE;
        /// MLPerf log.
        enable_mllog: bool = false, IgnoredByMaxDiffusion, TRAIN_GENERATE;
    }
}

schema! {
    /// `diffusion_scheduler_config`: MaxDiffusion's four keys and more from diffusers.
    pub struct SchedulerConfig {
        group "diffusion_scheduler_config";
        /// Sampler, by diffusers' or MaxDiffusion's class name or the short name. Empty: ddim.
        _class_name: Option<SchedulerKind> = Some(SchedulerKind::Euler), Used, TRAIN_GENERATE, is [NotAnOption];
        /// What the denoiser predicts. Empty: as in the known model, otherwise epsilon.
        prediction_type: Option<PredictionType> = Some(PredictionType::Epsilon), Used, PROGRAM;
        /// Make the last timestep pure noise (Lin et al. 2023, section 3.1).
        rescale_zero_terminal_snr: bool = false, Used, PROGRAM;
        /// Which timesteps the sampler visits. Empty: leading.
        timestep_spacing: Option<TimestepSpacing> = Some(TimestepSpacing::Trailing), Used, TRAIN_GENERATE,
            when SamplerReads("timestep_spacing");
        /// Added to the timesteps of leading spacing.
        steps_offset: u64 = 1, Ours, TRAIN_GENERATE, in Between(0.0, 1_000_000.0),
            when Is("diffusion_scheduler_config.timestep_spacing", &["", "leading"]);
        /// Timesteps of the noise schedule.
        num_train_timesteps: u64 = 1000, Ours, PROGRAM, in Between(1.0, 1_000_000.0);
        /// Variance added in the first timestep.
        beta_start: f64 = 0.00085, Ours, PROGRAM, in Between(0.0, 1.0),
            when Is("diffusion_scheduler_config.beta_schedule", &["linear", "scaled_linear"]);
        /// Variance added in the last timestep.
        beta_end: f64 = 0.012, Ours, PROGRAM, in Between(0.0, 1.0),
            when Is("diffusion_scheduler_config.beta_schedule", &["linear", "scaled_linear"]);
        /// How the variance grows between them.
        beta_schedule: BetaSchedule = BetaSchedule::ScaledLinear, Ours, PROGRAM;
        /// Space the noise levels as Karras et al. 2022 do.
        use_karras_sigmas: bool = false, Ours, TRAIN_GENERATE,
            when SamplerReads("use_karras_sigmas");
        /// Space the logarithms of the noise levels evenly.
        use_exponential_sigmas: bool = false, Ours, TRAIN_GENERATE,
            when SamplerReads("use_exponential_sigmas");
        /// Space the noise levels by the quantiles of a beta distribution (Lee et al. 2024).
        use_beta_sigmas: bool = false, Ours, TRAIN_GENERATE,
            when SamplerReads("use_beta_sigmas");
        /// DPM-Solver++, or its SDE variant with fresh noise.
        algorithm_type: AlgorithmType = AlgorithmType::DpmSolverPlusPlus, Ours, TRAIN_GENERATE,
            when SamplerReads("algorithm_type");
        /// Order of DPM-Solver and UniPC.
        solver_order: u64 = 2, Ours, TRAIN_GENERATE, in Between(1.0, 3.0),
            when SamplerReads("solver_order");
        /// Noise level at which the last step ends.
        final_sigmas_type: FinalSigmas = FinalSigmas::Zero, Ours, TRAIN_GENERATE,
            when SamplerReads("final_sigmas_type");
        /// Whether the last step ends at the clean image instead of the first training timestep.
        set_alpha_to_one: bool = false, Ours, TRAIN_GENERATE,
            when SamplerReads("set_alpha_to_one");
        /// Begin PNDM with its multistep part, as Stable Diffusion's files ask for. False, which begins with Runge-Kutta
        /// steps, is not here yet.
        skip_prk_steps: bool = true, Ours, TRAIN_GENERATE, when SamplerReads("skip_prk_steps");
        /// Clip the predicted image to [-1, 1] in each step (for pixel-space models).
        clip_sample: bool = false, Ours, PROGRAM;
    }
}

schema! {
    /// `timestep_bias`: MaxDiffusion reads the other keys only with a strategy.
    pub struct TimestepBias {
        group "timestep_bias";
        /// Which timesteps to draw more often.
        strategy: BiasStrategy = BiasStrategy::None, Used, TRAIN_STEP;
        /// How much more often.
        multiplier: f64 = 1.0, Used, TRAIN_STEP, in Above(0.0),
            when IsNot("timestep_bias.strategy", "none");
        /// First timestep of strategy range.
        begin: u64 = 0, Used, TRAIN_STEP,
            when Is("timestep_bias.strategy", &["range"]);
        /// End of strategy range, which is not part of it.
        end: u64 = 1000, Used, TRAIN_STEP,
            when Is("timestep_bias.strategy", &["range"]);
        /// Share of the timesteps that earlier and later bias.
        portion: f64 = 0.25, Used, TRAIN_STEP, in Between(0.0, 1.0),
            when Is("timestep_bias.strategy", &["earlier", "later"]);
    }
}

schema! {
    /// `calibration`: the images that are drawn to find the range of activations.
    pub struct Calibration {
        group "calibration";
        /// The prompts of the images.
        prompts: Prompts = Prompts::default(), Ours, QUANTIZE;
        /// File of prompts: one a line, or COCO's captions.tsv, of which the third column is read.
        prompts_file: String = String::new(), Ours, QUANTIZE;
        /// Prompts of the file that are taken, from the first on.
        max_prompts: u64 = 128, Ours, QUANTIZE, in Between(1.0, 100_000.0), when Given("calibration.prompts_file");
        /// Denoising steps of each image.
        steps: u64 = 20, Ours, QUANTIZE, in Between(1.0, 1000.0), when CALIBRATED;
        /// Empty: the recipe's.
        guidance_scale: Option<f64> = None, Ours, QUANTIZE, in AtLeast(0.0), when CALIBRATED;
        /// In pixels. 0: the recipe's resolution.
        height: u64 = 0, Ours, QUANTIZE, in Between(0.0, 65536.0), when CALIBRATED;
        /// In pixels. 0: the recipe's resolution.
        width: u64 = 0, Ours, QUANTIZE, in Between(0.0, 65536.0), when CALIBRATED;
        /// Of every image: each prompt starts from the same noise, as AMD Quark's do.
        seed: u64 = 42, Ours, QUANTIZE, when CALIBRATED;
        /// What decides the range of an activation's scale.
        observer: ObserverKind = ObserverKind::MinMax, Ours, QUANTIZE, when CALIBRATED;
        /// Percent of an activation's values that its scale covers.
        percentile: f64 = 99.99, Ours, QUANTIZE, in AboveUpTo(0.0, 100.0),
            when Is("calibration.observer", &["percentile"]);
        /// A range for each part of an activation that joins two, as those behind skip connections do (Q-Diffusion). Of
        /// static modes.
        split_skips: bool = false, Ours, QUANTIZE, when CALIBRATED;
        /// Leave activations in float where a layer reads text alone, whose first token would take the range of all (MixDQ). Such
        /// layers run once a request. Of static modes.
        text_in_float: bool = false, Ours, QUANTIZE, when CALIBRATED;
    }
}

schema! {
    /// `lora_config`: lists of equal length, one entry for each adapter.
    pub struct LoraConfig {
        group "lora_config";
        /// Files, or folders as diffusers and PEFT save them, or their names on the hub.
        lora_model_name_or_path: FreeList = FreeList::default(), Used, GENERATE;
        /// Files in those folders. Empty: each has one.
        weight_name: FreeList = FreeList::default(), Used, GENERATE;
        /// Names for the adapters, for messages.
        adapter_name: FreeList = FreeList::default(), Used, GENERATE;
        /// Strengths. Empty: 1.
        scale: FreeList = FreeList::default(), Used, GENERATE;
        /// Whether each is PyTorch's.
        from_pt: FreeList = FreeList::default(), NoEffect("all safetensors are read in the same way"), GENERATE;
    }
}
