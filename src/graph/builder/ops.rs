//! The operations that models are written in.

use crate::dtype::DType;

use super::Builder;
use crate::graph::{
    Binary, Comparison, ConvDims, DotDims, GatherDims, GraphError, Op, PadDim, QuantDot, Reduction,
    ScatterDims, ScatterKind, Tensor, Unary,
};

type Result<T> = std::result::Result<T, GraphError>;

impl Builder {
    // Elementwise

    pub fn unary(&self, kind: Unary, x: Tensor) -> Result<Tensor> {
        self.push(Op::Unary(kind), &[x])
    }

    /// Applies `kind` after broadcasting both operands to one shape by NumPy's rules.
    pub fn binary(&self, kind: Binary, x: Tensor, y: Tensor) -> Result<Tensor> {
        let (x, y) = self.broadcast_together(x, y)?;
        self.push(Op::Binary(kind), &[x, y])
    }

    pub fn add(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Add, x, y)
    }

    pub fn sub(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Sub, x, y)
    }

    pub fn mul(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Mul, x, y)
    }

    pub fn div(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Div, x, y)
    }

    pub fn max(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Max, x, y)
    }

    pub fn min(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Min, x, y)
    }

    /// `x + value`, with `value` rounded to the type of `x`.
    pub fn add_scalar(&self, x: Tensor, value: f64) -> Result<Tensor> {
        let value = self.scalar(self.dtype(x), value)?;
        self.add(x, value)
    }

    /// `x * value`, with `value` rounded to the type of `x`.
    pub fn mul_scalar(&self, x: Tensor, value: f64) -> Result<Tensor> {
        let value = self.scalar(self.dtype(x), value)?;
        self.mul(x, value)
    }

    pub fn neg(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Neg, x)
    }

    pub fn exp(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Exp, x)
    }

    pub fn log(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Log, x)
    }

    pub fn sqrt(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Sqrt, x)
    }

    pub fn rsqrt(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Rsqrt, x)
    }

    pub fn tanh(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Tanh, x)
    }

    pub fn logistic(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Logistic, x)
    }

    pub fn erf(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Erf, x)
    }

    pub fn sin(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Sin, x)
    }

    pub fn cos(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Cos, x)
    }

    pub fn abs(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Abs, x)
    }

    /// `x * x`
    pub fn square(&self, x: Tensor) -> Result<Tensor> {
        self.push(Op::Binary(Binary::Mul), &[x, x])
    }

    pub fn compare(&self, kind: Comparison, x: Tensor, y: Tensor) -> Result<Tensor> {
        let (x, y) = self.broadcast_together(x, y)?;
        self.push(Op::Compare(kind), &[x, y])
    }

    /// `on_true` where `pred` holds, else `on_false`; all three broadcast to one shape.
    pub fn select(&self, pred: Tensor, on_true: Tensor, on_false: Tensor) -> Result<Tensor> {
        let (on_true, on_false) = self.broadcast_together(on_true, on_false)?;
        let (pred, on_true) = self.broadcast_together(pred, on_true)?;
        let dims = self.dims(pred);
        let on_false = self.broadcast_to(on_false, &dims)?;
        self.push(Op::Select, &[pred, on_true, on_false])
    }

    /// `x` limited to `[low, high]`.
    pub fn clamp(&self, x: Tensor, low: f64, high: f64) -> Result<Tensor> {
        let shape = self.shape(x);
        let low = self.full(&shape, low)?;
        let high = self.full(&shape, high)?;
        self.push(Op::Clamp, &[low, x, high])
    }

    /// `x` in another element type; `x` itself when it has it already.
    pub fn convert(&self, x: Tensor, dtype: DType) -> Result<Tensor> {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        self.push(Op::Convert(dtype), &[x])
    }

    // Shapes

    /// Puts dimension `i` of `x` at `dims[i]` of a result with sizes `result`.
    pub fn broadcast_in_dim(&self, x: Tensor, dims: &[usize], result: &[usize]) -> Result<Tensor> {
        if dims.iter().copied().eq(0..result.len()) && self.dims(x) == result {
            return Ok(x);
        }
        self.push(
            Op::BroadcastInDim {
                dims: dims.to_vec(),
                result: result.to_vec(),
            },
            &[x],
        )
    }

    /// Expands `x` to `result` by NumPy's rules (trailing dimensions align).
    pub fn broadcast_to(&self, x: Tensor, result: &[usize]) -> Result<Tensor> {
        let rank = self.dims(x).len();
        if rank > result.len() {
            return Err(self.invalid(format!(
                "{} cannot broadcast to the lower rank of {result:?}",
                self.shape(x)
            )));
        }
        let dims: Vec<usize> = (result.len() - rank..result.len()).collect();
        self.broadcast_in_dim(x, &dims, result)
    }

    fn broadcast_together(&self, x: Tensor, y: Tensor) -> Result<(Tensor, Tensor)> {
        let (a, b) = (self.dims(x), self.dims(y));
        if a == b {
            return Ok((x, y));
        }
        let rank = a.len().max(b.len());
        let mut result = vec![1; rank];
        for i in 0..rank {
            let size = |dims: &[usize]| {
                let skipped = rank - dims.len();
                if i < skipped { 1 } else { dims[i - skipped] }
            };
            let (p, q) = (size(&a), size(&b));
            result[i] = if p == 1 { q } else { p };
            if q != 1 && q != result[i] {
                return Err(self.invalid(format!(
                    "{} and {} do not broadcast together",
                    self.shape(x),
                    self.shape(y)
                )));
            }
        }
        Ok((
            self.broadcast_to(x, &result)?,
            self.broadcast_to(y, &result)?,
        ))
    }

    pub fn reshape(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        if self.dims(x) == dims {
            return Ok(x);
        }
        self.push(Op::Reshape(dims.to_vec()), &[x])
    }

    /// Result dimension `i` is dimension `perm[i]` of `x`.
    pub fn transpose(&self, x: Tensor, perm: &[usize]) -> Result<Tensor> {
        if perm.iter().copied().eq(0..self.dims(x).len()) {
            return Ok(x);
        }
        self.push(Op::Transpose(perm.to_vec()), &[x])
    }

    pub fn slice(
        &self,
        x: Tensor,
        start: &[usize],
        limit: &[usize],
        stride: &[usize],
    ) -> Result<Tensor> {
        self.push(
            Op::Slice {
                start: start.to_vec(),
                limit: limit.to_vec(),
                stride: stride.to_vec(),
            },
            &[x],
        )
    }

    /// `x[.., start..limit, ..]` along dimension `dim`.
    pub fn slice_dim(&self, x: Tensor, dim: usize, start: usize, limit: usize) -> Result<Tensor> {
        let dims = self.dims(x);
        let mut starts = vec![0; dims.len()];
        let mut limits = dims.clone();
        if dim >= dims.len() {
            return Err(self.invalid(format!("{} has no dimension {dim}", self.shape(x))));
        }
        starts[dim] = start;
        limits[dim] = limit;
        self.slice(x, &starts, &limits, &vec![1; dims.len()])
    }

    /// `parts` equal slices of `x` along `dim`.
    pub fn split(&self, x: Tensor, dim: usize, parts: usize) -> Result<Vec<Tensor>> {
        let size = *self
            .dims(x)
            .get(dim)
            .ok_or_else(|| self.invalid(format!("{} has no dimension {dim}", self.shape(x))))?;
        if parts == 0 || size % parts != 0 {
            return Err(self.invalid(format!(
                "{} dimension {dim} does not split into {parts} equal parts",
                self.shape(x)
            )));
        }
        let each = size / parts;
        (0..parts)
            .map(|i| self.slice_dim(x, dim, i * each, (i + 1) * each))
            .collect()
    }

    pub fn dynamic_slice(&self, x: Tensor, start: &[Tensor], sizes: &[usize]) -> Result<Tensor> {
        let mut operands = vec![x];
        operands.extend(start);
        self.push(Op::DynamicSlice(sizes.to_vec()), &operands)
    }

    pub fn dynamic_update_slice(
        &self,
        x: Tensor,
        update: Tensor,
        start: &[Tensor],
    ) -> Result<Tensor> {
        let mut operands = vec![x, update];
        operands.extend(start);
        self.push(Op::DynamicUpdateSlice, &operands)
    }

    /// Pads with `value`, rounded to the type of `x`.
    pub fn pad(&self, x: Tensor, value: f64, dims: &[PadDim]) -> Result<Tensor> {
        let value = self.scalar(self.dtype(x), value)?;
        self.push(Op::Pad(dims.to_vec()), &[x, value])
    }

    pub fn concatenate(&self, parts: &[Tensor], dim: usize) -> Result<Tensor> {
        if let [single] = parts {
            return Ok(*single);
        }
        self.push(Op::Concatenate(dim), parts)
    }

    pub fn reverse(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        self.push(Op::Reverse(dims.to_vec()), &[x])
    }

    pub fn gather(&self, x: Tensor, indices: Tensor, dims: GatherDims) -> Result<Tensor> {
        self.push(Op::Gather(dims), &[x, indices])
    }

    pub fn scatter(
        &self,
        kind: ScatterKind,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        dims: ScatterDims,
    ) -> Result<Tensor> {
        self.push(Op::Scatter(kind, dims), &[x, indices, updates])
    }

    /// Rows of `table` (`[rows, ..]`) chosen by integer `indices`: the result has the dimensions of
    /// `indices`, then those of a row.
    pub fn take(&self, table: Tensor, indices: Tensor) -> Result<Tensor> {
        let table_dims = self.dims(table);
        if table_dims.is_empty() {
            return Err(self.invalid("cannot take rows of a scalar"));
        }
        let index_rank = self.dims(indices).len();
        let mut slice_sizes = table_dims.clone();
        slice_sizes[0] = 1;
        self.gather(
            table,
            indices,
            GatherDims {
                offset_dims: (index_rank..index_rank + table_dims.len() - 1).collect(),
                collapsed_slice_dims: vec![0],
                start_index_map: vec![0],
                index_vector_dim: index_rank,
                slice_sizes,
            },
        )
    }

    // Reductions and contractions

    pub fn reduce(&self, kind: Reduction, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        if dims.is_empty() {
            return Ok(x);
        }
        let mut dims = dims.to_vec();
        dims.sort_unstable();
        self.push(Op::Reduce { kind, dims }, &[x])
    }

    pub fn sum(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        self.reduce(Reduction::Sum, x, dims)
    }

    /// Reduces `dims` and keeps them with size 1.
    pub fn reduce_keep(&self, kind: Reduction, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        let mut kept = self.dims(x);
        let reduced = self.reduce(kind, x, dims)?;
        for &d in dims {
            kept[d] = 1;
        }
        self.reshape(reduced, &kept)
    }

    /// A contraction whose result has element type `result`.
    pub fn dot_general(
        &self,
        lhs: Tensor,
        rhs: Tensor,
        dims: DotDims,
        result: DType,
    ) -> Result<Tensor> {
        self.dot_general_quant(lhs, rhs, dims, result, None)
    }

    pub(crate) fn dot_general_quant(
        &self,
        lhs: Tensor,
        rhs: Tensor,
        dims: DotDims,
        result: DType,
        quant: Option<QuantDot>,
    ) -> Result<Tensor> {
        self.push(
            Op::DotGeneral {
                dims,
                result,
                quant: quant.map(Box::new),
            },
            &[lhs, rhs],
        )
    }

    pub fn convolution(
        &self,
        lhs: Tensor,
        rhs: Tensor,
        dims: ConvDims,
        result: DType,
    ) -> Result<Tensor> {
        self.push(
            Op::Convolution {
                dims: Box::new(dims),
                result,
                quant: None,
            },
            &[lhs, rhs],
        )
    }
}
