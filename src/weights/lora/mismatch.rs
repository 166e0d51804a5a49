//! The parts of a LoRA that do not fit the model, and the family that it seems to be for.

use std::fmt;
use std::path::PathBuf;

use crate::models::{DenoiserKind, Family};

/// How many modules of each kind an error shows.
const SHOWN: usize = 20;

/// Models that a LoRA may be for, as far as its names and shapes tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraFamily {
    Known(Family),
    /// A model with such a transformer.
    Transformer(DenoiserKind),
    /// A model without a UNet.
    OtherTransformer,
}

impl fmt::Display for LoraFamily {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            LoraFamily::Known(family) => f.write_str(family.title()),
            LoraFamily::Transformer(kind) => f.write_str(kind.models()),
            LoraFamily::OtherTransformer => f.write_str("a transformer such as Flux or SD 3"),
        }
    }
}

impl LoraFamily {
    /// The family whose text features, which its cross-attention reads, are that wide.
    pub(super) fn of_text_features(features: usize) -> Option<LoraFamily> {
        let (family, _) = Family::of_text_features(features)?;
        Some(LoraFamily::Known(family))
    }

    /// The family that modules' names in a file tell: the denoiser's, where it is a transformer, before those of text
    /// encoders.
    pub(super) fn of_names<'a>(
        modules: impl Iterator<Item = &'a str> + Clone,
    ) -> Option<LoraFamily> {
        let transformer = modules.clone().find_map(Self::of_transformer);
        transformer.or_else(|| {
            let has = |start: &&str| modules.clone().any(|module| module.starts_with(start));
            let of = |family: &Family| family.spec().lora_names.iter().any(has);
            Family::ALL.into_iter().find(of).map(LoraFamily::Known)
        })
    }

    fn of_transformer(module: &str) -> Option<LoraFamily> {
        const TRANSFORMERS: [(&str, LoraFamily); 5] = [
            ("double_blocks", LoraFamily::Transformer(DenoiserKind::Flux)),
            ("single_blocks", LoraFamily::Transformer(DenoiserKind::Flux)),
            (
                "single_transformer_blocks",
                LoraFamily::Transformer(DenoiserKind::Flux),
            ),
            ("joint_blocks", LoraFamily::Transformer(DenoiserKind::Sd3)),
            ("lora_transformer_", LoraFamily::OtherTransformer),
        ];
        let named = TRANSFORMERS.iter().find(|(part, _)| module.contains(part));
        let other = module
            .starts_with("transformer.")
            .then_some(LoraFamily::OtherTransformer);
        named.map(|(_, family)| *family).or(other)
    }
}

/// A module of the file that is no weight of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct UnmatchedModule {
    /// Its name in the file.
    pub module: String,
    /// Dimensions of its down and up factors.
    pub down: Vec<usize>,
    pub up: Vec<usize>,
}

/// A module whose factors make no update of its weight.
#[derive(Clone, Debug, PartialEq)]
pub struct MisshapenModule {
    /// Its name in the file.
    pub module: String,
    pub down: Vec<usize>,
    pub up: Vec<usize>,
    /// The weight's full name and dimensions.
    pub weight: String,
    pub expected: Vec<usize>,
}

/// Every module of a LoRA that does not fit the model, each list sorted by name.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraMismatch {
    pub path: PathBuf,
    /// Modules in the file that were looked at.
    pub modules: usize,
    pub unmatched: Vec<UnmatchedModule>,
    pub misshapen: Vec<MisshapenModule>,
    /// The family that the file seems to be for, and that of the model.
    pub lora_family: Option<LoraFamily>,
    pub model_family: Option<LoraFamily>,
}

impl std::error::Error for LoraMismatch {}

impl fmt::Display for LoraMismatch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "{}: does not fit the model: of {} modules {} match no weight, {} are of another shape",
            self.path.display(),
            self.modules,
            self.unmatched.len(),
            self.misshapen.len()
        )?;
        match (self.lora_family, self.model_family) {
            (Some(LoraFamily::OtherTransformer), Some(LoraFamily::Transformer(_))) => {}
            (Some(lora), Some(model)) if lora != model => {
                write!(f, "; it is a LoRA for {lora}, the model is {model}")?;
            }
            (Some(lora), None) => write!(f, "; it seems to be a LoRA for {lora}")?,
            (Some(_), Some(_)) | (None, _) => {}
        }
        for module in self.unmatched.iter().take(SHOWN) {
            let UnmatchedModule { module, down, up } = module;
            write!(f, "\n  no such weight: {module} (down {down:?}, up {up:?})")?;
        }
        more(f, self.unmatched.len(), "that match no weight")?;
        for module in self.misshapen.iter().take(SHOWN) {
            let MisshapenModule {
                module,
                down,
                up,
                weight,
                expected,
            } = module;
            write!(
                f,
                "\n  shape: {module} (down {down:?}, up {up:?}) for {weight} {expected:?}"
            )?;
        }
        more(f, self.misshapen.len(), "of another shape")
    }
}

fn more(f: &mut fmt::Formatter, count: usize, kind: &str) -> fmt::Result {
    match count.checked_sub(SHOWN) {
        None | Some(0) => Ok(()),
        Some(rest) => write!(f, "\n  ... and {rest} more {kind}"),
    }
}
