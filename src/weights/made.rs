//! Reading tensors that no file has as they are shown: they are computed of others.

use super::WeightsError;
use super::location::{Location, Made, Product, Term};
use super::open::Checkpoint;
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

impl Checkpoint {
    /// Computes a tensor of this shape.
    pub(super) fn read_made(&self, made: &Made, shape: &Shape) -> Result<HostTensor, WeightsError> {
        match made {
            Made::Weight(parts) => {
                let name = "a weight that is stored as codes";
                self.read_parts(name, parts, shape.dtype, |_| Ok(()))
            }
            Made::Beside(parts) => self.read_beside(parts, shape),
            Made::Product(product) => self.read_product(product, shape),
            Made::Diagonal(parts) => self.read_diagonal(parts, shape),
            Made::Bias(terms) => self.read_bias(terms, shape),
        }
    }

    /// The numbers of a tensor in `f32`, row after row.
    fn numbers(&self, location: &Location) -> Result<Vec<f32>, WeightsError> {
        let numbers = self.read_location(location)?.to_f32_vec();
        numbers.map_err(|source| WeightsError::Cast {
            name: "a part of a weight".to_owned(),
            source,
        })
    }

    fn read_beside(&self, parts: &[Location], shape: &Shape) -> Result<HostTensor, WeightsError> {
        let bytes = |columns: usize| shape.dtype.storage_bytes(columns).max(1);
        let row = bytes(shape.dims.last().copied().unwrap_or(1));
        let mut data = vec![0; shape.bytes()];
        let mut start = 0;
        for part in parts {
            let own = bytes(part.columns());
            let found = self.read_location(part)?;
            let rows = data.chunks_exact_mut(row);
            for (wide, found) in rows.zip(found.data.chunks_exact(own)) {
                wide[start..start + own].copy_from_slice(found);
            }
            start += own;
        }
        let shape = shape.clone();
        Ok(HostTensor { shape, data })
    }

    fn read_product(&self, product: &Product, shape: &Shape) -> Result<HostTensor, WeightsError> {
        let factors = |location: &Option<Location>| match location {
            None => Ok(None),
            Some(location) => self.numbers(location).map(Some),
        };
        let (rows, whole) = (factors(&product.rows)?, factors(&product.whole)?);
        let of_columns = factors(&product.columns)?;
        let whole = whole.and_then(|one| one.first().copied()).unwrap_or(1.0);
        let mut values = self.numbers(&product.of)?;
        let columns = shape.dims.last().copied().unwrap_or(1).max(1);
        for (row, values) in values.chunks_mut(columns).enumerate() {
            let factor = rows.as_ref().map_or(1.0, |rows| rows[row]) * whole;
            values.iter_mut().for_each(|value| *value *= factor);
            for (value, factor) in values.iter_mut().zip(of_columns.iter().flatten()) {
                *value *= factor;
            }
        }
        Ok(of_floats(shape, &values))
    }

    fn read_diagonal(&self, parts: &[Location], shape: &Shape) -> Result<HostTensor, WeightsError> {
        let all = shape.dims.last().copied().unwrap_or(1).max(1);
        let mut values = vec![0.0; shape.count()];
        let (mut row, mut column) = (0, 0);
        for part in parts {
            let own = part.columns().max(1);
            for found in self.numbers(part)?.chunks_exact(own) {
                values[row * all + column..][..own].copy_from_slice(found);
                row += 1;
            }
            column += own;
        }
        Ok(of_floats(shape, &values))
    }

    fn read_bias(&self, terms: &[Term], shape: &Shape) -> Result<HostTensor, WeightsError> {
        let mut sums = vec![0.0_f64; shape.count()];
        for term in terms {
            match term {
                Term::Of(bias) => {
                    let bias = self.numbers(bias)?;
                    sums.iter_mut()
                        .zip(bias)
                        .for_each(|(s, b)| *s += f64::from(b));
                }
                Term::Constant(weight, input) => {
                    let weight_rows = self.numbers(weight)?;
                    let rows = weight_rows.chunks_exact(weight.columns().max(1));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        let of_row: f64 = row.iter().map(|w| f64::from(*w)).sum();
                        *sum += of_row * f64::from(*input);
                    }
                }
                Term::OneLess(rows) => rows.iter().for_each(|rows| {
                    sums[rows.clone()].iter_mut().for_each(|sum| *sum -= 1.0);
                }),
            }
        }
        let values: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        Ok(of_floats(shape, &values))
    }
}

fn of_floats(shape: &Shape, values: &[f32]) -> HostTensor {
    HostTensor {
        shape: shape.with_dtype(DType::F32),
        data: bytemuck::cast_slice(values).to_vec(),
    }
}
