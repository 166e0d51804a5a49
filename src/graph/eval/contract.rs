//! Host evaluation of contractions, straight from their definitions.

use crate::shape::{Shape, row_major_strides};

use super::value::{Data, Value, for_each_index, position};
use crate::graph::{ConvDims, DotDims};

/// Sums products in `f64`, or in wrapping `i64` for integers.
struct Sum {
    float: f64,
    int: i64,
}

impl Sum {
    /// Adds the products of the elements at `l + i` of `lhs` and at `r + j` of `rhs`, for each pair `[i, j]` of `steps`.
    ///
    /// Tests run this without optimizations: a loop by index over slices takes a fraction of what iterators take.
    fn add(&mut self, lhs: &Value, rhs: &Value, [l, r]: [usize; 2], steps: &[[usize; 2]]) {
        let mut at = 0;
        match (&lhs.data, &rhs.data) {
            (Data::F(a), Data::F(b)) => {
                let (a, b) = (a.as_slice(), b.as_slice());
                let mut sum = self.float;
                while at < steps.len() {
                    let [i, j] = steps[at];
                    sum += a[l + i] * b[r + j];
                    at += 1;
                }
                self.float = sum;
            }
            (Data::I(a), Data::I(b)) => {
                let (a, b) = (a.as_slice(), b.as_slice());
                let mut sum = self.int;
                while at < steps.len() {
                    let [i, j] = steps[at];
                    sum = sum.wrapping_add(a[l + i].wrapping_mul(b[r + j]));
                    at += 1;
                }
                self.int = sum;
            }
            _ => {
                for [i, j] in steps {
                    self.float += lhs.float(l + i) * rhs.float(r + j);
                }
            }
        }
    }

    fn store(self, out: &mut Value, place: usize) {
        match &mut out.data {
            Data::F(v) => v[place] = self.float,
            Data::I(v) => v[place] = self.int,
        }
    }
}

/// The positions of a value's elements along these axes in row-major order, with index 0 along the others.
fn places(value: &Value, axes: &[usize]) -> Vec<usize> {
    let strides = row_major_strides(&value.shape.dims);
    let sizes: Vec<usize> = axes.iter().map(|d| value.shape.dims[*d]).collect();
    let mut places = Vec::with_capacity(sizes.iter().product());
    for_each_index(&sizes, |index| {
        places.push(index.iter().zip(axes).map(|(i, d)| i * strides[*d]).sum());
    });
    places
}

pub(super) fn dot_general(lhs: &Value, rhs: &Value, dims: &DotDims, shape: Shape) -> Value {
    let free = |value: &Value, batch: &[usize], contract: &[usize]| -> Vec<usize> {
        let is_free = |d: &usize| !batch.contains(d) && !contract.contains(d);
        let axes: Vec<usize> = (0..value.shape.rank()).filter(is_free).collect();
        places(value, &axes)
    };
    let lhs_free = free(lhs, &dims.lhs_batch, &dims.lhs_contract);
    let rhs_free = free(rhs, &dims.rhs_batch, &dims.rhs_contract);
    let batch = places(lhs, &dims.lhs_batch).into_iter();
    let batch = batch.zip(places(rhs, &dims.rhs_batch));
    let contracted = places(lhs, &dims.lhs_contract).into_iter();
    let contracted = contracted.zip(places(rhs, &dims.rhs_contract));
    let contracted: Vec<[usize; 2]> = contracted.map(|(i, j)| [i, j]).collect();
    let mut out = Value::zeros(shape);
    let mut place = 0;
    for (lhs_batch, rhs_batch) in batch {
        for left in &lhs_free {
            for right in &rhs_free {
                let mut sum = Sum { float: 0.0, int: 0 };
                sum.add(lhs, rhs, [lhs_batch + left, rhs_batch + right], &contracted);
                sum.store(&mut out, place);
                place += 1;
            }
        }
    }
    out
}

pub(super) fn convolution(lhs: &Value, rhs: &Value, dims: &ConvDims, shape: Shape) -> Value {
    let kernel: Vec<usize> = dims
        .rhs
        .spatial
        .iter()
        .map(|d| rhs.shape.dims[*d])
        .collect();
    let kernel_features = rhs.shape.dims[dims.rhs.feature];
    let out_features = shape.dims[dims.out.feature];
    let out_batch = shape.dims[dims.out.batch];
    let lhs_feature = row_major_strides(&lhs.shape.dims)[dims.lhs.feature];
    let rhs_feature = row_major_strides(&rhs.shape.dims)[dims.rhs.feature];
    let features: Vec<[usize; 2]> = (0..kernel_features)
        .map(|f| [f * lhs_feature, f * rhs_feature])
        .collect();
    let mut out = Value::zeros(shape.clone());
    let mut place = 0;
    for_each_index(&shape.dims, |index| {
        let feature = index[dims.out.feature];
        // Feature groups split the lhs features, batch groups its batch; the output feature tells which.
        let feature_group = feature / (out_features / dims.feature_groups);
        let batch_group = feature / (out_features / dims.batch_groups);
        let mut l = vec![0; lhs.shape.rank()];
        let mut r = vec![0; rhs.shape.rank()];
        l[dims.lhs.batch] = batch_group * out_batch + index[dims.out.batch];
        l[dims.lhs.feature] = feature_group * kernel_features;
        r[dims.rhs.batch] = feature;
        let mut sum = Sum { float: 0.0, int: 0 };
        for_each_index(&kernel, |k| {
            for (s, &tap) in k.iter().enumerate() {
                let at = (index[dims.out.spatial[s]] * dims.strides[s]) as i64
                    + (tap * dims.rhs_dilation[s]) as i64
                    - dims.padding[s].0;
                let dilation = dims.lhs_dilation[s] as i64;
                if at < 0
                    || at % dilation != 0
                    || at / dilation >= lhs.shape.dims[dims.lhs.spatial[s]] as i64
                {
                    return;
                }
                l[dims.lhs.spatial[s]] = (at / dilation) as usize;
                r[dims.rhs.spatial[s]] = tap;
            }
            let starts = [position(&lhs.shape.dims, &l), position(&rhs.shape.dims, &r)];
            sum.add(lhs, rhs, starts, &features);
        });
        sum.store(&mut out, place);
        place += 1;
    });
    out
}
