//! Every operation's derivative against central differences, in f64 on the host evaluator.
//!
//! Each case checks every element of every input and, as the dot test, one random direction:
//! `<J v, u> = <v, J^T u>`, where `u` is a random cotangent of the result.

use maxdiff::dtype::DType;
use maxdiff::graph::{
    Binary, Builder, Comparison, ConvDims, ConvLayout, DotDims, GatherDims, GraphError, Keeps, Op,
    PadDim, Reduction, ScatterDims, ScatterKind, Tensor, Unary, evaluate, grad,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::shape::Shape;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

type Traced = Result<Tensor, GraphError>;

/// Central differences with step 1e-5 in f64: truncation about 1e-10, cancellation about 1e-11.
const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-7;

fn f64s(dims: &[usize]) -> Shape {
    Shape::new(DType::F64, dims)
}

fn random(rng: &mut ChaCha8Rng, count: usize, low: f64, high: f64) -> Vec<f64> {
    (0..count).map(|_| rng.random_range(low..high)).collect()
}

fn check(
    case: &str,
    dims: &[&[usize]],
    low: f64,
    high: f64,
    f: impl Fn(&Builder, &[Tensor]) -> Traced,
) {
    let b = Builder::new();
    let xs: Vec<Tensor> = dims
        .iter()
        .enumerate()
        .map(|(i, d)| b.input(&format!("x{i}"), f64s(d), &[]).unwrap())
        .collect();
    let y = f(&b, &xs).unwrap_or_else(|e| panic!("{case}: {e}"));
    let shape = b.shape(y);
    assert!(shape.count() > 0, "{case}: an empty result checks nothing");
    let u = b.input("u", shape.clone(), &[]).unwrap();
    let all: Vec<usize> = (0..shape.rank()).collect();
    let loss = b.sum(b.mul(y, u).unwrap(), &all).unwrap();
    let grads = grad(&b, loss, &xs).unwrap_or_else(|e| panic!("{case}: {e}"));
    b.output("loss", loss, None).unwrap();
    for (i, g) in grads.iter().enumerate() {
        assert_eq!(b.shape(*g), f64s(dims[i]), "{case}: gradient {i}");
        b.output(&format!("g{i}"), *g, None).unwrap();
    }
    let graph = b.finish();

    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let values: Vec<Vec<f64>> = dims
        .iter()
        .map(|d| random(&mut rng, d.iter().product(), low, high))
        .collect();
    let cotangent = random(&mut rng, shape.count(), -1.0, 1.0);
    let run = |values: &[Vec<f64>]| -> Vec<Vec<f64>> {
        let mut inputs: Vec<HostTensor> = values
            .iter()
            .zip(dims)
            .map(|(v, d)| HostTensor::from_f64(f64s(d), v).unwrap())
            .collect();
        inputs.push(HostTensor::from_f64(shape.clone(), &cotangent).unwrap());
        evaluate(&graph, &inputs)
            .unwrap()
            .iter()
            .map(|t| t.to_f64_vec().unwrap())
            .collect()
    };
    let at = run(&values);
    let slope = |direction: &[Vec<f64>]| {
        let moved = |sign: f64| -> Vec<Vec<f64>> {
            values
                .iter()
                .zip(direction)
                .map(|(v, d)| v.iter().zip(d).map(|(a, b)| a + sign * STEP * b).collect())
                .collect()
        };
        (run(&moved(1.0))[0][0] - run(&moved(-1.0))[0][0]) / (2.0 * STEP)
    };
    let close = |found: f64, expected: f64, what: &str| {
        let allowed = TOLERANCE * (1.0 + expected.abs());
        assert!(
            (found - expected).abs() <= allowed,
            "{case}: {what}: derivative {found}, central difference {expected}"
        );
    };
    for i in 0..dims.len() {
        for k in 0..values[i].len() {
            let mut direction: Vec<Vec<f64>> = values.iter().map(|v| vec![0.0; v.len()]).collect();
            direction[i][k] = 1.0;
            close(
                at[1 + i][k],
                slope(&direction),
                &format!("input {i}, element {k}"),
            );
        }
    }
    let direction: Vec<Vec<f64>> = values
        .iter()
        .map(|v| random(&mut rng, v.len(), -1.0, 1.0))
        .collect();
    let inner: f64 = direction
        .iter()
        .zip(&at[1..])
        .flat_map(|(d, g)| d.iter().zip(g).map(|(a, b)| a * b))
        .sum();
    close(inner, slope(&direction), "dot test");
}

#[test]
fn unary_operations() {
    for (kind, low, high) in [
        (Unary::Abs, 0.1, 2.0),
        (Unary::Abs, -2.0, -0.1),
        (Unary::Cos, -2.0, 2.0),
        (Unary::Erf, -2.0, 2.0),
        (Unary::Exp, -2.0, 2.0),
        (Unary::Log, 0.2, 2.0),
        (Unary::Logistic, -3.0, 3.0),
        (Unary::Neg, -2.0, 2.0),
        (Unary::Rsqrt, 0.3, 2.0),
        (Unary::Sin, -2.0, 2.0),
        (Unary::Sqrt, 0.3, 2.0),
        (Unary::Tanh, -2.0, 2.0),
        // Flat between their steps, which 0.1..0.4 does not reach.
        (Unary::Ceil, 0.1, 0.4),
        (Unary::Floor, 0.1, 0.4),
        (Unary::RoundNearestEven, 0.1, 0.4),
        (Unary::Sign, 0.1, 0.4),
    ] {
        check(kind.name(), &[&[2, 3]], low, high, |b, x| {
            b.unary(kind, x[0])
        });
    }
}

#[test]
fn binary_operations() {
    for kind in [
        Binary::Add,
        Binary::Sub,
        Binary::Mul,
        Binary::Div,
        Binary::Max,
        Binary::Min,
        Binary::Pow,
    ] {
        check(kind.name(), &[&[2, 3], &[2, 3]], 0.3, 2.0, |b, x| {
            b.binary(kind, x[0], x[1])
        });
        check(kind.name(), &[&[2, 1, 3], &[4, 1]], 0.3, 2.0, |b, x| {
            b.binary(kind, x[0], x[1])
        });
    }
    check("multiply by itself", &[&[3]], -2.0, 2.0, |b, x| {
        b.square(x[0])
    });
}

#[test]
fn selection_and_conversion() {
    check("select", &[&[2, 3], &[2, 3]], -1.0, 1.0, |b, x| {
        let half = b.full(&f64s(&[2, 3]), 0.5)?;
        let pred = b.compare(Comparison::Gt, b.abs(x[0])?, half)?;
        b.select(pred, b.square(x[0])?, x[1])
    });
    check("clamp", &[&[4, 5]], -2.0, 2.0, |b, x| {
        b.clamp(x[0], -0.7, 0.9)
    });
    check("stop at an integer", &[&[4]], -2.0, 2.0, |b, x| {
        let ints = b.convert(b.mul_scalar(x[0], 0.0)?, DType::S32)?;
        b.add(x[0], b.convert(ints, DType::F64)?)
    });
}

#[test]
fn shape_operations() {
    check("broadcast_in_dim", &[&[2, 1]], -1.0, 1.0, |b, x| {
        b.broadcast_in_dim(x[0], &[2, 0], &[3, 4, 2])
    });
    check("reshape", &[&[2, 6]], -1.0, 1.0, |b, x| {
        b.reshape(x[0], &[3, 4])
    });
    check("transpose", &[&[2, 3, 4]], -1.0, 1.0, |b, x| {
        b.transpose(x[0], &[2, 0, 1])
    });
    check("slice", &[&[7, 5]], -1.0, 1.0, |b, x| {
        b.slice(x[0], &[1, 0], &[6, 5], &[2, 3])
    });
    check("slice of nothing left over", &[&[8]], -1.0, 1.0, |b, x| {
        b.slice(x[0], &[0], &[8], &[2])
    });
    check("pad", &[&[3, 4], &[]], -1.0, 1.0, |b, x| {
        let pads = [
            PadDim {
                low: 1,
                high: 2,
                interior: 1,
            },
            PadDim {
                low: -1,
                high: 0,
                interior: 2,
            },
        ];
        b.push(maxdiff::graph::Op::Pad(pads.to_vec()), &[x[0], x[1]])
    });
    check(
        "concatenate",
        &[&[2, 3], &[2, 1], &[2, 2]],
        -1.0,
        1.0,
        |b, x| b.concatenate(x, 1),
    );
    check("reverse", &[&[2, 3]], -1.0, 1.0, |b, x| {
        b.reverse(x[0], &[1])
    });
    check("dynamic_slice", &[&[5, 4]], -1.0, 1.0, |b, x| {
        // The second start index lies out of bounds and is clamped to 2.
        let start = [b.scalar(DType::S32, 1.0)?, b.scalar(DType::S32, 9.0)?];
        b.dynamic_slice(x[0], &start, &[3, 2])
    });
    check(
        "dynamic_update_slice",
        &[&[5, 4], &[2, 3]],
        -1.0,
        1.0,
        |b, x| {
            let start = [b.scalar(DType::S32, 9.0)?, b.scalar(DType::S32, 1.0)?];
            b.dynamic_update_slice(x[0], x[1], &start)
        },
    );
}

#[test]
fn cotangents_of_neighbouring_slices_are_joined() {
    let weighted = |b: &Builder, x: Tensor, parts: &[(usize, usize)]| {
        let mut sum = b.full(&f64s(&[2, 2]), 0.0)?;
        for (i, &(start, end)) in parts.iter().enumerate() {
            let part = b.square(b.slice_dim(x, 1, start, end)?)?;
            sum = b.add(sum, b.mul_scalar(part, 1.0 + i as f64)?)?;
        }
        Ok(sum)
    };
    let all = [(0, 2), (2, 4), (4, 6)];
    let some = [(1, 3), (3, 5)];
    let apart = [(0, 2), (3, 5)];
    let over = [(0, 2), (1, 3)];
    for (name, parts, joined, padded) in [
        ("all", &all[..], 1, 0),
        ("some", &some[..], 1, 1),
        ("apart", &apart[..], 0, 2),
        ("over each other", &over[..], 0, 2),
    ] {
        check(name, &[&[2, 6]], -1.0, 1.0, |b, x| weighted(b, x[0], parts));

        let b = Builder::new();
        let x = b.input("x", f64s(&[2, 6]), &[]).unwrap();
        let y = weighted(&b, x, parts).unwrap();
        let loss = b.sum(y, &[0, 1]).unwrap();
        let g = grad(&b, loss, &[x]).unwrap()[0];
        b.output("g", g, None).unwrap();
        let graph = b.finish();
        let live = graph.nodes.iter().zip(graph.live_nodes());
        let live: Vec<&Op> = live
            .filter(|(_, live)| *live)
            .map(|(node, _)| &node.op)
            .collect();
        let count = |is: fn(&Op) -> bool| live.iter().filter(|op| is(op)).count();
        let is_joined = count(|op| matches!(op, Op::Concatenate(_)));
        let is_padded = count(|op| matches!(op, Op::Pad(_)));
        assert_eq!((is_joined, is_padded), (joined, padded), "{name}");
    }
}

#[test]
fn gather_and_scatter() {
    let indices = |b: &Builder, dims: &[usize], values: &[i32]| {
        b.constant(HostTensor::from_i32(dims, values).unwrap())
    };
    check(
        "take rows, one twice and one out of bounds",
        &[&[4, 3]],
        -1.0,
        1.0,
        |b, x| b.take(x[0], indices(b, &[2, 3], &[0, 2, 2, 9, -1, 1])?),
    );
    check("gather windows", &[&[5, 4]], -1.0, 1.0, |b, x| {
        let at = indices(b, &[2, 3], &[0, 3, 4, 1, 2, 0])?;
        let dims = GatherDims {
            offset_dims: vec![1, 2],
            collapsed_slice_dims: vec![],
            start_index_map: vec![0, 1],
            index_vector_dim: 0,
            slice_sizes: vec![2, 2],
        };
        b.gather(x[0], at, dims)
    });
    check("scatter-add", &[&[5, 3], &[4, 3]], -1.0, 1.0, |b, x| {
        let at = indices(b, &[4, 1], &[1, 0, 1, 4])?;
        let dims = ScatterDims {
            update_window_dims: vec![1],
            inserted_window_dims: vec![0],
            scatter_dims_to_operand_dims: vec![0],
            index_vector_dim: 1,
        };
        b.scatter(ScatterKind::Add, x[0], at, x[1], dims)
    });
}

#[test]
fn reductions() {
    for kind in [Reduction::Sum, Reduction::Max, Reduction::Min] {
        check(kind.name(), &[&[2, 3, 4]], -1.0, 1.0, |b, x| {
            b.reduce(kind, x[0], &[2, 0])
        });
    }
}

#[test]
fn dots() {
    check("matrix product", &[&[3, 4], &[4, 2]], -1.0, 1.0, |b, x| {
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        b.dot_general(x[0], x[1], dims, DType::F64)
    });
    check("linear layer", &[&[2, 3, 4], &[5, 4]], -1.0, 1.0, |b, x| {
        let dims = DotDims {
            lhs_contract: vec![2],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        b.dot_general(x[0], x[1], dims, DType::F64)
    });
    check(
        "several of each kind, in odd orders",
        &[&[2, 3, 4, 5, 2], &[5, 3, 2, 2, 4]],
        -1.0,
        1.0,
        |b, x| {
            let dims = DotDims {
                lhs_batch: vec![4, 1],
                rhs_batch: vec![2, 1],
                lhs_contract: vec![3, 2],
                rhs_contract: vec![0, 4],
            };
            b.dot_general(x[0], x[1], dims, DType::F64)
        },
    );
}

fn conv(
    strides: [usize; 2],
    padding: [(i64, i64); 2],
    lhs: [usize; 2],
    rhs: [usize; 2],
    fg: usize,
    bg: usize,
) -> ConvDims {
    ConvDims {
        lhs: ConvLayout::channels_last(2),
        rhs: ConvLayout::channels_first(2),
        out: ConvLayout::channels_last(2),
        strides: strides.to_vec(),
        padding: padding.to_vec(),
        lhs_dilation: lhs.to_vec(),
        rhs_dilation: rhs.to_vec(),
        feature_groups: fg,
        batch_groups: bg,
    }
}

#[test]
fn convolutions() {
    let one = [1, 1];
    for (case, lhs, rhs, dims) in [
        (
            "3x3",
            [2, 4, 5, 2],
            [3, 2, 3, 3],
            conv(one, [(1, 1); 2], one, one, 1, 1),
        ),
        (
            "stride 2",
            [1, 6, 5, 2],
            [2, 2, 3, 3],
            conv([2, 2], [(1, 1); 2], one, one, 1, 1),
        ),
        (
            "uneven padding, stride",
            [1, 7, 6, 1],
            [2, 1, 3, 2],
            conv([3, 2], [(0, 2), (1, 0)], one, one, 1, 1),
        ),
        (
            "cropping padding",
            [1, 6, 6, 1],
            [1, 1, 2, 2],
            conv(one, [(-1, 1), (0, -2)], one, one, 1, 1),
        ),
        (
            "kernel dilation",
            [1, 7, 7, 1],
            [2, 1, 3, 2],
            conv(one, [(2, 2), (1, 1)], one, [2, 3], 1, 1),
        ),
        (
            "lhs dilation (transposed)",
            [1, 3, 4, 2],
            [2, 2, 3, 3],
            conv(one, [(2, 1), (1, 2)], [2, 2], one, 1, 1),
        ),
        (
            "both dilations and strides",
            [1, 4, 4, 1],
            [1, 1, 2, 2],
            conv([2, 1], [(1, 1); 2], [2, 1], [1, 2], 1, 1),
        ),
        (
            "feature groups",
            [1, 4, 4, 4],
            [6, 2, 3, 3],
            conv(one, [(1, 1); 2], one, one, 2, 1),
        ),
        (
            "depthwise",
            [2, 4, 4, 3],
            [3, 1, 3, 3],
            conv([2, 2], [(1, 1); 2], one, one, 3, 1),
        ),
        (
            "batch groups",
            [4, 4, 4, 2],
            [6, 2, 3, 3],
            conv(one, [(1, 1); 2], one, one, 1, 2),
        ),
    ] {
        check(case, &[&lhs, &rhs], -1.0, 1.0, |b, x| {
            b.convolution(x[0], x[1], dims.clone(), DType::F64)
        });
    }
    let mixed = ConvDims {
        lhs: ConvLayout::channels_first(2),
        rhs: ConvLayout {
            batch: 3,
            feature: 2,
            spatial: vec![1, 0],
        },
        out: ConvLayout {
            batch: 1,
            feature: 0,
            spatial: vec![3, 2],
        },
        ..conv([1, 2], [(1, 0), (0, 1)], one, one, 1, 1)
    };
    check(
        "other layouts",
        &[&[2, 3, 4, 5], &[2, 3, 3, 2]],
        -1.0,
        1.0,
        |b, x| b.convolution(x[0], x[1], mixed.clone(), DType::F64),
    );
}

#[test]
fn hints_pass_cotangents_on() {
    check("barrier", &[&[3], &[2]], -1.0, 1.0, |b, x| {
        let barred = b.optimization_barrier(&[b.square(x[0])?, b.exp(x[1])?])?;
        b.concatenate(&barred, 0)
    });
    check("constraint", &[&[3]], -1.0, 1.0, |b, x| {
        b.constrain(b.square(x[0])?, &[Some("batch")])
    });
}

#[test]
fn a_power_of_zero_has_no_slope() {
    let b = Builder::new();
    let x = b.input("x", f64s(&[3]), &[]).unwrap();
    let y = b.input("y", f64s(&[3]), &[]).unwrap();
    let power = b.binary(Binary::Pow, x, y).unwrap();
    let loss = b.sum(power, &[0]).unwrap();
    for (name, g) in ["x", "y"].iter().zip(grad(&b, loss, &[x, y]).unwrap()) {
        b.output(name, g, None).unwrap();
    }
    let values = |v: &[f64]| HostTensor::from_f64(f64s(&[3]), v).unwrap();
    // JAX's: the slope of x^0 in x is 0 also at x = 0, and that of 0^y in y is 0.
    let found = evaluate(
        &b.finish(),
        &[values(&[0.0, 2.0, 0.0]), values(&[0.0, 0.0, 2.0])],
    )
    .unwrap();
    assert_eq!(found[0].to_f64_vec().unwrap(), [0.0, 0.0, 0.0]);
    assert_eq!(found[1].to_f64_vec().unwrap(), [0.0, 2f64.ln(), 0.0]);
}

fn mlp(b: &Builder, x: Tensor, w: &[Tensor], recompute: bool) -> Traced {
    let mut h = x;
    for (i, w) in w.iter().enumerate() {
        let outer = b.scope(i);
        let inner = if recompute {
            outer.checkpoint(Keeps::Nothing)
        } else {
            outer
        };
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        h = inner.tanh(inner.dot_general(h, *w, dims, DType::F64)?)?;
    }
    Ok(h)
}

#[test]
fn recomputation_changes_no_value() {
    check(
        "recomputed blocks",
        &[&[2, 3], &[3, 3], &[3, 3]],
        -1.0,
        1.0,
        |b, x| mlp(b, x[0], &x[1..], true),
    );
    // The derivative of the recomputed form computes tanh twice for each block, and reads its inputs through barriers:
    // a copy of what was not barred would be the compiler's to merge with the original.
    let count = |recompute: bool| {
        let b = Builder::new();
        let x = b.input("x", f64s(&[2, 3]), &[]).unwrap();
        let w: Vec<Tensor> = (0..2)
            .map(|i| b.input(&format!("w{i}"), f64s(&[3, 3]), &[]).unwrap())
            .collect();
        let y = mlp(&b, x, &w, recompute).unwrap();
        let loss = b.sum(y, &[0, 1]).unwrap();
        grad(&b, loss, &w).unwrap();
        b.with_graph(|g| {
            let of = |name: &str| g.nodes.iter().filter(|n| n.op.name() == name).count();
            let copies = g.nodes.iter().filter(|n| n.op.name() == "tanh").skip(2);
            let barred = copies.filter(|tanh| {
                let dot = &g.nodes[tanh.operands[0] as usize];
                dot.operands
                    .iter()
                    .all(|&o| matches!(g.nodes[o as usize].op, Op::GetTupleElement(_)))
            });
            (of("tanh"), of("optimization_barrier"), barred.count())
        })
    };
    assert_eq!(count(false), (2, 0, 0));
    assert_eq!(count(true), (4, 2, 2));
}

#[test]
fn what_has_no_derivative_says_so() {
    let b = Builder::new();
    let x = b.input("x", f64s(&[]), &[]).unwrap();
    let inner = b.root("model").scope("sampler");
    let out = inner
        .while_loop(
            &[x],
            |b, c| {
                let limit = b.scalar(DType::F64, 10.0)?;
                b.compare(Comparison::Lt, c[0], limit)
            },
            |b, c| Ok(vec![b.mul_scalar(c[0], 2.0)?]),
        )
        .unwrap();
    let error = grad(&b, out[0], &[x]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "model/sampler: while has no derivative here; keep it out of what the loss depends on"
    );
    let vector = b.input("v", f64s(&[2]), &[]).unwrap();
    assert!(grad(&b, vector, &[vector]).is_err());
    let unused = grad(&b, x, &[vector]).unwrap();
    assert_eq!(b.shape(unused[0]), f64s(&[2]));
}
