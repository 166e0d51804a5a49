//! The names and the metadata of kohya's trainers, for files that web interfaces load.

use std::collections::BTreeMap;

use super::dialects::comparable;
use crate::models::Part;
use crate::models::spec::KohyaSpec;
use crate::models::unet::original::Blocks;
use crate::schedulers::PredictionType;
use crate::weights::save::pytorch_metadata;

/// How kohya's trainers name the layers of a model.
#[derive(Clone, Debug)]
pub struct KohyaNames {
    spec: KohyaSpec,
    prediction: PredictionType,
    blocks: Option<Blocks>,
    /// The name of the file's run.
    output_name: String,
}

impl KohyaNames {
    /// For a model of a family, whose denoiser has these parameter paths.
    pub fn new<'a>(
        spec: KohyaSpec,
        prediction: PredictionType,
        paths: impl Iterator<Item = &'a str>,
        output_name: String,
    ) -> KohyaNames {
        KohyaNames {
            spec,
            prediction,
            blocks: spec.original_names.then(|| Blocks::of(paths)),
            output_name,
        }
    }

    /// The module of the layer `path` of the denoiser or of a text encoder.
    pub fn module(&self, part: Part, path: &str) -> String {
        if part != Part::Unet {
            let which = match (self.spec.text_encoders, part) {
                (1, _) => "",
                (_, Part::TextEncoder2) => "2",
                _ => "1",
            };
            return format!("lora_te{which}_{}", comparable(path));
        }
        let original = self
            .blocks
            .as_ref()
            .and_then(|blocks| blocks.original_name(path));
        let path = original.as_deref().unwrap_or(path);
        format!("lora_unet_{}", comparable(path))
    }

    /// The metadata of a file.
    pub fn metadata(&self, rank: usize, alpha: f64) -> BTreeMap<String, String> {
        let (which, prediction) = match self.prediction {
            PredictionType::VPrediction => (1, "v"),
            PredictionType::Epsilon | PredictionType::Sample => (0, "epsilon"),
            PredictionType::FlowPrediction => (0, "flow"),
        };
        let (version, architecture) = (self.spec.versions[which], self.spec.architectures[which]);
        let own = [
            ("ss_network_module", "networks.lora".to_owned()),
            ("ss_network_dim", rank.to_string()),
            ("ss_network_alpha", alpha.to_string()),
            ("ss_base_model_version", version.to_owned()),
            ("ss_output_name", self.output_name.clone()),
            ("modelspec.sai_model_spec", "1.0.0".to_owned()),
            ("modelspec.architecture", format!("{architecture}/lora")),
            ("modelspec.title", self.output_name.clone()),
            ("modelspec.prediction_type", prediction.to_owned()),
        ];
        let own = own.map(|(key, value)| (key.to_owned(), value));
        pytorch_metadata().into_iter().chain(own).collect()
    }
}
