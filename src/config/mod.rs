//! The typed configuration: schema, YAML, overrides.
//!
//! [`Config::load`] reads a YAML file, merges `key=value` words of the command line into it and
//! checks the whole against the schema in `schema.rs`, where every key is declared once with its
//! type, default, meaning and the verbs it changes. All errors of one load come back together, each
//! with the key and its place. Nothing here touches a device.

mod check;
mod error;
mod explain;
mod field;
mod load;
mod model;
mod schema;
mod values;
mod verb;
mod yaml;

pub use check::{Derived, check_local_shard_count};
pub use error::{ConfigError, ConfigErrors, Place, Problem};
pub use explain::{complete, explain, explain_json, list, names, write_markdown};
pub use load::Loaded;
pub use model::builtin_unet_config;
pub use schema::{Config, LoraConfig, MESH, SchedulerConfig, TimestepBias};
pub use values::{
    Attention, AxisRule, AxisRules, BetaSchedule, BiasStrategy, DataSharding, DatasetType,
    FloatType, FreeDict, FreeList, Hardware, LearningRateSchedule, LossWeighting, MeshAxes,
    MeshAxis, ModelConfig, OneOrMore, Precision, PredictionType, PromptSyntax, Prompts, QuantRule,
    QuantRuleType, QuantRules, Quantization, RematPolicy, Resume, Sampler, TextEncoderConfig,
    TimestepSpacing, UNetConfig,
};
pub use verb::Verb;

#[cfg(test)]
mod tests;
