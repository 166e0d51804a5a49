//! Weights that files hold as codes with scales, in the layouts of other programs.
//!
//! Each such weight is a float tensor of its [`Checkpoint`], which is computed when it is read: the floats that the
//! program which wrote it would compute, in `f32`. [`Checkpoint::pack`] shows those that this program can multiply as they
//! are stored in its own layout ([`super::quantized`]) instead.

mod bitsandbytes;
mod blocks;
mod comfy;
mod decode;
mod nunchaku;
pub(super) mod quark;
mod torchao;

use std::path::Path;

use serde_json::{Map, Value};

use super::WeightsError;
use super::location::Location;
use super::open::Checkpoint;
use super::quantized::QuantizedError;
use crate::dtype::DType;

pub(super) use blocks::{BlockPart, BlockType};
pub(super) use nunchaku::Tiles;

impl Checkpoint {
    /// The same with weights in place of the codes and scales that other programs store, where the tensors say so.
    ///
    /// # Errors
    /// When a part of a weight is missing, or does not fit the others.
    pub(super) fn with_foreign_weights(mut self) -> Result<Checkpoint, WeightsError> {
        comfy::recognize(&mut self)?;
        bitsandbytes::recognize(&mut self)?;
        torchao::recognize(&mut self)?;
        nunchaku::recognize(&mut self)?;
        Ok(self)
    }

    /// The same where `config.json` describes weights of another program; `method` is what it says of the program.
    ///
    /// # Errors
    /// When such weights are not read here, or the tensors are not as it says.
    pub(super) fn described_by_others(
        &mut self,
        place: &Path,
        method: &str,
        description: &Map<String, Value>,
    ) -> Result<(), WeightsError> {
        match method {
            "quark" => quark::recognize(self, description),
            // Its tensors say all, and were recognized.
            "bitsandbytes" | "torchao" if self.widened() > 0 => Ok(()),
            "bitsandbytes" | "torchao" => {
                Err(self.disagrees(format!("no tensor is quantized by {method}")))
            }
            _ => Err(QuantizedError::Foreign {
                path: place.to_owned(),
                method: method.to_owned(),
            }
            .into()),
        }
    }

    /// The error of tensors that are not as a description says.
    fn disagrees(&self, reason: String) -> WeightsError {
        QuantizedError::Disagrees {
            path: self.path().to_owned(),
            reason,
        }
        .into()
    }

    /// The bytes of a tensor that describes something.
    fn small(&self, name: &str, most: usize) -> Result<Vec<u8>, WeightsError> {
        let location = self.locate(name)?;
        let bytes = location.shape.bytes();
        if bytes > most {
            return Err(self.wrong(
                name,
                format!("a description of {bytes} bytes; the most is {most}"),
            ));
        }
        Ok(self.read_location(location)?.data)
    }

    /// The numbers of a small tensor, a table.
    fn floats(&self, name: &str, location: &Location) -> Result<Vec<f32>, WeightsError> {
        let count = location.shape.count();
        if count > 256 {
            return Err(self.wrong(name, format!("a table of {count} numbers; the most is 256")));
        }
        let numbers = self.read_location(location)?.to_f32_vec();
        numbers.map_err(|source| WeightsError::Cast {
            name: name.to_owned(),
            source,
        })
    }
}

/// The zero points of the weight `name`, where one is not zero.
fn shifted(
    file: &Checkpoint,
    name: &str,
    zero_point: Option<Location>,
) -> Result<Option<Location>, WeightsError> {
    let Some(location) = zero_point else {
        return Ok(None);
    };
    let tensor = file.read_location(&location)?;
    match tensor.shape.dtype {
        DType::S8 => Ok(tensor
            .data
            .iter()
            .any(|byte| *byte != 0)
            .then_some(location)),
        _ => Err(file.wrong(
            name,
            format!("its zero points are {}, expected s8", tensor.shape),
        )),
    }
}
