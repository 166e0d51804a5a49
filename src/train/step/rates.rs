//! The learning rates of weights: scalars of the step.

use std::collections::BTreeMap;

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::models::Part;
use crate::shape::Shape;
use crate::train::inversion::is_learned;
use crate::train::lora::is_second_factor;

use super::names;

/// The learning rates of weights, by their names.
pub(super) struct Rates {
    /// That of the denoiser.
    common: Tensor,
    /// How many times the rate of an update's first factor that of the second one is.
    plus_ratio: f64,
    /// The rates of second factors, by those of first ones.
    second: BTreeMap<usize, Tensor>,
}

impl Rates {
    pub fn new(common: Tensor, plus_ratio: f64) -> Rates {
        Rates {
            common,
            plus_ratio,
            second: BTreeMap::new(),
        }
    }

    /// The learning rate of a weight; `None` for the common one.
    pub fn of(&mut self, b: &Builder, weight: &str) -> Result<Option<Tensor>, GraphError> {
        let own = of_part(b, weight)?;
        if self.plus_ratio == 1.0 || !is_second_factor(weight) {
            return Ok(own);
        }
        let first = own.unwrap_or(self.common);
        if let Some(known) = self.second.get(&first.index()) {
            return Ok(Some(*known));
        }
        let rate = b.mul_scalar(first, self.plus_ratio)?;
        self.second.insert(first.index(), rate);
        Ok(Some(rate))
    }
}

/// The learning rate of a text encoder's weight, or of the vectors of a new token.
fn of_part(b: &Builder, weight: &str) -> Result<Option<Tensor>, GraphError> {
    let root = weight.split('/').next();
    let parts = [Part::TextEncoder, Part::TextEncoder2];
    let which = parts.iter().position(|part| Some(part.name()) == root);
    let name = match is_learned(weight) {
        true => Some(names::TOKEN_LEARNING_RATE),
        false => which.map(|which| names::TEXT_LEARNING_RATES[which]),
    };
    let declare = |name: &str| b.input(name, Shape::scalar(DType::F32), &[]);
    name.map(declare).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::evaluate;
    use crate::host_tensor::HostTensor;

    /// Each part has its own rate, of which that of second factors is a multiple, made once.
    #[test]
    fn second_factors_have_a_multiple_of_the_rate_of_their_part() {
        let cases = [
            ("unet/conv_in.weight", 1.0),
            ("unet/conv_in.lora_down.weight", 1.0),
            ("unet/conv_in.lora_up.weight", 16.0),
            ("unet/conv_out.lora_up.weight", 16.0),
            ("text_encoder_2/text_model.q_proj.lora_down.weight", 2.0),
            ("text_encoder_2/text_model.q_proj.lora_up.weight", 32.0),
            ("text_encoder/learned_embeds", 4.0),
        ];
        let b = Builder::new();
        let input = |name| b.input(name, Shape::scalar(DType::F32), &[]).unwrap();
        let common = input(names::LEARNING_RATE);
        input(names::TEXT_LEARNING_RATES[1]);
        input(names::TOKEN_LEARNING_RATE);
        let mut rates = Rates::new(common, 16.0);
        let mut of = |weight: &str| rates.of(&b, weight).unwrap().unwrap_or(common);
        let found = cases.map(|(weight, _)| of(weight));
        assert_eq!(found[2], found[3]);
        for ((weight, _), rate) in cases.iter().zip(found) {
            b.output(weight, rate, None).unwrap();
        }
        let given = [1.0, 2.0, 4.0].map(|rate| HostTensor::from_f32([], &[rate]).unwrap());
        let found = evaluate(&b.finish(), &given).unwrap();
        let found = found.iter().map(|rate| rate.to_f64_vec().unwrap()[0]);
        assert_eq!(
            found.collect::<Vec<_>>(),
            cases.map(|(_, expected)| expected)
        );
    }
}
