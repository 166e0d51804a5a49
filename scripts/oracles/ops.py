"""Values and vector-Jacobian products of single operations, from JAX.

Usage: python ops.py

Writes tests/golden/ops.safetensors. For each case of the metadata, whose `op` is StableHLO's name and whose `attributes`
are StableHLO's with its names:
  in/<case>/<i>: the operands; in/<case>/cotangent
  out/<case>: the result; grad/<case>/<i>: the VJP for each float operand that has one
Operands are float32 (or int32 indices); values are computed in float64 and rounded once, so that only the error of what
is tested is seen. Cases of `convert` and of rounding are exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from common import GOLDEN, normal, rng, write

jax.config.update("jax_enable_x64", True)

CASES = {}  # name -> (op, attributes, operands, function)


def case(name, op, attributes, operands, fn):
    assert name not in CASES, name
    CASES[name] = (op, attributes, [np.asarray(o) for o in operands], fn)


def values(name, *shapes, scale=1.0):
    gen = rng("ops", name)
    return [normal(gen, s, scale=scale) for s in shapes]


# --- convolution -----------------------------------------------------------------------------------------------------

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def convolution(name, lhs, rhs, layout=NHWC, strides=(1, 1), padding=((0, 0), (0, 0)), lhs_dilation=None,
                rhs_dilation=None, groups=1, batch_groups=1):
    ones = (1,) * (len(lhs) - 2)
    attributes = {"layout": layout, "window_strides": strides, "padding": padding,
                  "lhs_dilation": lhs_dilation or ones, "rhs_dilation": rhs_dilation or ones,
                  "feature_group_count": groups, "batch_group_count": batch_groups}
    case(name, "convolution", attributes, values(name, lhs, rhs),
         lambda a, b: lax.conv_general_dilated(a, b, strides, padding, lhs_dilation, rhs_dilation, layout, groups,
                                               batch_groups))


SAME = ((1, 1), (1, 1))
convolution("conv_same", (2, 5, 6, 3), (3, 3, 3, 4), padding=SAME)
convolution("conv_valid", (1, 5, 4, 2), (3, 2, 2, 3))
convolution("conv_1x1", (2, 4, 3, 5), (1, 1, 5, 4))
convolution("conv_stride2", (2, 8, 6, 3), (3, 3, 3, 4), strides=(2, 2), padding=SAME)
convolution("conv_stride2_odd", (1, 7, 5, 2), (3, 3, 2, 2), strides=(2, 2), padding=((0, 1), (1, 0)))
convolution("conv_stride_uneven", (1, 9, 8, 2), (3, 2, 2, 2), strides=(3, 2), padding=((2, 0), (0, 1)))
convolution("conv_negative_padding", (1, 7, 7, 2), (3, 3, 2, 2), padding=((-1, 1), (0, -2)))
convolution("conv_lhs_dilation", (1, 4, 3, 2), (3, 3, 2, 3), padding=SAME, lhs_dilation=(2, 3))
convolution("conv_rhs_dilation", (1, 8, 7, 2), (3, 3, 2, 3), padding=((2, 2), (1, 1)), rhs_dilation=(2, 2))
convolution("conv_all", (2, 6, 5, 4), (3, 2, 2, 6), strides=(2, 1), padding=((2, 1), (1, 2)), lhs_dilation=(2, 1),
            rhs_dilation=(1, 2), groups=2)
convolution("conv_groups", (2, 5, 5, 6), (3, 3, 2, 9), padding=SAME, groups=3)
convolution("conv_depthwise", (1, 5, 4, 4), (3, 3, 1, 4), padding=SAME, groups=4)
convolution("conv_batch_groups", (4, 4, 4, 3), (3, 3, 3, 6), padding=SAME, batch_groups=2)
convolution("conv_nchw", (2, 3, 5, 6), (4, 3, 3, 3), layout=NCHW, padding=SAME)
convolution("conv_1d", (2, 7, 3), (3, 3, 4), layout=("NWC", "WIO", "NWC"), strides=(2,), padding=((1, 1),))
convolution("conv_3d", (1, 3, 4, 3, 2), (2, 3, 2, 2, 3), layout=("NDHWC", "DHWIO", "NDHWC"), strides=(1, 2, 1),
            padding=((0, 1), (1, 1), (1, 0)))

# --- dot_general -----------------------------------------------------------------------------------------------------


def dot_general(name, lhs, rhs, contracting, batch=((), ())):
    dims = (contracting, batch)
    attributes = {"lhs_contracting_dimensions": contracting[0], "rhs_contracting_dimensions": contracting[1],
                  "lhs_batching_dimensions": batch[0], "rhs_batching_dimensions": batch[1]}
    case(name, "dot_general", attributes, values(name, lhs, rhs), lambda a, b: lax.dot_general(a, b, dims))


dot_general("dot_matrix", (3, 5), (5, 4), ((1,), (0,)))
dot_general("dot_transposed", (5, 3), (4, 5), ((0,), (1,)))
dot_general("dot_dense", (2, 3, 5), (5, 4), ((2,), (0,)))
dot_general("dot_vector", (5,), (5,), ((0,), (0,)))
dot_general("dot_outer", (3,), (4,), ((), ()))
dot_general("dot_two_contracting", (2, 3, 4), (3, 5, 2), ((0, 1), (2, 0)))
dot_general("dot_batch", (2, 3, 4, 5), (2, 3, 6, 5), ((3,), (3,)), ((0, 1), (0, 1)))
dot_general("dot_batch_inner", (4, 2, 5, 3), (3, 5, 6, 2), ((2,), (1,)), ((1, 3), (3, 0)))
dot_general("dot_batch_two_contracting", (2, 3, 4, 5), (5, 2, 3, 6), ((1, 3), (2, 0)), ((0,), (1,)))

# --- gather and scatter ----------------------------------------------------------------------------------------------


def gather(name, operand, indices, slice_sizes, offset, collapsed, start_map, operand_batch=(), index_batch=(),
           mode="clip"):
    dnums = lax.GatherDimensionNumbers(offset, collapsed, start_map, operand_batch, index_batch)
    indices = np.asarray(indices, np.int32)
    attributes = {"offset_dims": offset, "collapsed_slice_dims": collapsed, "start_index_map": start_map,
                  "operand_batching_dims": operand_batch, "start_indices_batching_dims": index_batch,
                  "index_vector_dim": indices.ndim - 1, "slice_sizes": slice_sizes}
    case(name, "gather", attributes, [*values(name, operand), indices],
         lambda a, i: lax.gather(a, i, dnums, slice_sizes, mode=mode))


# StableHLO's own semantics for an index out of bounds is to clamp it: mode "clip".
gather("gather_rows", (6, 4), [[0], [5], [2], [2]], (1, 4), (1,), (0,), (0,))
gather("gather_rows_2d_indices", (6, 4), [[[1], [0]], [[5], [5]], [[3], [1]]], (1, 4), (2,), (0,), (0,))
gather("gather_out_of_bounds", (6, 4), [[-3], [5], [9], [0]], (1, 4), (1,), (0,), (0,))
gather("gather_elements", (3, 4), [[0, 3], [2, 1], [2, 1]], (1, 1), (), (0, 1), (0, 1))
gather("gather_windows", (6, 5), [[1, 0], [4, 3], [5, 4]], (2, 3), (1, 2), (), (0, 1))
gather("gather_batched", (3, 5, 2), [[[0], [4]], [[1], [1]], [[3], [2]]], (1, 1, 2), (2,), (1,), (1,), (0,), (0,))
gather("gather_column", (4, 6), [[2], [0], [5]], (4, 1), (0,), (1,), (1,))


def scatter(name, operand, indices, updates, window, inserted, scatter_map, operand_batch=(), index_batch=(),
            combine="add"):
    dnums = lax.ScatterDimensionNumbers(window, inserted, scatter_map, operand_batch, index_batch)
    indices = np.asarray(indices, np.int32)
    attributes = {"update_window_dims": window, "inserted_window_dims": inserted,
                  "scatter_dims_to_operand_dims": scatter_map, "input_batching_dims": operand_batch,
                  "scatter_indices_batching_dims": index_batch, "index_vector_dim": indices.ndim - 1,
                  "computation": combine, "unique_indices": combine == "replace"}
    fn = {"add": lax.scatter_add, "replace": lax.scatter}[combine]
    a, u = values(name, operand, updates)
    case(name, "scatter", attributes, [a, indices, u],
         lambda a, i, u: fn(a, i, u, dnums, unique_indices=combine == "replace", mode="drop"))


# An update whose window is out of bounds is dropped: StableHLO's semantics and JAX's mode "drop".
scatter("scatter_add_rows", (6, 4), [[0], [5], [2], [2]], (4, 4), (1,), (0,), (0,))
scatter("scatter_add_out_of_bounds", (6, 4), [[-1], [5], [6], [2]], (4, 4), (1,), (0,), (0,))
scatter("scatter_add_elements", (3, 4), [[0, 3], [2, 1], [2, 1]], (3,), (), (0, 1), (0, 1))
scatter("scatter_add_windows", (6, 5), [[1, 0], [4, 2], [5, 4]], (3, 2, 3), (1, 2), (), (0, 1))
scatter("scatter_add_batched", (3, 5, 2), [[[0], [4]], [[1], [1]], [[3], [2]]], (3, 2, 2), (2,), (1,), (1,), (0,), (0,))
scatter("scatter_replace_rows", (6, 4), [[0], [5], [2]], (3, 4), (1,), (0,), (0,), combine="replace")

# --- reduce ----------------------------------------------------------------------------------------------------------

REDUCERS = {"add": jnp.sum, "maximum": jnp.max, "minimum": jnp.min, "multiply": jnp.prod}
for reducer, fn in REDUCERS.items():
    for axes in ((0,), (1, 2), (0, 1, 2)):
        name = f"reduce_{reducer}_" + "".join(map(str, axes))
        case(name, "reduce", {"computation": reducer, "dimensions": axes}, values(name, (3, 4, 2)),
             lambda a, fn=fn, axes=axes: fn(a, axis=axes))
# JAX shares the cotangent of a maximum equally among ties.
case("reduce_maximum_ties", "reduce", {"computation": "maximum", "dimensions": (1,)},
     [np.array([[1, 3, 3, 0], [2, 2, 2, 2]], np.float32)], lambda a: jnp.max(a, axis=1))


def reduce_window(name, shape, computation, window, strides, padding):
    # A JAX primitive with a derivative is chosen only for the plain reducers, which pass Python's initial value.
    init, fn = {"add": (0.0, lax.add), "maximum": (-np.inf, lax.max)}[computation]
    case(name, "reduce_window",
         {"computation": computation, "window_dimensions": window, "window_strides": strides, "padding": padding},
         values(name, shape), lambda a: lax.reduce_window(a, init, fn, window, strides, padding))


reduce_window("max_pool", (1, 6, 5, 2), "maximum", (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0), (0, 0), (0, 1), (0, 0)))
reduce_window("sum_pool", (1, 6, 5, 2), "add", (1, 3, 3, 1), (1, 2, 1, 1), ((0, 0), (1, 1), (1, 0), (0, 0)))

# --- shapes ----------------------------------------------------------------------------------------------------------

for name, config in {"pad_plain": ((1, 2, 0), (0, 0, 0)), "pad_interior": ((0, 1, 2), (2, 0, 1)),
                     "pad_negative": ((-1, 2, 0), (1, -2, 0)), "pad_negative_interior": ((-2, -1, 1), (0, -1, 2))}.items():
    low, high, interior = zip(*config)
    case(name, "pad", {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": interior},
         [*values(name, (4, 5)), np.float32(1.5)], lambda a, v, config=config: lax.pad(a, v, config))
case("slice_strided", "slice", {"start_indices": (1, 0), "limit_indices": (6, 5), "strides": (2, 3)},
     values("slice_strided", (7, 5)), lambda a: lax.slice(a, (1, 0), (6, 5), (2, 3)))
for name, start in {"dynamic_slice": (1, 2), "dynamic_slice_clamped": (9, -4)}.items():
    case(name, "dynamic_slice", {"slice_sizes": (2, 3)}, [*values(name, (5, 6)), *map(np.int32, start)],
         lambda a, i, j: lax.dynamic_slice(a, (i, j), (2, 3)))
for name, start in {"dynamic_update_slice": (1, 2), "dynamic_update_slice_clamped": (9, -4)}.items():
    case(name, "dynamic_update_slice", {}, [*values(name, (5, 6), (2, 3)), *map(np.int32, start)],
         lambda a, u, i, j: lax.dynamic_update_slice(a, u, (i, j)))
case("concatenate", "concatenate", {"dimension": 1}, values("concatenate", (2, 3), (2, 1), (2, 4)),
     lambda *a: lax.concatenate(a, 1))
case("reverse", "reverse", {"dimensions": (0, 2)}, values("reverse", (2, 3, 4)), lambda a: lax.rev(a, (0, 2)))
case("transpose", "transpose", {"permutation": (2, 0, 1)}, values("transpose", (2, 3, 4)),
     lambda a: lax.transpose(a, (2, 0, 1)))
case("broadcast_in_dim", "broadcast_in_dim", {"broadcast_dimensions": (0, 2), "shape": (3, 2, 4)},
     values("broadcast_in_dim", (3, 1)), lambda a: lax.broadcast_in_dim(a, (3, 2, 4), (0, 2)))
case("select", "select", {}, [rng("select").random((3, 4)) < 0.5, *values("select", (3, 4), (3, 4))], lax.select)
case("clamp", "clamp", {}, [np.float32(-0.5), np.array([-2, -0.4, 0, 0.4, 0.6, 3], np.float32), np.float32(0.7)],
     lambda lo, x, hi: lax.clamp(jnp.broadcast_to(lo, x.shape), x, jnp.broadcast_to(hi, x.shape)))

# --- elementwise -----------------------------------------------------------------------------------------------------

POINTS = np.array([-30, -4, -3.2, -1.5, -1, -0.6, -0.3, -1e-3, -1e-7, 1e-7, 1e-3, 0.2, 0.5, 0.9, 1, 1.3, 2.7, 3.9, 5, 30],
                  np.float32)
POSITIVE = np.abs(POINTS[POINTS > 0])
UNARY = {"abs": jnp.abs, "negate": jnp.negative, "tanh": jnp.tanh, "logistic": jax.nn.sigmoid, "sine": jnp.sin,
         "cosine": jnp.cos, "sign": jnp.sign, "exponential": jnp.exp, "exponential_minus_one": jnp.expm1,
         "erf": lax.erf}
for op, fn in UNARY.items():
    case(op, op, {}, [POINTS if op != "exponential" else np.clip(POINTS, -20, 20)], fn)
for op, fn in {"log": jnp.log, "log_plus_one": jnp.log1p, "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "cbrt": jnp.cbrt}.items():
    case(op, op, {}, [POSITIVE], fn)
BINARY = {"add": jnp.add, "subtract": jnp.subtract, "multiply": jnp.multiply, "divide": jnp.divide,
          "maximum": jnp.maximum, "minimum": jnp.minimum, "atan2": jnp.arctan2}
for op, fn in BINARY.items():
    case(op, op, {}, values(op, (4, 5), (4, 5)), fn)
case("maximum_ties", "maximum", {}, [np.array([1, 2, 3], np.float32), np.array([1, 3, 2], np.float32)], jnp.maximum)
case("power", "power", {}, [POSITIVE[2:-1], *values("power", POSITIVE[2:-1].shape)], jnp.power)
case("remainder", "remainder", {}, [np.array([5.5, -5.5, 5.5, -5.5, 0.3], np.float32),
                                    np.array([2, 2, -2, -2, 7], np.float32)], lax.rem)
HALVES = np.array([-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 127.5, -127.5, 8388607.5, 1e20], np.float32)
case("floor", "floor", {}, [HALVES], jnp.floor)
case("ceil", "ceil", {}, [HALVES], jnp.ceil)
case("round_nearest_even", "round_nearest_even", {}, [HALVES], jnp.round)

# --- compositions that models are built of ---------------------------------------------------------------------------

case("softmax", "composition", {"name": "softmax", "axis": -1}, [values("softmax", (3, 7), scale=4.0)[0]],
     lambda a: jax.nn.softmax(a, axis=-1))
case("silu", "composition", {"name": "silu"}, [POINTS], jax.nn.silu)
case("gelu", "composition", {"name": "gelu"}, [POINTS], lambda a: jax.nn.gelu(a, approximate=False))
case("gelu_tanh", "composition", {"name": "gelu_tanh"}, [POINTS], lambda a: jax.nn.gelu(a, approximate=True))
case("quick_gelu", "composition", {"name": "quick_gelu"}, [POINTS], lambda a: a * jax.nn.sigmoid(1.702 * a))


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def group_norm(x, scale, bias):
    """NHWC, groups of adjacent channels."""
    n, h, w, c = x.shape
    grouped = x.reshape(n, h, w, 3, c // 3)
    centred = grouped - grouped.mean((1, 2, 4), keepdims=True)
    normed = centred * lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return normed.reshape(x.shape) * scale + bias


case("layer_norm", "composition", {"name": "layer_norm", "epsilon": 1e-5},
     values("layer_norm", (3, 4, 8), (8,), (8,)), layer_norm)
case("group_norm", "composition", {"name": "group_norm", "groups": 3, "epsilon": 1e-5, "layout": "NHWC"},
     values("group_norm", (2, 3, 4, 6), (6,), (6,)), group_norm)

# --- convert ---------------------------------------------------------------------------------------------------------

EDGES = np.array([0, -0.0, 0.5, 1.5, -1.5, 2.5, 126.9, 127.4, 128, 200, -127.9, -128.9, -1000, 1e10, -1e10, 3.1415927,
                  1.00390625, 1.01171875, 65504, 1e-40], np.float32)
for target in ("int8", "int32", "bfloat16", "float16"):
    case(f"convert_f32_{target}", "convert", {"to": target}, [EDGES],
         lambda a, target=target: lax.convert_element_type(a, jnp.dtype(target)))


def main():
    tensors, cases = {}, {}
    for name, (op, attributes, operands, fn) in CASES.items():
        exact = op == "convert"
        wide = [jnp.asarray(o if exact or o.dtype != np.float32 else o.astype(np.float64)) for o in operands]
        floats = [] if exact else [i for i, o in enumerate(operands) if o.dtype == np.float32]
        held = lambda *args: fn(*[args[floats.index(i)] if i in floats else w for i, w in enumerate(wide)])
        out, vjp = jax.vjp(held, *(wide[i] for i in floats)) if floats else (fn(*wide), None)
        tensors |= {f"in/{name}/{i}": o for i, o in enumerate(operands)}
        tensors[f"out/{name}"] = np.asarray(out).astype(np.float32) if out.dtype == jnp.float64 else np.asarray(out)
        if vjp:
            cotangent = normal(rng("cotangent", name), out.shape)
            tensors[f"in/{name}/cotangent"] = cotangent
            for i, g in zip(floats, vjp(jnp.asarray(cotangent, jnp.float64))):
                tensors[f"grad/{name}/{i}"] = np.asarray(g).astype(np.float32)
        cases[name] = {"op": op, "attributes": attributes, "operands": len(operands)}
        bad = [k for k, v in tensors.items() if k.split("/")[1] == name and not np.all(np.isfinite(v.astype(np.float64)))]
        assert exact or not bad, bad
    print(len(cases), "cases")
    write(GOLDEN / "ops.safetensors", tensors, {"cases": cases, "versions": {"jax": jax.__version__}})


if __name__ == "__main__":
    main()
