//! Host evaluation of contractions, straight from their definitions.

use crate::shape::Shape;

use super::value::{Data, Value, for_each_index, position};
use crate::graph::{ConvDims, DotDims};

/// Sums products in `f64`, or in wrapping `i64` for integers.
struct Sum {
    float: f64,
    int: i64,
}

impl Sum {
    /// Adds the product of the elements at the index `l` of `lhs` and `r` of `rhs`.
    fn add(&mut self, lhs: &Value, l: &[usize], rhs: &Value, r: &[usize]) {
        let l = position(&lhs.shape.dims, l);
        let r = position(&rhs.shape.dims, r);
        match (&lhs.data, &rhs.data) {
            (Data::I(a), Data::I(b)) => {
                self.int = self.int.wrapping_add(a[l].wrapping_mul(b[r]));
            }
            _ => self.float += lhs.float(l) * rhs.float(r),
        }
    }

    fn store(self, out: &mut Value, place: usize) {
        match &mut out.data {
            Data::F(v) => v[place] = self.float,
            Data::I(v) => v[place] = self.int,
        }
    }
}

pub(super) fn dot_general(lhs: &Value, rhs: &Value, dims: &DotDims, shape: Shape) -> Value {
    let free = |rank: usize, batch: &[usize], contract: &[usize]| -> Vec<usize> {
        (0..rank)
            .filter(|d| !batch.contains(d) && !contract.contains(d))
            .collect()
    };
    let lhs_free = free(lhs.shape.rank(), &dims.lhs_batch, &dims.lhs_contract);
    let rhs_free = free(rhs.shape.rank(), &dims.rhs_batch, &dims.rhs_contract);
    let contracted: Vec<usize> = dims
        .lhs_contract
        .iter()
        .map(|d| lhs.shape.dims[*d])
        .collect();
    let mut out = Value::zeros(shape.clone());
    let mut place = 0;
    for_each_index(&shape.dims, |index| {
        let (batch, rest) = index.split_at(dims.lhs_batch.len());
        let (left, right) = rest.split_at(lhs_free.len());
        let mut l = vec![0; lhs.shape.rank()];
        let mut r = vec![0; rhs.shape.rank()];
        for (i, b) in batch.iter().enumerate() {
            l[dims.lhs_batch[i]] = *b;
            r[dims.rhs_batch[i]] = *b;
        }
        for (d, i) in lhs_free.iter().zip(left) {
            l[*d] = *i;
        }
        for (d, i) in rhs_free.iter().zip(right) {
            r[*d] = *i;
        }
        let mut sum = Sum { float: 0.0, int: 0 };
        for_each_index(&contracted, |k| {
            for (i, k) in k.iter().enumerate() {
                l[dims.lhs_contract[i]] = *k;
                r[dims.rhs_contract[i]] = *k;
            }
            sum.add(lhs, &l, rhs, &r);
        });
        sum.store(&mut out, place);
        place += 1;
    });
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
            for f in 0..kernel_features {
                l[dims.lhs.feature] = feature_group * kernel_features + f;
                r[dims.rhs.feature] = f;
                sum.add(lhs, &l, rhs, &r);
            }
        });
        sum.store(&mut out, place);
        place += 1;
    });
    out
}
