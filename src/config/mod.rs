//! The typed configuration: schema, YAML, overrides.
//!
//! [`Config::load`] reads a YAML file, merges the `key=value` overrides of the command line into it and
//! checks the result against the schema in `schema.rs`, which declares every key once with its
//! type, default, meaning and the verbs it affects. All errors of one load come back together, each
//! with the key and its place. Nothing here touches a device.

mod check;
mod condition;
mod error;
mod explain;
mod field;
mod key;
mod load;
mod meant;
mod model;
mod quant;
mod recipes;
mod schema;
mod text;
mod values;
mod verb;
mod yaml;

pub use check::{Derived, check_local_shard_count};
pub use error::{ConfigError, ConfigErrors, Place, Problem};
pub use explain::{
    complete, explain, explain_json, is_image_option, is_read_with, list, names, write_markdown,
};
pub use load::{Given, Loaded};
pub use meant::meant;
pub use model::builtin_unet_config;
pub use quant::{QuantRule, QuantRuleMode, QuantRules, WeightGranularity};
pub use recipes::{RECIPES, Recipe};
pub use schema::{
    Calibration, Config, DEFAULT_GPU_MEMORY_FRACTION, LoraConfig, MOST_IMAGES, SchedulerConfig,
    TimestepBias,
};
pub use values::{
    Attention, BiasStrategy, DataSharding, DatasetType, FloatType, FolderWeights, FreeDict,
    FreeList, Hardware, LossWeighting, MaskedLoss, MeshAxes, ModelConfig, OneOrMore, OptimizerType,
    Prompts, QatObserver, QuantPreset, Quantization, Resume, Seed, ShapeNames, SvdOrder,
    TextEncoderConfig, TextualInversionFile, TextualInversionFiles, UNetConfig, WeightAlgorithm,
    WeightingScheme,
};
pub use verb::Verb;

#[cfg(test)]
mod tests;
