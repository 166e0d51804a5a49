//! Weights that files hold as codes with scales, in the layouts of other programs.
//!
//! Each such weight is a float tensor of its [`Checkpoint`], which is computed when it is read: the floats that the
//! program which wrote it would compute, in `f32`. [`Checkpoint::pack`] shows those that this program can multiply as they
//! are stored in its own layout ([`super::quantized`]) instead.

mod bitsandbytes;
mod blocks;
mod comfy;
mod parts;

use super::WeightsError;
use super::open::{Checkpoint, Location};

pub(super) use blocks::{BlockPart, BlockType};
pub(super) use parts::Parts;

impl Checkpoint {
    /// The same with weights in place of the codes and scales that other programs store, where the tensors say so.
    ///
    /// # Errors
    /// When a part of a weight is missing, or does not fit the others.
    pub(super) fn with_foreign_weights(mut self) -> Result<Checkpoint, WeightsError> {
        comfy::recognize(&mut self)?;
        bitsandbytes::recognize(&mut self)?;
        Ok(self)
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
