//! Kernels of rows for GPUs, against the graphs that they stand for. No GPU is needed: their text is evaluated on the host.

use maxdiff::aot::compiler_for_one;
use maxdiff::backend::gpu::{claim, fuse, rewrite};
use maxdiff::dtype::DType;
use maxdiff::emit::{EmitOptions, stablehlo};
use maxdiff::graph::{
    Binary, Builder, Comparison, Composite, DotDims, Graph, Node, Op, Reduction, Tensor, Unary,
};
use maxdiff::nn::{
    Attention, Linear, Precision, attention, gated_gelu, layer_norm, linear, plain_layer_norm,
};
use maxdiff::shape::Shape;
use maxdiff::topology::Accelerator;

use crate::common::{cpu_session, lowered, run_on};
use crate::tpu_kernels::{calls, distance, inputs};

const BF16: Precision = of(DType::BF16);

const fn of(dtype: DType) -> Precision {
    Precision {
        weights: dtype,
        activations: dtype,
    }
}

/// The graph without composites, in the form for GPUs, before and after rows have kernels.
fn fused(graph: &Graph) -> [Graph; 2] {
    let plain = rewrite(&graph.inline_composites(&|_, _| true)).unwrap();
    let kernels = fuse(&plain).unwrap();
    [plain, kernels]
}

/// A sum of a layer and what it read, a norm, and a layer with a gate, for `batch` times `rows` rows of `features` features.
fn block([batch, rows, features]: [usize; 3], dtype: DType, int8: bool) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(dtype, [batch, rows, features]);
    let x = b.input("x", shape, &[]).unwrap();
    let m = b.root("m");
    let layer = |name: &str, x: Tensor, features: usize| {
        let layer = Linear::new(features, "embed", "mlp");
        linear(&m.scope(name), x, layer, of(dtype)).unwrap()
    };
    let y = layer("first", x, features);
    let x = b.add(x, y).unwrap();
    let y = layer_norm(&m.scope("norm"), x, 1e-5, of(dtype)).unwrap();
    let y = layer("up", y, 2 * features);
    let y = gated_gelu(&b, y).unwrap();
    let y = layer("down", y, features);
    let y = b.add(x, y).unwrap();
    b.output("y", y, None).unwrap();
    lowered(b, int8)
}

#[test]
fn rows_between_products_are_one_kernel() {
    // In int8 also the rows that the first layer reads, those behind the gate, and three weights; rows of one piece and of two, and
    // numbers of rows that a program has four, two and one of. What is not stored is not rounded to bf16, so that results in bf16,
    // and some integers, differ.
    for (dims, dtype, int8, count, bound) in [
        ([2, 8, 64], DType::F32, false, 1, 1e-6),
        ([1, 3, 192], DType::F32, false, 1, 1e-6),
        ([2, 6, 320], DType::F32, true, 6, 1e-4),
        ([2, 8, 64], DType::BF16, false, 1, 1e-2),
        ([2, 8, 64], DType::BF16, true, 6, 2e-2),
    ] {
        let [plain, kernels] = fused(&block(dims, dtype, int8));
        assert_eq!((calls(&plain), calls(&kernels)), (0, count), "{dims:?}");
        // Nothing is left that no output needs, whose operands may be gone.
        let of_inputs = |node: &Node| matches!(node.op, Op::Parameter(_));
        let live = kernels.nodes.iter().zip(kernels.live_nodes());
        let mut dead = live.filter(|(node, live)| !live && !of_inputs(node));
        assert!(dead.next().is_none(), "{dims:?}");
        let error = distance(&plain, &kernels);
        assert!(error <= bound, "{dims:?} in {dtype}: {error}");
        let live = kernels.nodes.iter().zip(kernels.live_nodes());
        let mut left = live.filter(|(_, live)| *live).map(|(node, _)| &node.op);
        assert!(!left.any(|op| matches!(op, Op::Reduce { .. })), "{dims:?}");
    }
}

#[test]
fn products_of_8_bits_give_bf16_to_the_kernels_that_scale_them() {
    let [_, kernels] = fused(&block([2, 8, 64], DType::BF16, true));
    let text = stablehlo(&kernels, "rows", &EmitOptions::default());
    let call = "(tensor<2x8x128xbf16>, tensor<2x8xbf16>, tensor<128xbf16>, tensor<128xbf16>) -> (tensor<2x8xbf16>, tensor<2x8x64xi8>)";
    for part in [
        "stablehlo.custom_call @__gpu$xla.gpu.triton(",
        "num_warps = 4 : i32",
        "grid_x = 4 : i32",
        call,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

/// How diffusion transformers are told the time: a norm without weights, that `scale` multiplies, one number for each feature of each
/// batch entry, `[batch, features]` or `[batch, 1, features]`. Also the same once more, where `twice`.
fn modulated([batch, rows, features]: [usize; 3], scale: &[usize], twice: bool) -> Graph {
    let b = Builder::new();
    let input =
        |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::F32, dims), &[]).unwrap();
    let x = input("x", &[batch, rows, features]);
    let dims = b.dims(x);
    let along: &[usize] = if scale.len() == 2 {
        &[0, 2]
    } else {
        &[0, 1, 2]
    };
    let scale = input("scale", scale);
    let scale = b.broadcast_in_dim(scale, along, &dims).unwrap();
    let norm = || {
        let y = plain_layer_norm(&b, x, 1e-6, of(DType::F32)).unwrap();
        b.mul(y, scale).unwrap()
    };
    let y = norm();
    let y = if twice { b.add(y, norm()).unwrap() } else { y };
    b.output("y", y, None).unwrap();
    b.finish()
}

#[test]
fn what_rows_of_a_batch_entry_share_is_read_by_each() {
    for (dims, scale, twice) in [
        ([3, 4, 128], &[3, 128][..], false),
        ([2, 6, 192], &[2, 1, 192], true),
        ([5, 1, 64], &[5, 64], false),
        ([2, 4, 64], &[1, 1, 64], false),
    ] {
        let [plain, kernels] = fused(&modulated(dims, scale, twice));
        assert_eq!(calls(&kernels), 1, "{dims:?}");
        let live = kernels.nodes.iter().zip(kernels.live_nodes());
        let nodes = live.filter(|(node, live)| *live && !matches!(node.op, Op::Parameter(_)));
        assert_eq!(nodes.count(), 1, "{dims:?}");
        let error = distance(&plain, &kernels);
        assert!(error <= 1e-6, "{dims:?}: {error}");
    }
}

/// The sum of each row, spread over it, by `columns` columns; what comes of it goes through another product back to the rows.
fn around_a_product(columns: usize) -> Graph {
    let b = Builder::new();
    let x = b
        .input("x", Shape::new(DType::F32, [8, columns]), &[])
        .unwrap();
    let w = b
        .input("w", Shape::new(DType::F32, [columns, columns]), &[])
        .unwrap();
    let spread = |x: Tensor| {
        let sum = b.reduce(Reduction::Max, x, &[1]).unwrap();
        b.broadcast_in_dim(sum, &[0], &[8, columns]).unwrap()
    };
    let y = b.sub(x, spread(x)).unwrap();
    let dims = DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![0],
        ..DotDims::default()
    };
    let product = b.dot_general(y, w, dims, DType::F32).unwrap();
    let z = b.push(Op::Binary(Binary::Add), &[y, product]).unwrap();
    let z = b.sub(z, spread(z)).unwrap();
    b.output("z", z, None).unwrap();
    b.finish()
}

#[test]
fn a_kernel_waits_for_nothing_that_waits_for_it() {
    let graph = around_a_product(64);
    let kernels = fuse(&graph).unwrap();
    assert_eq!(calls(&kernels), 2);
    assert!(distance(&graph, &kernels) <= 1e-6);
}

#[test]
fn rows_of_other_widths_stay_the_compilers() {
    // No multiple of 64, five pieces, more than the registers hold, and more elements than 32 bits count.
    for (rows, columns) in [(2, 40), (2, 64 * 31), (2, 32_768), (1 << 25, 64)] {
        let b = Builder::new();
        let shape = Shape::new(DType::F32, [rows, columns]);
        let x = b.input("x", shape, &[]).unwrap();
        let sum = b.reduce(Reduction::Sum, x, &[1]).unwrap();
        let y = b
            .sub(x, b.broadcast_in_dim(sum, &[0], &[rows, columns]).unwrap())
            .unwrap();
        b.output("y", y, None).unwrap();
        assert_eq!(calls(&fuse(&b.finish()).unwrap()), 0, "{columns}");
    }
}

/// Every function of a kernel, of rows and of what they are made into.
fn every_operation() -> Graph {
    let b = Builder::new();
    let dims = [8, 192];
    let x = b.input("x", Shape::new(DType::F32, dims), &[]).unwrap();
    let spread = |x: Tensor| b.broadcast_in_dim(x, &[0], &dims).unwrap();
    let mut y = x;
    for kind in [Reduction::Sum, Reduction::Max, Reduction::Min] {
        let found = b.reduce(kind, y, &[1]).unwrap();
        y = b.sub(y, spread(found)).unwrap();
    }
    let positive = b.add_scalar(b.abs(y).unwrap(), 1.0).unwrap();
    for kind in [
        Unary::Rsqrt,
        Unary::Sqrt,
        Unary::Exp,
        Unary::Tanh,
        Unary::Erf,
        Unary::Neg,
    ] {
        y = b.add(y, b.unary(kind, positive).unwrap()).unwrap();
    }
    let y = b
        .min(b.div(y, positive).unwrap(), b.max(x, positive).unwrap())
        .unwrap();
    for kind in [
        Comparison::Eq,
        Comparison::Ne,
        Comparison::Lt,
        Comparison::Le,
        Comparison::Gt,
        Comparison::Ge,
    ] {
        let y = b.select(b.compare(kind, x, y).unwrap(), x, y).unwrap();
        let rounded = b
            .unary(Unary::RoundNearestEven, b.clamp(y, -127.0, 127.0).unwrap())
            .unwrap();
        for dtype in [DType::S8, DType::BF16, DType::F8E4M3Fn, DType::F8E5M2] {
            let y = b.convert(rounded, dtype).unwrap();
            b.output(&format!("{kind:?}{dtype}"), y, None).unwrap();
        }
    }
    b.finish()
}

#[test]
fn xlas_compiler_for_gpus_takes_every_kernel() {
    let accelerator = Accelerator::lookup("h100").unwrap();
    let compile = compiler_for_one(&accelerator).unwrap_or_else(|error| panic!("{error}"));
    for (graph, count) in [
        (block([2, 6, 320], DType::F32, false), 1),
        (block([2, 8, 64], DType::BF16, true), 6),
        (modulated([2, 6, 192], &[2, 1, 192], true), 1),
        (every_operation(), 1),
    ] {
        let [_, kernels] = fused(&graph);
        assert_eq!(calls(&kernels), count);
        let text = stablehlo(&kernels, "rows", &EmitOptions::default());
        compile(&text).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The CPU's compiler knows nothing of Triton.
#[test]
fn a_program_whose_kernels_the_compiler_refuses_is_compiled_without_them() {
    let graph = block([2, 6, 320], DType::F32, false);
    let [plain, kernels] = fused(&graph);
    let again = kernels.without_calls().unwrap().unwrap();
    assert_eq!(calls(&again), 0);
    assert!(plain.without_calls().unwrap().is_none());
    assert!(distance(&plain, &again) <= 1e-12);
    let inputs = inputs(&graph);
    let session = cpu_session(1);
    let [expected, found] = [&plain, &kernels].map(|graph| run_on(&session, graph, &inputs));
    assert_eq!(expected, found);
}

/// Attention in int8 whose queries are products of one input, and keys and values of another or of the same.
fn attention_in_int8(same: bool) -> Graph {
    let b = Builder::new();
    let input = |name: &str| {
        let shape = Shape::new(DType::BF16, [2, 16, 64]);
        b.input(name, shape, &[]).unwrap()
    };
    let x = input("x");
    let of = if same { x } else { input("text") };
    let m = b.root("m");
    let qkv = [("q", x), ("k", of), ("v", of)].map(|(name, x)| {
        let layer = Linear::new(128, "embed", "heads").without_bias();
        linear(&m.scope(name), x, layer, BF16).unwrap()
    });
    let layer = Attention {
        heads: 2,
        causal: false,
    };
    let y = attention(&m, qkv, layer, BF16).unwrap();
    b.output("y", y, None).unwrap();
    lowered(b, true)
}

#[test]
fn queries_keys_and_values_of_the_same_rows_are_one_product() {
    for (same, products) in [(true, 1), (false, 3)] {
        let graph = attention_in_int8(same);
        let claimed = claim(&graph, None, 1).unwrap();
        let is_product = |kind: &Composite| matches!(kind, Composite::ScaledContraction { .. });
        let nodes = claimed.nodes.iter().zip(claimed.live_nodes());
        let live = nodes.filter(|(node, live)| {
            *live && matches!(&node.op, Op::Composite { kind, .. } if is_product(kind))
        });
        assert_eq!(live.count(), products);
        // Several devices have parts of the weights.
        assert_eq!(claim(&graph, None, 2).unwrap(), graph);
        let error = distance(&graph, &claimed);
        assert!(error <= 1e-12, "{error}");
    }
}
