//! A tensor while it is evaluated.

use half::{bf16, f16};

use crate::dtype::DType;
use crate::host_tensor::{HostTensor, HostTensorError, float8};
use crate::shape::Shape;

/// Elements of one value in row-major order: floats in `F`, integers and predicates in `I`.
#[derive(Clone, Debug)]
pub enum Data {
    F(Vec<f64>),
    I(Vec<i64>),
}

/// A tensor while it is evaluated.
#[derive(Clone, Debug)]
pub struct Value {
    pub shape: Shape,
    pub data: Data,
}

impl Value {
    pub fn zeros(shape: Shape) -> Value {
        let data = if shape.dtype.is_float() {
            Data::F(vec![0.0; shape.count()])
        } else {
            Data::I(vec![0; shape.count()])
        };
        Value { shape, data }
    }

    pub(super) fn from_host(tensor: &HostTensor) -> Result<Value, HostTensorError> {
        let floats = tensor.to_f64_vec()?;
        let data = if tensor.shape.dtype.is_float() {
            Data::F(floats)
        } else if tensor.shape.dtype.bits() == 64 {
            Data::I(
                tensor
                    .data
                    .chunks_exact(8)
                    .map(|c| {
                        let mut bytes = [0; 8];
                        bytes.copy_from_slice(c);
                        i64::from_le_bytes(bytes)
                    })
                    .collect(),
            )
        } else {
            Data::I(floats.into_iter().map(|v| v as i64).collect())
        };
        Ok(Value {
            shape: tensor.shape.clone(),
            data,
        })
    }

    pub(super) fn to_host(&self) -> Result<HostTensor, HostTensorError> {
        match &self.data {
            Data::F(v) => HostTensor::from_f64(self.shape.clone(), v),
            Data::I(v) if self.shape.dtype.bits() == 64 => HostTensor::new(
                self.shape.clone(),
                v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ),
            Data::I(v) => {
                let floats: Vec<f64> = v.iter().map(|x| *x as f64).collect();
                HostTensor::from_f64(self.shape.clone(), &floats)
            }
        }
    }

    /// Element `index`; floats are truncated.
    pub fn int(&self, index: usize) -> i64 {
        match &self.data {
            Data::I(v) => v[index],
            Data::F(v) => v[index] as i64,
        }
    }

    /// Element `index`.
    pub fn float(&self, index: usize) -> f64 {
        match &self.data {
            Data::F(v) => v[index],
            Data::I(v) => v[index] as f64,
        }
    }

    /// A value of `shape` whose element at each result position is the element of `self` at `source(position)`.
    pub(super) fn pick(&self, shape: Shape, source: impl Fn(&[usize]) -> usize) -> Value {
        let mut sources = Vec::with_capacity(shape.count());
        for_each_index(&shape.dims, |index| sources.push(source(index)));
        self.picked(shape, &sources)
    }

    /// A value of `shape` whose elements are those from `first` on, so many apart along each dimension.
    pub(super) fn strided(&self, shape: Shape, first: usize, strides: &[usize]) -> Value {
        let mut sources = Vec::with_capacity(shape.count());
        let (outer, [count, step]) = match (shape.dims.split_last(), strides.last()) {
            (Some((count, outer)), Some(step)) => (outer, [*count, *step]),
            _ => (&[][..], [1, 0]),
        };
        for_each_index(outer, |index| {
            let own = index.iter().zip(strides).map(|(i, stride)| i * stride);
            let mut at = first + own.sum::<usize>();
            let end = sources.len() + count;
            while sources.len() < end {
                sources.push(at);
                at += step;
            }
        });
        self.picked(shape, &sources)
    }

    fn picked(&self, shape: Shape, sources: &[usize]) -> Value {
        let data = match &self.data {
            Data::F(v) => Data::F(picked(v, sources)),
            Data::I(v) => Data::I(picked(v, sources)),
        };
        Value { shape, data }
    }

    pub(super) fn set(&mut self, index: usize, from: &Value, source: usize) {
        match (&mut self.data, &from.data) {
            (Data::F(to), _) => to[index] = from.float(source),
            (Data::I(to), _) => to[index] = from.int(source),
        }
    }

    /// Rounds and wraps every element to the element type.
    pub(super) fn rounded(mut self) -> Value {
        let dtype = self.shape.dtype;
        match &mut self.data {
            Data::F(v) => v.iter_mut().for_each(|x| *x = round_float(dtype, *x)),
            Data::I(v) => v.iter_mut().for_each(|x| *x = wrap_int(dtype, *x)),
        }
        self
    }
}

/// Tests run this without optimizations: a loop by index takes a fraction of what iterators take.
fn picked<T: Copy>(values: &[T], sources: &[usize]) -> Vec<T> {
    let mut picked = Vec::with_capacity(sources.len());
    while picked.len() < sources.len() {
        picked.push(values[sources[picked.len()]]);
    }
    picked
}

/// The nearest number that the float type holds.
pub fn round_float(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        // By way of f32: from_f64 looks at the upper half of the number only, and misses what breaks a tie.
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::F8E4M3Fn => f64::from(float8::decode(float8::encode(x as f32))),
        DType::F8E5M2 => f64::from(float8::decode_e5m2(float8::encode_e5m2(x as f32))),
        _ => x,
    }
}

fn wrap_int(dtype: DType, x: i64) -> i64 {
    match dtype {
        DType::Pred => i64::from(x != 0),
        DType::S8 => i64::from(x as i8),
        DType::S16 => i64::from(x as i16),
        DType::S32 => i64::from(x as i32),
        DType::U8 => i64::from(x as u8),
        DType::U16 => i64::from(x as u16),
        DType::U32 => i64::from(x as u32),
        DType::S4 => (x << 60) >> 60,
        DType::U4 => x & 0xF,
        _ => x,
    }
}

/// Calls `visit` with every index of `dims` in row-major order.
pub(super) fn for_each_index(dims: &[usize], mut visit: impl FnMut(&[usize])) {
    let count: usize = dims.iter().product();
    let mut index = vec![0; dims.len()];
    for _ in 0..count {
        visit(&index);
        for d in (0..dims.len()).rev() {
            index[d] += 1;
            if index[d] < dims[d] {
                break;
            }
            index[d] = 0;
        }
    }
}

/// The row-major position of `index` in `dims`.
pub(super) fn position(dims: &[usize], index: &[usize]) -> usize {
    index
        .iter()
        .zip(dims)
        .fold(0, |place, (i, size)| place * size + i)
}
