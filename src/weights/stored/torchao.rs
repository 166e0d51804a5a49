//! torchao's tensors in safetensors: `<layer>._weight_qdata` and `<layer>._weight_scale`, described in the header by the
//! weight's name (facts: `torchao/prototype/safetensors/safetensors_support.py`).

use serde::Deserialize;

use super::comfy::names;
use super::shifted;
use crate::dtype::DType;
use crate::weights::WeightsError;
use crate::weights::location::{Location, Parts};
use crate::weights::open::Checkpoint;
use crate::weights::quantized::QuantizedError;

const CODES: &str = "._weight_qdata";

/// What the header says of a tensor.
#[derive(Deserialize)]
struct Described {
    #[serde(rename = "_type")]
    kind: String,
}

/// Makes weights of the quantized layers of a file.
pub(super) fn recognize(file: &mut Checkpoint) -> Result<(), WeightsError> {
    for codes in names(file, |name| name.ends_with(CODES)) {
        let layer = codes.trim_end_matches(CODES).to_owned();
        let weight = format!("{layer}.weight");
        let said = file
            .metadata()
            .get(&weight)
            .map(|text| serde_json::from_str(text));
        let kind = match said {
            Some(Ok(Described { kind })) => kind,
            Some(Err(e)) => {
                return Err(file.wrong(&weight, format!("no description of a tensor: {e}")));
            }
            None => continue,
        };
        let scale = format!("{layer}._weight_scale");
        let of = |name: &str| file.tensors.get(name).cloned();
        let (Some(found), Some(of_codes)) = (of(&scale), of(&codes)) else {
            return Err(file.disagrees(format!("{scale} is missing")));
        };
        let zero_point = of(&format!("{layer}._weight_zero_point"));
        let fits = matches!(
            (kind.as_str(), of_codes.shape.dtype),
            ("Int8Tensor", DType::S8) | ("Float8Tensor", DType::F8E4M3Fn | DType::F8E5M2)
        );
        if !fits {
            return Err(QuantizedError::Format {
                path: file.path().to_owned(),
                layer,
                format: format!("torchao's {kind} of {}", of_codes.shape.dtype),
                read: "Float8Tensor and Int8Tensor".to_owned(),
            }
            .into());
        }
        let mut parts = Parts::scaled(&of_codes, found);
        parts.zero_point = shifted(file, &weight, zero_point)?;
        parts.format.zero_point = parts.zero_point.is_some();
        parts
            .check()
            .map_err(|reason| file.wrong(&weight, reason))?;
        file.tensors.remove(&codes);
        file.tensors.remove(&scale);
        file.tensors.remove(&format!("{layer}._weight_zero_point"));
        file.tensors.insert(weight, Location::of_parts(parts));
    }
    Ok(())
}
