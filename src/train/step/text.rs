//! Text encoders as a part of the training step.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::host_tensor::HostTensor;
use crate::models::unet::{TextTime, UNetConditioning, names as unet};
use crate::models::{Conditioning, Denoiser, DiffusionModel, HiddenState};
use crate::shape::Shape;

use super::names;

/// The conditioning of the denoiser by the text encoders, whose token ids are declared.
pub(super) fn encoded_text(
    b: &Builder,
    model: &DiffusionModel,
    batch: usize,
) -> Result<Conditioning, GraphError> {
    let unsupported = || {
        let family = model.family.title();
        b.invalid(format!("the text encoders of {family} cannot be trained"))
    };
    let Denoiser::Unet(_) = &model.denoiser else {
        return Err(unsupported());
    };
    let pooled_encoders = model.pooled_encoders()?;
    let (mut hidden, mut pooled) = (Vec::new(), Vec::new());
    for (which, encoder) in model.text_encoders.iter().enumerate() {
        let name = names::INPUT_IDS.get(which).ok_or_else(unsupported)?;
        let ids = Shape::new(DType::S32, [batch, encoder.tokens.min(model.tokens)]);
        let ids = b.input(name, ids, &[Some("activation_batch"), None])?;
        let encoded = model.encode(b, which, ids)?;
        hidden.extend(encoded.encoder_hidden_states);
        pooled.extend(encoded.pooled.filter(|_| pooled_encoders.contains(&which)));
    }
    if hidden.is_empty()
        || model
            .text_encoders
            .iter()
            .any(|e| e.hidden == HiddenState::Pooled)
    {
        return Err(unsupported());
    }
    let text_time = match pooled.is_empty() {
        true => None,
        false => Some(TextTime {
            text_embeds: b.concatenate(&pooled, 1)?,
            time_ids: time_ids(b, model, batch)?,
        }),
    };
    Ok(Conditioning::Unet(UNetConditioning {
        encoder_hidden_states: b.concatenate(&hidden, 2)?,
        text_time,
    }))
}

/// SDXL's time ids: an input of images of published models, which had other sizes before.
fn time_ids(b: &Builder, model: &DiffusionModel, batch: usize) -> Result<Tensor, GraphError> {
    let [_, ids] = model.time_ids();
    let dims = [batch, ids.len()];
    if model.family.spec().published.is_some() {
        let axes = [Some("activation_batch"), None];
        return b.input(unet::TIME_IDS, Shape::new(DType::F32, dims), &axes);
    }
    let ids = b.constant(HostTensor::from_f32([1, ids.len()], &ids)?)?;
    b.broadcast_to(ids, &dims)
}
