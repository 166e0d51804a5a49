//! The contents of a `scheduler_config.json`.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::util::named;

use super::SchedulerError;

named! {
    /// The samplers. Behind the name stand that of diffusers' class and, where it has one, that of its Flax variant,
    /// which MaxDiffusion's files have.
    pub enum SchedulerKind {
        Ddim = "ddim" | "DDIMScheduler" | "FlaxDDIMScheduler",
        Ddpm = "ddpm" | "DDPMScheduler" | "FlaxDDPMScheduler",
        Pndm = "pndm" | "PNDMScheduler" | "FlaxPNDMScheduler",
        Euler = "euler" | "EulerDiscreteScheduler" | "FlaxEulerDiscreteScheduler",
        EulerAncestral = "euler_ancestral" | "EulerAncestralDiscreteScheduler",
        Heun = "heun" | "HeunDiscreteScheduler",
        Kdpm2 = "kdpm2" | "KDPM2DiscreteScheduler",
        Kdpm2Ancestral = "kdpm2_ancestral" | "KDPM2AncestralDiscreteScheduler",
        Lms = "lms" | "LMSDiscreteScheduler" | "FlaxLMSDiscreteScheduler",
        DpmMultistep = "dpm_multistep" | "DPMSolverMultistepScheduler" | "FlaxDPMSolverMultistepScheduler",
        DpmSinglestep = "dpm_singlestep" | "DPMSolverSinglestepScheduler",
        UniPc = "unipc" | "UniPCMultistepScheduler",
        Lcm = "lcm" | "LCMScheduler",
        Tcd = "tcd" | "TCDScheduler",
        FlowMatchEuler = "flow_match_euler" | "FlowMatchEulerDiscreteScheduler",
        FlowMatchHeun = "flow_match_heun" | "FlowMatchHeunDiscreteScheduler",
        FlowMatchLcm = "flow_match_lcm" | "FlowMatchLCMScheduler",
    }
}

impl SchedulerKind {
    /// The name of diffusers' class.
    pub const fn class_name(self) -> &'static str {
        self.aliases()[0]
    }

    /// Whether it is for models of flow matching (Lipman et al., 2022, arXiv:2210.02747), whose noisy samples lie on a
    /// straight line from the clean sample to the noise. The others are for models with a schedule of betas, and some
    /// of them for both.
    pub const fn is_flow(self) -> bool {
        use SchedulerKind::{FlowMatchEuler, FlowMatchHeun, FlowMatchLcm};
        matches!(self, FlowMatchEuler | FlowMatchHeun | FlowMatchLcm)
    }

    /// Whether it can take the steps of flow matching although it is also for models with betas (`use_flow_sigmas`).
    pub const fn takes_flow_sigmas(self) -> bool {
        use SchedulerKind::{DpmMultistep, DpmSinglestep, UniPc};
        matches!(self, DpmMultistep | DpmSinglestep | UniPc)
    }

    /// Whether diffusers' class has this field and reads it; it drops the others, which are those of another scheduler.
    /// `eta` is not a field but an argument of its steps.
    pub fn reads(self, field: &str) -> bool {
        use SchedulerKind::*;
        match field {
            "_class_name" | "num_train_timesteps" => true,
            "beta_start" | "beta_end" | "beta_schedule" | "trained_betas" | "prediction_type" => {
                !self.is_flow()
            }
            "timestep_spacing" | "steps_offset" => {
                !matches!(self, DpmSinglestep | Lcm | Tcd) && !self.is_flow()
            }
            "rescale_betas_zero_snr" => {
                !matches!(
                    self,
                    Pndm | Heun | Kdpm2 | Kdpm2Ancestral | Lms | DpmSinglestep
                ) && !self.is_flow()
            }
            "shift" => self.is_flow(),
            "use_dynamic_shifting"
            | "base_shift"
            | "max_shift"
            | "base_image_seq_len"
            | "max_image_seq_len"
            | "time_shift_type" => {
                matches!(self, FlowMatchEuler | FlowMatchLcm) || self.takes_flow_sigmas()
            }
            "shift_terminal" => matches!(self, FlowMatchEuler | FlowMatchLcm | UniPc),
            "stochastic_sampling" => self == FlowMatchEuler,
            "invert_sigmas" => matches!(self, FlowMatchEuler | FlowMatchLcm),
            "scale_factors" => self == FlowMatchLcm,
            "use_flow_sigmas" | "flow_shift" => self.takes_flow_sigmas(),
            "set_alpha_to_one" => matches!(self, Ddim | Pndm),
            "skip_prk_steps" => self == Pndm,
            "clip_sample" => matches!(self, Ddim | Ddpm | Heun | Lcm),
            "thresholding" => {
                matches!(
                    self,
                    Ddim | Ddpm | DpmMultistep | DpmSinglestep | UniPc | Lcm
                )
            }
            "variance_type" => matches!(self, Ddpm | DpmMultistep | DpmSinglestep),
            "use_karras_sigmas" | "use_exponential_sigmas" | "use_beta_sigmas" => matches!(
                self,
                Euler
                    | Heun
                    | Kdpm2
                    | Kdpm2Ancestral
                    | Lms
                    | DpmMultistep
                    | DpmSinglestep
                    | UniPc
                    | FlowMatchEuler
                    | FlowMatchLcm
            ),
            "final_sigmas_type" => matches!(self, Euler | DpmMultistep | DpmSinglestep | UniPc),
            "sigma_min" | "sigma_max" => matches!(self, Euler | UniPc),
            "timestep_type" | "interpolation_type" => self == Euler,
            "solver_order" | "solver_type" | "lower_order_final" => {
                matches!(self, DpmMultistep | DpmSinglestep | UniPc)
            }
            "algorithm_type" | "lambda_min_clipped" => matches!(self, DpmMultistep | DpmSinglestep),
            "euler_at_final" | "use_lu_lambdas" => self == DpmMultistep,
            "predict_x0" | "disable_corrector" | "solver_p" => self == UniPc,
            "original_inference_steps" => matches!(self, Lcm | Tcd),
            "timestep_scaling" => self == Lcm,
            "eta" => matches!(self, Ddim | Tcd),
            _ => false,
        }
    }
}

named! {
    /// How betas grow over the training timesteps.
    pub enum BetaSchedule {
        /// Linear from `beta_start` to `beta_end`.
        Linear = "linear",
        /// The square of a linear ramp between the roots: Stable Diffusion's.
        ScaledLinear = "scaled_linear",
        /// From a squared cosine of the cumulative product (Nichol and Dhariwal, 2021), each beta at most 0.999.
        SquaredcosCapV2 = "squaredcos_cap_v2",
    }
}

named! {
    /// The prediction type of the model.
    pub enum PredictionType {
        /// The noise.
        Epsilon = "epsilon",
        /// `sqrt(alpha) * noise - sqrt(1 - alpha) * sample` (Salimans and Ho, 2022).
        VPrediction = "v_prediction",
        /// The clean sample.
        Sample = "sample",
        /// `noise - sample`, the velocity of the straight line from the sample to the noise.
        FlowPrediction = "flow_prediction",
    }
}

named! {
    /// How a larger image moves the noise levels of flow matching to more noise.
    pub enum TimeShiftType {
        /// `exp(mu) / (exp(mu) + 1 / sigma - 1)`
        Exponential = "exponential",
        /// `mu / (mu + 1 / sigma - 1)`
        Linear = "linear",
    }
}

named! {
    /// Which training timesteps a sampler visits (Lin et al., 2023, table 2).
    pub enum TimestepSpacing {
        /// Multiples of an integer step, plus `steps_offset`.
        Leading = "leading",
        /// Back from the last by a fractional step.
        Trailing = "trailing",
        /// From the first to the last.
        Linspace = "linspace",
    }
}

named! {
    /// The last noise level of a sampler that steps from level to level.
    pub enum FinalSigmas {
        Zero = "zero",
        /// The value of the first training timestep.
        SigmaMin = "sigma_min",
    }
}

named! {
    /// The timestep that Euler's sampler gives the model.
    pub enum TimestepType {
        /// The training timestep.
        Discrete = "discrete",
        /// A quarter of the logarithm of sigma, for a model that predicts the velocity.
        Continuous = "continuous",
    }
}

named! {
    /// The noise that DDPM adds in a step.
    pub enum VarianceType {
        /// The posterior variance: the least that is right.
        FixedSmall = "fixed_small",
        /// The same, by its logarithm.
        FixedSmallLog = "fixed_small_log",
        /// The forward process's: the most.
        FixedLarge = "fixed_large",
    }
}

named! {
    /// Which equation DPM-Solver++ solves.
    pub enum AlgorithmType {
        /// The ODE; also diffusers' reading of another scheduler's `deis`.
        DpmSolverPlusPlus = "dpmsolver++" | "deis",
        /// The SDE, with fresh noise in each step.
        SdeDpmSolverPlusPlus = "sde-dpmsolver++",
    }
}

named! {
    /// How a multistep solver weighs earlier outputs. A name that is another scheduler's means the sampler's own
    /// default, [`SolverType::Midpoint`] for DPM-Solver++ and [`SolverType::Bh2`] for UniPC.
    pub enum SolverType {
        Midpoint = "midpoint",
        Heun = "heun",
        Logrho = "logrho",
        Bh1 = "bh1",
        Bh2 = "bh2",
    }
}

/// Attributes of a schedule, with the names of diffusers' `scheduler_config.json`.
///
/// A sampler reads those that its class has in diffusers.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// `_class_name`.
    pub kind: SchedulerKind,
    pub num_train_timesteps: usize,
    pub beta_start: f64,
    pub beta_end: f64,
    pub beta_schedule: BetaSchedule,
    pub prediction_type: PredictionType,
    pub timestep_spacing: TimestepSpacing,
    /// Added to the timesteps of [`TimestepSpacing::Leading`].
    pub steps_offset: usize,
    /// Whether betas are rescaled so that the last timestep is pure noise (Lin et al., 2023, algorithm 1).
    pub rescale_betas_zero_snr: bool,
    /// Whether the last step goes to the clean sample, or to the first training timestep.
    pub set_alpha_to_one: bool,
    /// Whether each step clips the predicted clean sample to [-1, 1], for pixel-space models.
    pub clip_sample: bool,
    /// Where the last step goes.
    pub final_sigmas_type: FinalSigmas,
    /// Noise levels as Karras et al. (2022) space them, equation (5) with rho = 7.
    pub use_karras_sigmas: bool,
    /// Noise levels in equal steps of their logarithm.
    pub use_exponential_sigmas: bool,
    /// Noise levels by the quantiles of a beta distribution (Lee et al., 2024, arXiv:2407.12173).
    pub use_beta_sigmas: bool,
    /// The last of the noise levels that are spaced by themselves; the schedule's where `None`.
    pub sigma_min: Option<f64>,
    /// The first of them.
    pub sigma_max: Option<f64>,
    pub timestep_type: TimestepType,
    pub variance_type: VarianceType,
    /// 1 to 3.
    pub solver_order: usize,
    pub solver_type: SolverType,
    pub algorithm_type: AlgorithmType,
    /// Whether a solver's last steps have lower orders: for DPM-Solver++ with less than 15 steps.
    pub lower_order_final: bool,
    /// Whether DPM-Solver++'s last step has order 1.
    pub euler_at_final: bool,
    /// Whether UniPC works with predicted clean samples, or with the noise.
    pub predict_x0: bool,
    /// Steps after which UniPC does not correct.
    pub disable_corrector: Vec<usize>,
    /// The steps that a consistency model was distilled with, of which its samplers take some.
    pub original_inference_steps: usize,
    /// Multiplies timesteps in the boundary condition of latent consistency models.
    pub timestep_scaling: f64,
    pub flow: FlowShift,
}

/// How the noise levels of flow matching are moved (Esser et al., 2024, arXiv:2403.03206, section 5.3.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowShift {
    /// The factor of `sigma / (1 - sigma)`, unless the image's length decides it.
    pub shift: f64,
    /// Whether the number of the image's tokens decides: `mu` is linear in it.
    pub use_dynamic_shifting: bool,
    /// `mu` at `base_image_seq_len` tokens.
    pub base_shift: f64,
    /// `mu` at `max_image_seq_len` tokens.
    pub max_shift: f64,
    pub base_image_seq_len: usize,
    pub max_image_seq_len: usize,
    pub time_shift_type: TimeShiftType,
    /// The last noise level before 0, to which the others are stretched.
    pub shift_terminal: Option<f64>,
    /// Whether each step adds fresh noise to the predicted clean sample, instead of going along the line.
    pub stochastic_sampling: bool,
    /// Whether a sampler that is also for models with betas takes the steps of flow matching.
    pub use_flow_sigmas: bool,
}

impl SchedulerConfig {
    /// The defaults of diffusers' class, which differ from class to class.
    pub fn new(kind: SchedulerKind) -> Self {
        use SchedulerKind::*;
        let (beta_start, beta_end) = match kind {
            Heun | Kdpm2 | Kdpm2Ancestral | Lcm | Tcd => (0.00085, 0.012),
            _ => (0.0001, 0.02),
        };
        SchedulerConfig {
            kind,
            num_train_timesteps: 1000,
            beta_start,
            beta_end,
            beta_schedule: match kind {
                Lcm | Tcd => BetaSchedule::ScaledLinear,
                _ => BetaSchedule::Linear,
            },
            prediction_type: match kind {
                kind if kind.is_flow() => PredictionType::FlowPrediction,
                _ => PredictionType::Epsilon,
            },
            timestep_spacing: match kind {
                Ddim | Ddpm | Pndm | Lcm | Tcd => TimestepSpacing::Leading,
                _ => TimestepSpacing::Linspace,
            },
            steps_offset: 0,
            rescale_betas_zero_snr: false,
            set_alpha_to_one: kind != Pndm,
            clip_sample: matches!(kind, Ddim | Ddpm),
            final_sigmas_type: FinalSigmas::Zero,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            sigma_min: None,
            sigma_max: None,
            timestep_type: TimestepType::Discrete,
            variance_type: VarianceType::FixedSmall,
            solver_order: 2,
            solver_type: match kind {
                UniPc => SolverType::Bh2,
                _ => SolverType::Midpoint,
            },
            algorithm_type: AlgorithmType::DpmSolverPlusPlus,
            lower_order_final: kind != DpmSinglestep,
            euler_at_final: false,
            predict_x0: true,
            disable_corrector: Vec::new(),
            original_inference_steps: 50,
            timestep_scaling: 10.0,
            flow: FlowShift {
                shift: 1.0,
                use_dynamic_shifting: false,
                base_shift: 0.5,
                max_shift: 1.15,
                base_image_seq_len: 256,
                max_image_seq_len: 4096,
                time_shift_type: TimeShiftType::Exponential,
                shift_terminal: None,
                stochastic_sampling: kind == FlowMatchLcm,
                use_flow_sigmas: false,
            },
        }
    }

    /// Whether its steps are those of flow matching.
    pub const fn is_flow(&self) -> bool {
        self.kind.is_flow() || self.flow.use_flow_sigmas
    }

    /// Stable Diffusion's schedule, as its files give it to any sampler.
    pub fn stable_diffusion(kind: SchedulerKind) -> Self {
        SchedulerConfig {
            beta_start: 0.00085,
            beta_end: 0.012,
            beta_schedule: BetaSchedule::ScaledLinear,
            timestep_spacing: TimestepSpacing::Leading,
            steps_offset: 1,
            set_alpha_to_one: false,
            clip_sample: false,
            ..Self::new(kind)
        }
    }

    /// The sampler of a configuration's fields, as diffusers' `from_config` makes it: fields that are absent or null
    /// take the defaults of the class, fields of other classes and those that start with `_` are dropped. The class is
    /// `_class_name`, so that another sampler is had by replacing that field.
    ///
    /// # Errors
    /// When there is no `_class_name` or an unknown one, when a field has a value of another type or one that asks for
    /// something that is not built here. The error names the field.
    pub fn from_map(fields: &Map<String, Value>) -> Result<Self, SchedulerError> {
        let class = fields.get("_class_name").unwrap_or(&Value::Null);
        let kind = class.as_str().and_then(SchedulerKind::from_name);
        let kind = kind.ok_or_else(|| SchedulerError::Unsupported {
            field: "_class_name".to_string(),
            found: class
                .as_str()
                .map_or_else(|| class.to_string(), str::to_owned),
            expected: format!(
                "one of {}",
                SchedulerKind::ALL.map(SchedulerKind::class_name).join(", ")
            ),
        })?;
        let mut config = Self::new(kind);
        for (field, value) in fields {
            if !value.is_null() && kind.reads(field) {
                config.set(field, value)?;
            }
        }
        if let (true, Some(range)) = (config.clip_sample, fields.get("clip_sample_range")) {
            let built = range.is_null() || range.as_f64() == Some(1.0);
            require(
                built,
                "clip_sample_range",
                range,
                "1 where clip_sample is true",
            )?;
        }
        if kind == SchedulerKind::Pndm {
            let skip = fields.get("skip_prk_steps").unwrap_or(&Value::Null);
            let advice = "true: only the linear multistep part is built, which Stable Diffusion's files ask for";
            require(skip == true, "skip_prk_steps", skip, advice)?;
        }
        let alone = [
            config.use_karras_sigmas,
            config.use_exponential_sigmas,
            config.use_beta_sigmas,
        ];
        if alone.into_iter().filter(|&used| used).count() > 1 {
            return Err(SchedulerError::Invalid(
                "more than one of use_karras_sigmas, use_exponential_sigmas and use_beta_sigmas is true; choose one"
                    .to_string(),
            ));
        }
        config.check_flow_sigmas()?;
        Ok(config)
    }

    /// Refuses steps of flow matching for another prediction or with spacings for betas, and that prediction without them.
    fn check_flow_sigmas(&self) -> Result<(), SchedulerError> {
        let predicts_flow = self.prediction_type == PredictionType::FlowPrediction;
        if self.is_flow() != predicts_flow {
            return Err(SchedulerError::Unsupported {
                field: "prediction_type".to_string(),
                found: self.prediction_type.name().to_string(),
                expected: match self.is_flow() {
                    true => "flow_prediction, because use_flow_sigmas is true".to_string(),
                    false => "epsilon, v_prediction or sample; models of flow matching take flow_match_euler, or \
                              use_flow_sigmas = true"
                        .to_string(),
                },
            });
        }
        if self.flow.use_flow_sigmas && !self.predict_x0 {
            return Err(SchedulerError::Unsupported {
                field: "predict_x0".to_string(),
                found: "false".to_string(),
                expected: "true where use_flow_sigmas is".to_string(),
            });
        }
        match self.sigma_spacing() {
            Some(_) if self.flow.use_flow_sigmas => Err(SchedulerError::Invalid(
                "use_flow_sigmas is true beside another spacing of the noise levels; choose one"
                    .to_string(),
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Takes the value of a field of this class.
    fn set(&mut self, field: &str, value: &Value) -> Result<(), SchedulerError> {
        match field {
            "num_train_timesteps" => self.num_train_timesteps = read(field, value)?,
            "beta_start" => self.beta_start = read(field, value)?,
            "beta_end" => self.beta_end = read(field, value)?,
            "beta_schedule" => self.beta_schedule = read(field, value)?,
            "prediction_type" => self.prediction_type = read(field, value)?,
            "timestep_spacing" => self.timestep_spacing = read(field, value)?,
            "steps_offset" => self.steps_offset = read(field, value)?,
            "rescale_betas_zero_snr" => self.rescale_betas_zero_snr = read(field, value)?,
            "set_alpha_to_one" => self.set_alpha_to_one = read(field, value)?,
            "clip_sample" => self.clip_sample = read(field, value)?,
            "final_sigmas_type" => self.final_sigmas_type = read(field, value)?,
            "use_karras_sigmas" => self.use_karras_sigmas = read(field, value)?,
            "use_exponential_sigmas" => self.use_exponential_sigmas = read(field, value)?,
            "use_beta_sigmas" => self.use_beta_sigmas = read(field, value)?,
            "sigma_min" => self.sigma_min = Some(read(field, value)?),
            "sigma_max" => self.sigma_max = Some(read(field, value)?),
            "timestep_type" => self.timestep_type = read(field, value)?,
            "variance_type" if self.kind == SchedulerKind::Ddpm => {
                self.variance_type = read(field, value)?
            }
            "variance_type" => {
                // DPM-Solver drops the half of the model's output that is a learned variance.
                let learned = value.as_str().is_some_and(|v| v.starts_with("learned"));
                require(!learned, field, value, "a variance that is not learned")?
            }
            "solver_order" => self.solver_order = read(field, value)?,
            "solver_type" => self.solver_type = read(field, value)?,
            "algorithm_type" => self.algorithm_type = read(field, value)?,
            "lower_order_final" => self.lower_order_final = read(field, value)?,
            "euler_at_final" => self.euler_at_final = read(field, value)?,
            "predict_x0" => self.predict_x0 = read(field, value)?,
            "disable_corrector" => self.disable_corrector = read(field, value)?,
            "original_inference_steps" => self.original_inference_steps = read(field, value)?,
            "timestep_scaling" => self.timestep_scaling = read(field, value)?,
            "shift" | "flow_shift" => self.flow.shift = read(field, value)?,
            "use_flow_sigmas" => self.flow.use_flow_sigmas = read(field, value)?,
            "use_dynamic_shifting" => self.flow.use_dynamic_shifting = read(field, value)?,
            "base_shift" => self.flow.base_shift = read(field, value)?,
            "max_shift" => self.flow.max_shift = read(field, value)?,
            "base_image_seq_len" => self.flow.base_image_seq_len = read(field, value)?,
            "max_image_seq_len" => self.flow.max_image_seq_len = read(field, value)?,
            "time_shift_type" => self.flow.time_shift_type = read(field, value)?,
            // diffusers takes 0 for none.
            "shift_terminal" => {
                self.flow.shift_terminal = Some(read(field, value)?).filter(|t| *t != 0.0);
            }
            "stochastic_sampling" => self.flow.stochastic_sampling = read(field, value)?,
            "invert_sigmas" => require(value == false, field, value, "false")?,
            "use_lu_lambdas" => require(value == false, field, value, "false")?,
            "lambda_min_clipped" | "solver_p" | "scale_factors" => {
                require(false, field, value, "null")?
            }
            "trained_betas" => require(false, field, value, "null")?,
            "thresholding" => require(value == false, field, value, "false")?,
            "interpolation_type" => require(value == "linear", field, value, "linear")?,
            _ => {}
        }
        Ok(())
    }
}

impl SchedulerConfig {
    /// [`SchedulerConfig::solver_order`], checked.
    pub(super) fn solver_order(&self) -> Result<usize, SchedulerError> {
        match self.solver_order {
            order @ 1..=3 => Ok(order),
            other => Err(SchedulerError::Unsupported {
                field: "solver_order".to_string(),
                found: other.to_string(),
                expected: "1, 2 or 3".to_string(),
            }),
        }
    }

    /// Refuses a prediction type that diffusers' class does not have.
    pub(super) fn predicts_noise_or_velocity(&self) -> Result<(), SchedulerError> {
        match self.prediction_type {
            PredictionType::Epsilon | PredictionType::VPrediction => Ok(()),
            other @ (PredictionType::Sample | PredictionType::FlowPrediction) => {
                Err(SchedulerError::Unsupported {
                    field: "prediction_type".to_string(),
                    found: other.name().to_string(),
                    expected: format!("epsilon or v_prediction for {}", self.kind.class_name()),
                })
            }
        }
    }
}

/// A field's value.
fn read<T: DeserializeOwned>(field: &str, value: &Value) -> Result<T, SchedulerError> {
    T::deserialize(value).map_err(|error| SchedulerError::Unsupported {
        field: field.to_string(),
        found: value.to_string(),
        expected: error.to_string(),
    })
}

/// Refuses a value of a field that is not built.
fn require(built: bool, field: &str, value: &Value, expected: &str) -> Result<(), SchedulerError> {
    match built {
        true => Ok(()),
        false => Err(SchedulerError::Unsupported {
            field: field.to_string(),
            found: value.to_string(),
            expected: expected.to_string(),
        }),
    }
}

/// The fields of a `scheduler_config.json`, for [`SchedulerConfig::from_map`] after the caller's changes.
///
/// Python writes infinities, as in `"lambda_min_clipped": -Infinity`, which JSON does not have. They are read as null:
/// the default of the field.
///
/// # Errors
/// When it is not a JSON object.
pub fn scheduler_fields(text: &str) -> Result<Map<String, Value>, SchedulerError> {
    // Every second piece between quotes is outside of strings, once an escaped quote is kept with its string.
    let mut outside = true;
    let mut escaped = false;
    let mut json = String::with_capacity(text.len());
    let mut piece = String::new();
    let plain = |piece: &str| {
        ["-Infinity", "Infinity", "NaN"]
            .iter()
            .fold(piece.to_string(), |text, name| text.replace(name, "null"))
    };
    for c in text.chars() {
        piece.push(c);
        let quote = c == '"' && !escaped;
        escaped = c == '\\' && !escaped && !outside;
        if quote {
            json += &if outside {
                plain(&piece)
            } else {
                piece.clone()
            };
            piece.clear();
            outside = !outside;
        }
    }
    json += &plain(&piece);
    Ok(serde_json::from_str(&json)?)
}
