//! From a configuration, and the files of a model, to the sampler and its steps.

use serde_json::{Map, Value};

use crate::config::{Config, Given, Place, is_read_with};
use crate::models::{DenoiserKind, Family};
use crate::schedulers::{
    PlanOptions, PredictionType, SamplingPlan, SchedulerConfig, SchedulerKind, Start,
    scheduler_fields as fields_of_file,
};

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

/// The noise schedule of a model of `family` that the configuration alone describes. What no key says of noise levels of flow
/// matching is as its models are published.
pub fn described_scheduler(
    config: &Config,
    family: Family,
) -> Result<SchedulerConfig, RecipeError> {
    let published = family.spec().published.as_ref();
    let Some(published) = published.filter(|_| config.sampler().is_flow()) else {
        return scheduler(config);
    };
    let mut fields = fields_of_file(published.scheduler).map_err(RecipeError::usage)?;
    let given = scheduler_fields(config).into_iter();
    fields.extend(given.filter(|(_, value)| !value.is_null()));
    SchedulerConfig::from_map(&fields).map_err(RecipeError::usage)
}

/// The fields of a model's own `scheduler_config.json`.
pub struct OwnScheduler<'a> {
    pub fields: &'a Map<String, Value>,
    /// The file, for messages.
    pub place: &'a str,
}

/// The noise schedule of a model's own `scheduler_config.json`, changed by the keys that `given` has.
///
/// # Errors
/// When the fields contradict each other, or the command line gives one that the model's own sampler does not read.
pub fn scheduler_of(
    config: &Config,
    given: &Given,
    own: &OwnScheduler<'_>,
    notify: &mut Notify<'_>,
) -> Result<SchedulerConfig, RecipeError> {
    let mut fields = own.fields.clone();
    let mut changed = Vec::new();
    let is_given = |key: &str| given.get(key).is_some_and(|v| !v.is_null() && v != "");
    for (name, value) in scheduler_fields(config) {
        let inside = |key: &str| format!("{SCHEDULER}.{key}");
        let (short, long) = match name.as_str() {
            "_class_name" => ("scheduler", inside("_class_name")),
            "rescale_betas_zero_snr" => ("", inside("rescale_zero_terminal_snr")),
            "prediction_type" => ("prediction_type", inside("prediction_type")),
            "use_dynamic_shifting" => ("", "time_shift".to_owned()),
            "base_shift" | "max_shift" => ("", name.clone()),
            other => ("", inside(other)),
        };
        if is_given(short) || is_given(&long) {
            changed.push((name.clone(), long));
            fields.insert(name, value);
        }
    }
    if config.scheduler == Some(SchedulerKind::Pndm) {
        // The files of another sampler's model need not have it.
        fields
            .entry("skip_prk_steps")
            .or_insert(config.diffusion_scheduler_config.skip_prk_steps.into());
    }
    let kind = |fields: &Map<String, Value>| {
        let class = fields.get("_class_name").and_then(Value::as_str);
        class.and_then(SchedulerKind::from_name)
    };
    if let (Some(own_kind), Some(asked)) = (kind(own.fields), kind(&fields))
        && own_kind.is_flow() != asked.is_flow()
    {
        if !own_kind.is_flow() || !asked.takes_flow_sigmas() {
            let fits = |kind: &&SchedulerKind| {
                kind.is_flow() == own_kind.is_flow()
                    || own_kind.is_flow() && kind.takes_flow_sigmas()
            };
            return Err(RecipeError::Usage(format!(
                "scheduler={asked}: the model's own sampler is {}, and a model of flow matching cannot take the steps of one \
             with betas, nor the other way round; leave it out, or give scheduler= one of {}",
                own_kind.class_name(),
                SchedulerKind::ALL
                    .iter()
                    .filter(fits)
                    .map(|kind| kind.name())
                    .collect::<Vec<_>>()
                    .join(", ")
            )));
        }
        // Its steps are those of flow matching, at the noise levels of the model's own.
        let shift = fields.get("shift").cloned().unwrap_or(Value::from(1.0));
        fields.extend([
            ("use_flow_sigmas".to_owned(), true.into()),
            ("flow_shift".to_owned(), shift),
            (
                "prediction_type".to_owned(),
                PredictionType::FlowPrediction.name().into(),
            ),
        ]);
    }
    let scheduler = SchedulerConfig::from_map(&fields).map_err(|error| {
        let keys: Vec<String> = changed
            .iter()
            .filter(|(name, _)| error.to_string().contains(name.as_str()))
            .map(|(_, key)| format!("{}: {key}", given.place(key)))
            .collect();
        match keys.is_empty() {
            true => RecipeError::at(own.place)(error),
            false => RecipeError::at(keys.join(", "))(error),
        }
    })?;
    for (name, key) in changed {
        // Loading the configuration has warned of those that its own sampler does not read, and `check_sampler_keys`
        // refuses spacings.
        let sampler = config.scheduler;
        let is_new = sampler.is_none_or(|sampler| is_read_with(&key, sampler));
        let is_refused = SIGMA_SPACINGS.contains(&name.as_str());
        if !is_new || is_refused || scheduler.kind.reads(&name) {
            continue;
        }
        let problem = not_read(&key, &name, scheduler.kind);
        match given.place(&key) {
            Place::CommandLine => return Err(RecipeError::Usage(problem)),
            place => notify(Notice::Warning(&format!("{place}: {problem}"))),
        }
    }
    Ok(scheduler)
}

/// A model's own `scheduler_config.json`, with what a run has trained it to predict in place of what it said: the keys that
/// define its noise levels and its prediction. What chooses the steps of sampling stays, and flow matching has no such keys.
///
/// # Errors
/// When the model's own fields contradict each other.
pub fn as_trained(
    own: &Map<String, Value>,
    trained: &SchedulerConfig,
) -> Result<Map<String, Value>, RecipeError> {
    let before = SchedulerConfig::from_map(own).map_err(RecipeError::usage)?;
    if before.is_flow() {
        return Ok(own.clone());
    }
    let keys = |of: &SchedulerConfig| {
        [
            ("prediction_type", Value::from(of.prediction_type.name())),
            ("num_train_timesteps", of.num_train_timesteps.into()),
            ("beta_schedule", of.beta_schedule.name().into()),
            ("beta_start", of.beta_start.into()),
            ("beta_end", of.beta_end.into()),
            ("rescale_betas_zero_snr", of.rescale_betas_zero_snr.into()),
        ]
    };
    let changed = keys(trained).into_iter().zip(keys(&before));
    let changed = changed.filter(|(now, then)| now != then);
    let mut fields = own.clone();
    fields.extend(changed.map(|((key, value), _)| (key.to_owned(), value)));
    Ok(fields)
}

fn scheduler_fields(config: &Config) -> Map<String, Value> {
    let from = &config.diffusion_scheduler_config;
    let fields = serde_json::json!({
        "_class_name": config.sampler().class_name(),
        "set_alpha_to_one": from.set_alpha_to_one,
        "skip_prk_steps": from.skip_prk_steps,
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
        "use_dynamic_shifting": config.time_shift,
        "base_shift": config.base_shift,
        "max_shift": config.max_shift,
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
    let shifts = [
        ("time_shift", config.time_shift.is_some()),
        ("base_shift", config.base_shift.is_some()),
        ("max_shift", config.max_shift.is_some()),
    ];
    if let Some((key, _)) = shifts.into_iter().find(|(_, is_given)| *is_given)
        && scheduler.kind.takes_flow_sigmas()
        && !scheduler.is_flow()
    {
        return Err(RecipeError::Usage(format!(
            "{key} has no effect: the model is none of flow matching, whose noise levels it moves; leave it out"
        )));
    }
    let [karras, exponential, beta] = SIGMA_SPACINGS;
    for (name, is_asked) in [
        (karras, from.use_karras_sigmas),
        (exponential, from.use_exponential_sigmas),
        (beta, from.use_beta_sigmas),
        ("eta", config.eta != 0.0),
    ] {
        if is_asked && config.scheduler.is_none() && !scheduler.kind.reads(name) {
            return Err(RecipeError::Usage(not_read(name, name, scheduler.kind)));
        }
    }
    Ok(())
}

/// That the model's own sampler does not read `name`, a field of diffusers' that `key` sets.
fn not_read(key: &str, name: &str, sampler: SchedulerKind) -> String {
    let read_by = SchedulerKind::ALL.iter().filter(|s| s.reads(name));
    let read_by: Vec<&str> = read_by.map(|s| s.name()).collect();
    format!(
        "{key} has no effect: the model's own sampler, {}, does not read it; leave it out, or give scheduler= one of {}",
        sampler.class_name(),
        read_by.join(", ")
    )
}

/// The coefficients of `steps` steps of the configured sampler for a denoiser of this kind, up to where a refiner goes on, for
/// images of so many tokens.
///
/// # Errors
/// When they do not fit the schedule, or none is left to run.
pub fn sampling_plan(
    config: &Config,
    scheduler: &SchedulerConfig,
    kind: DenoiserKind,
    image_seq_len: Option<usize>,
    steps: usize,
) -> Result<SamplingPlan, RecipeError> {
    let strength = match config.input_images().is_empty() {
        true => 1.0,
        false => config.strength,
    };
    let options = PlanOptions {
        start: Start::Strength(strength),
        end: (!config.refiner_model_name_or_path.is_empty()).then_some(config.denoising_end),
        eta: config.eta,
        use_clipped_model_output: true,
        image_seq_len,
        flow_levels: kind.flow_levels(),
        ..PlanOptions::new(steps)
    };
    scheduler.plan(&options).map_err(RecipeError::usage)
}

/// Checks the steps of the second pass of a hi-res fix, if the configuration asks for one; images of the first have so many
/// tokens.
///
/// # Errors
/// When they do not fit the schedule, or none is left to run.
pub fn check_redraw(
    config: &Config,
    scheduler: &SchedulerConfig,
    image_seq_len: Option<usize>,
) -> Result<(), RecipeError> {
    if config.hires_scale.is_none() {
        return Ok(());
    }
    let steps = match config.hires_steps {
        0 => config.num_inference_steps,
        steps => steps,
    };
    let options = PlanOptions {
        start: Start::Strength(config.hires_strength),
        image_seq_len,
        ..PlanOptions::new(steps as usize)
    };
    let plan = scheduler.plan(&options);
    plan.map(drop)
        .map_err(RecipeError::at("hires_strength, hires_steps"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Loaded, Verb};

    #[test]
    fn what_the_models_own_sampler_does_not_read_is_refused_where_it_is_asked_for_now() {
        let own = serde_json::json!({"_class_name": "DDIMScheduler"});
        let read = |file: &str, words: &[&str]| {
            let words = words.iter().chain(&["prompt=x"]);
            let words: Vec<String> = words.map(|word| (*word).to_owned()).collect();
            let loaded = Config::from_text("a.yml", file, &words, Some(Verb::Generate));
            let Loaded { config, given, .. } = loaded.unwrap();
            let mut told = Vec::new();
            let own = OwnScheduler {
                fields: own.as_object().unwrap(),
                place: "scheduler_config.json",
            };
            let scheduler = scheduler_of(&config, &given, &own, &mut |notice| {
                if let Notice::Warning(text) = notice {
                    told.push(text.to_owned());
                }
            });
            (scheduler.map(|scheduler| scheduler.kind), told)
        };
        let file =
            "diffusion_scheduler_config: {_class_name: '', solver_order: 3, steps_offset: 1}\n";
        let problem = "diffusion_scheduler_config.solver_order has no effect: the model's own sampler, DDIMScheduler, \
                       does not read it; leave it out, or give scheduler= one of dpm_multistep";
        let (scheduler, told) = read(file, &[]);
        assert_eq!(scheduler.unwrap(), SchedulerKind::Ddim);
        assert_eq!(told.len(), 1, "{told:?}");
        let expected = format!("a.yml:1: {problem}");
        assert!(told[0].starts_with(&expected), "{told:?}");

        let own_sampler = "diffusion_scheduler_config: {_class_name: ''}\n";
        let word = "diffusion_scheduler_config.solver_order=3";
        let (scheduler, told) = read(own_sampler, &[word]);
        let error = scheduler.unwrap_err();
        assert!(matches!(&error, RecipeError::Usage(_)), "{error}");
        assert!(error.to_string().starts_with(problem), "{error}");
        assert!(told.is_empty(), "{told:?}");

        // The files of another sampler's model need not say how PNDM begins.
        let (scheduler, told) = read(own_sampler, &["scheduler=plms"]);
        assert_eq!(scheduler.unwrap(), SchedulerKind::Pndm);
        assert!(told.is_empty(), "{told:?}");

        let (scheduler, told) = read(own_sampler, &[word, "scheduler=dpm_multistep"]);
        assert_eq!(scheduler.unwrap(), SchedulerKind::DpmMultistep);
        assert!(told.is_empty(), "{told:?}");
    }
}
