"""Golden vectors of Qwix's fp8 (tests/golden/quant_qwix_fp8.safetensors): MaxDiffusion's `fp8` and `fp8_full`.

Usage: python quant_fp8.py

`fp8`: operands in float8_e4m3fn, a scale a channel; the derivative multiplies the operands as they were.
`fp8_full`: one scale an operand, and the derivative multiplies float8_e5m2 gradients by the quantized operands.
Every value is that of one XLA program op by op, as in quant.py; floats of 8 bits are recorded as the float32 they are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from qwix._src.core import conv_general, dot_general

from common import GOLDEN, write
from quant import CONVS, DOTS, DTYPES, NHWC, Conv, Dot, conv_operands, dot_operands, qwix_quantized

E4M3 = jnp.float8_e4m3fn
RULE = functools.partial(qwix.QtRule, module_path=".*", weight_qtype=E4M3, act_qtype=E4M3,
                         op_names=("dot_general", "einsum", "conv_general_dilated"))
RULES = {
    "fp8": RULE(),
    "fp8_full": RULE(bwd_qtype=jnp.float8_e5m2, disable_channelwise_axes=True),
}


def numbers(x):
    """What 8-bit floats are; other types as they are."""
    return np.asarray(x.astype(jnp.float32)) if x.dtype == E4M3 else x


def record(tensors, key, rule, module, operands, hows, with_gradients):
    lhs, rhs, g = operands
    model = qwix.quantize_model(module, qwix.QtProvider([rule]))
    variables = model.init(jax.random.PRNGKey(0), lhs, rhs)

    def apply(a, b):
        return model.apply({"params": {"kernel": b}} if "params" in variables else {}, a, b)

    fwd, vjp = jax.vjp(apply, lhs, rhs)
    tensors |= {f"in/{key}/lhs": lhs, f"in/{key}/rhs": rhs, f"in/{key}/g": g, f"out/{key}/fwd": fwd}
    if with_gradients:
        tensors[f"out/{key}/dlhs"], tensors[f"out/{key}/drhs"] = vjp(g)
    for name, x, how in zip(("lhs", "rhs"), (lhs, rhs), hows):
        q, scale = qwix_quantized(x, how)
        tensors[f"out/{key}/fwd_{name}_q"], tensors[f"out/{key}/fwd_{name}_scale"] = numbers(q), scale


def how_to(rule, how):
    """With the rule's type, and no channels of their own where it has none."""
    channels = () if rule.disable_channelwise_axes else how.channelwise_axes
    return type(how)(qtype=E4M3, channelwise_axes=channels, tiled_axes=how.tiled_axes)


def main():
    tensors, cases = {}, {}
    for mode, rule in RULES.items():
        for dname, dtype in DTYPES.items():
            for case, (_, _, dims, _) in DOTS.items():
                operands = dot_operands(case, dtype)
                ndims = operands[0].ndim, operands[1].ndim
                hows = [how_to(rule, dot_general.get_how_to_quantize(
                    dimension_numbers=dims, ndims=ndims, for_lhs=for_lhs, tile_size=None, qtype=E4M3))
                    for for_lhs in (True, False)]
                key = f"{mode}_{case}_{dname}"
                record(tensors, key, rule, Dot(dims, case != "scores"), operands, hows, True)
                cases[key] = {"op": "dot_general", "mode": mode, "dimension_numbers": dims}
            for case, (_, _, kwargs) in CONVS.items():
                _, lhs, rhs = conv_operands(case, dtype)
                run = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=NHWC, **kwargs)
                g = jnp.zeros(jax.eval_shape(run, lhs, rhs).shape, dtype)
                dnums = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, NHWC)
                hows = [how_to(rule, conv_general.get_how_to_quantize(
                    dimension_numbers=dnums, for_lhs=for_lhs, qtype=E4M3)) for for_lhs in (True, False)]
                key = f"{mode}_{case}_{dname}"
                # The program leaves derivatives of convolutions in float.
                record(tensors, key, rule, Conv(tuple(kwargs.items())), (lhs, rhs, g), hows, False)
                cases[key] = {"op": "conv_general_dilated", "mode": mode, **kwargs}
    versions = {"jax": jax.__version__, "qwix": "0.1.8"}
    write(GOLDEN / "quant_qwix_fp8.safetensors", tensors, {"cases": cases, "versions": versions})


if __name__ == "__main__":
    main()
