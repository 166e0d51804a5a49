//! Tensors that no file has as they are shown: they are computed of others when they are read.

use std::ops::Range;
use std::sync::Arc;

use super::WeightsError;
use super::location::{Location, Order, Parts};
use super::open::Checkpoint;
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

/// What a tensor is computed of.
#[derive(Clone, Debug)]
pub(super) enum Made {
    /// The floats of a weight that is stored as codes.
    Weight(Box<Parts>),
    /// These beside each other along their last dimension. A row of each has whole bytes.
    Beside(Vec<Location>),
    /// A product, in `f32`.
    Product(Box<Product>),
    /// These along the diagonal of a matrix, in `f32`, and zeros.
    Diagonal(Vec<Location>),
    /// The sum of these, in `f32`.
    Bias(Vec<Term>),
}

/// A tensor times numbers of its rows, of its columns, and one for all.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub of: Location,
    pub rows: Option<Location>,
    pub columns: Option<Location>,
    pub whole: Option<Location>,
}

impl Product {
    /// A tensor alone.
    pub fn of(of: Location) -> Product {
        Product {
            of,
            rows: None,
            columns: None,
            whole: None,
        }
    }

    pub fn shown(self) -> Location {
        let shape = self.of.shape.with_dtype(DType::F32);
        Made::Product(Box::new(self)).shown(shape)
    }
}

/// A part of a bias.
#[derive(Clone, Debug)]
pub(super) enum Term {
    Of(Location),
    /// What a weight makes of an input of which every feature is this number.
    Constant(Location, f32),
    /// 1 less for each of these output features.
    OneLess(Vec<Range<usize>>),
}

impl Made {
    /// A tensor of this shape.
    pub fn shown(self, shape: Shape) -> Location {
        Location {
            file: 0,
            offset: 0,
            shape,
            order: Order::AsShown,
            made: Some(Arc::new(self)),
        }
    }

    /// These beside each other; one alone is itself.
    pub fn beside(mut parts: Vec<Location>) -> Location {
        if parts.len() == 1
            && let Some(one) = parts.pop()
        {
            return one;
        }
        let mut shape = parts[0].shape.clone();
        let columns = parts.iter().map(columns).sum();
        if let Some(last) = shape.dims.last_mut() {
            *last = columns;
        }
        Made::Beside(parts).shown(shape)
    }

    /// These matrices along the diagonal of one.
    pub fn diagonal(parts: Vec<Location>) -> Location {
        let rows = parts.iter().map(|part| part.shape.dims[0]).sum();
        let columns = parts.iter().map(columns).sum();
        Made::Diagonal(parts).shown(Shape::new(DType::F32, [rows, columns]))
    }
}

fn columns(location: &Location) -> usize {
    location.shape.dims.last().copied().unwrap_or(1)
}

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
            let own = bytes(columns(part));
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
            let own = columns(part).max(1);
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
                    let rows = weight_rows.chunks_exact(columns(weight).max(1));
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
