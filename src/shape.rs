//! The shape of a tensor: element type and dimensions.

use std::fmt;

use crate::dtype::DType;

/// Element type and dimension sizes, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub dtype: DType,
    pub dims: Vec<usize>,
}

impl Shape {
    pub fn new(dtype: DType, dims: impl Into<Vec<usize>>) -> Self {
        Shape {
            dtype,
            dims: dims.into(),
        }
    }

    pub fn scalar(dtype: DType) -> Self {
        Shape::new(dtype, [])
    }

    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// The number of elements: 1 for a scalar.
    pub fn count(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes of a dense host or device copy.
    pub fn bytes(&self) -> usize {
        self.dtype.storage_bytes(self.count())
    }

    /// One of `parts` equal parts along dimension `dim`, or the whole without one.
    pub fn part(&self, dim: Option<usize>, parts: usize) -> Self {
        let mut part = self.clone();
        if let Some(dim) = dim {
            part.dims[dim] /= parts;
        }
        part
    }

    /// The same dimensions with another element type.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Shape::new(dtype, self.dims.clone())
    }

    /// The same element type with other dimensions.
    pub fn with_dims(&self, dims: impl Into<Vec<usize>>) -> Self {
        Shape::new(self.dtype, dims)
    }

    /// The type in StableHLO text, e.g. `tensor<2x4xf32>`.
    pub fn stablehlo(&self) -> String {
        let mut text = String::from("tensor<");
        for dim in &self.dims {
            text.push_str(&dim.to_string());
            text.push('x');
        }
        text.push_str(self.dtype.stablehlo());
        text.push('>');
        text
    }
}

/// HLO's form, e.g. `f32[2,4]`.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, dim) in self.dims.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

/// Row-major strides of `dims`, in elements.
pub fn row_major_strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    strides
}
/// The greatest common divisor.
pub fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}
