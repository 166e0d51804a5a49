//! The transformer on latents: 2 x 2 of them are a token.

use crate::dtype::DType;
use crate::graph::{Builder, Tensor};
use crate::nn::{Precision, Remat, Result, check_patches, dims};
use crate::shape::Shape;

use super::config::{FluxTransformer2DConfig, POSITION_AXES};
use super::controlnet::{FluxControl, flux_controlnet};
use super::residuals::FluxResiduals;
use super::transformer::{FluxConditioning, FluxInputs, ROOT, flux_transformer, names};

/// Rows and columns of latents in a token.
pub const PATCH: usize = 2;

/// The inputs of the transformer, with the image as latents.
#[derive(Clone, Debug)]
pub struct FluxLatents {
    /// Noisy latents `[B, channels, rows, columns]`.
    pub sample: Tensor,
    /// Training timesteps `[B]`, from 0 to 1000.
    pub timestep: Tensor,
    pub conditioning: FluxConditioning,
    /// ControlNets, whose images' latents are of the sample's shape.
    pub controls: Vec<FluxControl>,
}

/// The transformer's prediction for latents: `[B, channels, rows, columns]` in `precision.activations`.
///
/// # Errors
/// When rows or columns are odd; as for [`flux_transformer`].
pub fn denoise_latents(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    latents: FluxLatents,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let b = &b.root(ROOT);
    let [_, _, rows, columns] = dims(b, "sample", latents.sample)?;
    let conditioning = latents.conditioning;
    let [_, text, _] = dims(
        b,
        names::ENCODER_HIDDEN_STATES,
        conditioning.encoder_hidden_states,
    )?;
    let mut inputs = FluxInputs {
        hidden_states: pack(b, latents.sample)?,
        timestep: b.mul_scalar(latents.timestep, 1e-3)?,
        img_ids: image_ids(b, [rows / PATCH, columns / PATCH])?,
        txt_ids: b.full(&Shape::new(DType::F32, [text, POSITION_AXES]), 0.0)?,
        conditioning,
        residuals: None,
    };
    let mut residuals: Option<FluxResiduals> = None;
    for control in &latents.controls {
        let control = FluxControl {
            latents: pack(b, control.latents)?,
            ..control.clone()
        };
        let added = flux_controlnet(b, &inputs, &control, precision, remat)?;
        residuals = Some(match residuals {
            None => added,
            Some(sum) => sum.add(&b.root(&control.root), &added)?,
        });
    }
    inputs.residuals = residuals.as_ref();
    let tokens = flux_transformer(b, config, inputs, precision, remat)?;
    unpack(b, tokens, [rows, columns])
}

/// Tokens of 2 x 2 latents `[B, channels, rows, columns]`, row by row: `[B, rows * columns / 4, 4 * channels]`.
fn pack(b: &Builder, latents: Tensor) -> Result<Tensor> {
    let [batch, channels, rows, columns] = dims(b, "latents", latents)?;
    check_patches(b, latents, PATCH)?;
    let (down, across) = (rows / PATCH, columns / PATCH);
    let x = b.reshape(latents, &[batch, channels, down, PATCH, across, PATCH])?;
    let x = b.transpose(x, &[0, 2, 4, 1, 3, 5])?;
    b.reshape(x, &[batch, down * across, channels * PATCH * PATCH])
}

/// The latents of these rows and columns that [`pack`] makes `tokens` of.
fn unpack(b: &Builder, tokens: Tensor, [rows, columns]: [usize; 2]) -> Result<Tensor> {
    let [batch, _, features] = dims(b, "tokens", tokens)?;
    let channels = features / (PATCH * PATCH);
    let (down, across) = (rows / PATCH, columns / PATCH);
    let x = b.reshape(tokens, &[batch, down, across, channels, PATCH, PATCH])?;
    let x = b.transpose(x, &[0, 3, 1, 4, 2, 5])?;
    b.reshape(x, &[batch, channels, rows, columns])
}

/// The positions of the tokens of an image, row by row: 0, its row and its column.
fn image_ids(b: &Builder, grid: [usize; 2]) -> Result<Tensor> {
    let shape = Shape::new(DType::F32, grid);
    let column = |x: Tensor| b.reshape(x, &[grid[0] * grid[1], 1]);
    let ids = [
        column(b.full(&shape, 0.0)?)?,
        column(b.iota(shape.clone(), 0)?)?,
        column(b.iota(shape, 1)?)?,
    ];
    b.concatenate(&ids, 1)
}

#[cfg(test)]
mod tests {
    use super::super::declare_inputs;
    use super::*;
    use crate::nn::tests::input;

    #[test]
    fn odd_latents_and_wrong_inputs_are_named() {
        let b = Builder::new();
        let latents = input(&b, "latents", &[1, 16, 4, 5]);
        let error = pack(&b.root(ROOT), latents).unwrap_err().to_string();
        assert!(error.contains("must be multiples of 2"), "{error}");
        let config = FluxTransformer2DConfig::default();
        let mut inputs = declare_inputs(&b, &config, [2, 6, 5]).unwrap();
        let run = |inputs| {
            let y = flux_transformer(&b, &config, inputs, Precision::F32, Remat::None);
            y.unwrap_err().to_string()
        };
        inputs.conditioning.guidance = Some(inputs.timestep);
        assert!(run(inputs).contains("guidance_embeds is false"));
        inputs.img_ids = inputs.txt_ids;
        let error = run(inputs);
        assert!(
            error.contains("img_ids is f32[5,3]; expected sizes [6, 3]"),
            "{error}"
        );
    }
}
