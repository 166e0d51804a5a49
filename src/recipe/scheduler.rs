//! From a configuration, and the files of a model, to the sampler and its steps.

use serde_json::{Map, Value};

use crate::config::{Config, is_read_with};
use crate::schedulers::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerKind, Start};

use super::{Notice, Notify, RecipeError};

/// The key of the noise schedule.
pub const SCHEDULER: &str = "diffusion_scheduler_config";

/// The keys that space noise levels, of which a sampler reads all or none.
const SIGMA_SPACINGS: [&str; 3] = [
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
];

/// The noise schedule by diffusers' names, from MaxDiffusion's.
pub fn scheduler(config: &Config) -> Result<SchedulerConfig, RecipeError> {
    SchedulerConfig::from_map(&scheduler_fields(config)).map_err(RecipeError::usage)
}

/// The noise schedule of a model's own `scheduler_config.json`, changed by what `given`, the explicit keys of the configuration,
/// says of it.
pub fn scheduler_of(
    config: &Config,
    given: &Map<String, Value>,
    own: Option<&Map<String, Value>>,
    notify: &mut Notify<'_>,
) -> Result<SchedulerConfig, RecipeError> {
    let Some(own) = own else {
        return scheduler(config);
    };
    let mut fields = own.clone();
    let mut changed = Vec::new();
    let long = given.get(SCHEDULER).and_then(Value::as_object);
    let is_given = |short: &str, long_name: &str| {
        let values = [
            given.get(short),
            long.and_then(|fields| fields.get(long_name)),
        ];
        values
            .into_iter()
            .flatten()
            .any(|v| !v.is_null() && v != "")
    };
    for (name, value) in scheduler_fields(config) {
        let (short, long_name) = match name.as_str() {
            "_class_name" => ("scheduler", "_class_name"),
            "rescale_betas_zero_snr" => ("", "rescale_zero_terminal_snr"),
            "prediction_type" => ("prediction_type", "prediction_type"),
            other => ("", other),
        };
        if is_given(short, long_name) {
            changed.push((name.clone(), long_name.to_owned()));
            fields.insert(name, value);
        }
    }
    let scheduler = SchedulerConfig::from_map(&fields).map_err(RecipeError::usage)?;
    for (name, key) in changed {
        // Loading the configuration has warned of those that its own sampler does not read, and `check_sampler_keys` refuses
        // spacings.
        let key = format!("{SCHEDULER}.{key}");
        let sampler = config.scheduler;
        let is_new = sampler.is_none_or(|sampler| is_read_with(&key, sampler));
        let is_refused = SIGMA_SPACINGS.contains(&name.as_str());
        if is_new && !is_refused && !scheduler.kind.reads(&name) {
            notify(Notice::Warning(&format!(
                "{key} has no effect: {} does not read it",
                scheduler.kind.class_name()
            )));
        }
    }
    Ok(scheduler)
}

fn scheduler_fields(config: &Config) -> Map<String, Value> {
    let from = &config.diffusion_scheduler_config;
    let fields = serde_json::json!({
        "_class_name": config.sampler().class_name(),
        "set_alpha_to_one": from.set_alpha_to_one,
        "use_karras_sigmas": from.use_karras_sigmas,
        "use_exponential_sigmas": from.use_exponential_sigmas,
        "use_beta_sigmas": from.use_beta_sigmas,
        "algorithm_type": from.algorithm_type.name(),
        "solver_order": from.solver_order,
        "final_sigmas_type": from.final_sigmas_type.name(),
        "num_train_timesteps": from.num_train_timesteps,
        "beta_start": from.beta_start,
        "beta_end": from.beta_end,
        "beta_schedule": from.beta_schedule.name(),
        "prediction_type": config.prediction().name(),
        "timestep_spacing": config.timestep_spacing().name(),
        "steps_offset": from.steps_offset,
        "rescale_betas_zero_snr": from.rescale_zero_terminal_snr,
        "clip_sample": from.clip_sample,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Refuses what the sampler does not read, where only the model's files say which sampler it is: where the
/// configuration says it, loading it has refused this already.
///
/// # Errors
/// Names the key and the samplers that read it.
pub fn check_sampler_keys(config: &Config, scheduler: &SchedulerConfig) -> Result<(), RecipeError> {
    let from = &config.diffusion_scheduler_config;
    let [karras, exponential, beta] = SIGMA_SPACINGS;
    for (name, is_asked) in [
        (karras, from.use_karras_sigmas),
        (exponential, from.use_exponential_sigmas),
        (beta, from.use_beta_sigmas),
        ("eta", config.eta != 0.0),
    ] {
        if is_asked && config.scheduler.is_none() && !scheduler.kind.reads(name) {
            let read_by = SchedulerKind::ALL.iter().filter(|s| s.reads(name));
            let read_by: Vec<&str> = read_by.map(|s| s.name()).collect();
            return Err(RecipeError::Usage(format!(
                "{name} has no effect: the model's own sampler, {}, does not read it; leave it out, or give scheduler= one \
                 of {}",
                scheduler.kind.class_name(),
                read_by.join(", ")
            )));
        }
    }
    Ok(())
}

/// The coefficients of `steps` steps of the configured sampler, up to where a refiner goes on.
///
/// # Errors
/// When they do not fit the schedule, or none is left to run.
pub fn sampling_plan(
    config: &Config,
    scheduler: &SchedulerConfig,
    steps: usize,
) -> Result<SamplingPlan, RecipeError> {
    let strength = match config.image.is_empty() {
        true => 1.0,
        false => config.strength,
    };
    let options = PlanOptions {
        start: Start::Strength(strength),
        end: (!config.refiner_model_name_or_path.is_empty()).then_some(config.denoising_end),
        eta: config.eta,
        use_clipped_model_output: true,
        ..PlanOptions::new(steps)
    };
    scheduler.plan(&options).map_err(RecipeError::usage)
}
