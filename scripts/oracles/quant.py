"""Golden vectors of int8 training arithmetic: AQT (tests/golden/quant_aqt.safetensors) and Qwix (quant_qwix.safetensors).

Usage: python quant.py

Every value exists twice:
  `eager`: op by op. Each primitive is compiled alone, so each bf16 step rounds.
  `jit`:   one XLA program, which may keep f32 between bf16 steps.
In both XLA rewrites absmax/127.5 into absmax*(1/127.5); `reciprocal_rewrite` in the metadata says how often that matters.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from aqt.jax.v2 import aqt_dot_general
from aqt.jax.v2 import config as aqt_config
from aqt.jax.v2 import utils as aqt_utils
from flax import linen as nn
import qwix
from qwix._src.core import conv_general, dot_general, qarray
from qwix._src.core import einsum as qwix_einsum

from common import GOLDEN, normal, rng, write

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
SHARD_COUNTS = (0, 1, 2, 4)

# name -> (lhs shape, rhs shape, dot_general dimension numbers, what is put into the operands)
DOTS = {
    "dense": ((4, 6, 16), (16, 12), (((2,), (0,)), ((), ())), "normal"),
    "special": ((4, 8, 32), (32, 16), (((2,), (0,)), ((), ())), "special"),
    "matrix": ((8, 40), (40, 24), (((1,), (0,)), ((), ())), "normal"),
    "scores": ((2, 3, 8, 16), (2, 3, 12, 16), (((3,), (3,)), ((0, 1), (0, 1))), "normal"),
}


def dot_operands(case: str, dtype):
    """Operands and incoming gradient. `special` has zero rows and columns, exact ties, outliers and tiny values."""
    lhs_shape, rhs_shape, dims, kind = DOTS[case]
    gen = rng("quant", case)
    lhs, rhs = normal(gen, lhs_shape), normal(gen, rhs_shape, scale=0.25)
    out = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=dims), lhs, rhs)
    g = normal(gen, out.shape, scale=1e-3)
    if kind == "special":
        half = (gen.integers(-127, 127, lhs_shape[-1]) + 0.5).astype(np.float32)
        lhs[0, 0] = 0.0  # absmax 0
        lhs[0, 1] = half
        lhs[0, 1, 0] = 127.5  # scale exactly 1: every entry is a tie
        lhs[0, 2] = half / 64
        lhs[0, 2, 3] = -127.5 / 64  # the same at scale 2^-6, absmax negative
        lhs[1, :, 5] *= 300.0  # outlier channel
        lhs[2, 0] = 1e-30  # tiny but not zero
        lhs[2, 1] = 1e-42  # subnormal
        lhs[2, 2] = -0.0
        rhs[:, 0] = 0.0
        rhs[:, 1] = (gen.integers(-127, 127, rhs_shape[0]) + 0.5) / 256
        rhs[7, 1] = 127.5 / 256
        rhs[3, :] *= 100.0
        g[0, 0] = 0.0
        g[:, :, 2] = 0.0
        g[1, :, 4] *= 1000.0
        g[3, 1, :] = (gen.integers(-127, 127, rhs_shape[1]) + 0.5) / 1024
        g[3, 1, 0] = 127.5 / 1024
    return tuple(jnp.asarray(x.astype(dtype)) for x in (lhs, rhs, g))


# --- AQT -------------------------------------------------------------------------------------------------------------


@aqt_utils.flax_slots_kw_only_dataclass
class RecordedNoise:
    """Stands in for AQT's random noise: the array is a recorded input."""

    noise: jnp.ndarray

    def __call__(self, shape, key):
        del key
        assert tuple(shape) == self.noise.shape, (shape, self.noise.shape)
        return self.noise


def aqt_int8(shards: int) -> aqt_dot_general.DotGeneral:
    """The configuration MaxDiffusion's `quantization=int8` asks for. Zero shards leave drhs in float."""
    if shards == 0:
        return aqt_config.config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=None, rng_type="jax.uniform",
                                    fwd_accumulator_dtype=jnp.int32, dlhs_accumulator_dtype=jnp.int32,
                                    drhs_accumulator_dtype=None)
    return aqt_config.config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=8, rng_type="jax.uniform",
                                drhs_local_aqt=aqt_dot_general.LocalAqt(contraction_axis_shard_count=shards),
                                fwd_accumulator_dtype=jnp.int32, dlhs_accumulator_dtype=jnp.int32,
                                drhs_accumulator_dtype=jnp.int32)


def with_noise(cfg, noise_dlhs, noise_drhs):
    """Replaces the noise of the incoming gradient; None rounds it to nearest."""
    cfg.dlhs.dg_quantizer.lhs.numerics.noise_fn = None if noise_dlhs is None else RecordedNoise(noise=noise_dlhs)
    if cfg.drhs.local_aqt is not None:
        cfg.drhs.dg_quantizer.lhs.numerics.noise_fn = None if noise_drhs is None else RecordedNoise(noise=noise_drhs)
    return aqt_config.set_context(cfg, jax.random.PRNGKey(0), train_step=None)


def backward_dims(dims, lhs, rhs, g, y_is_lhs):
    y = lhs if y_is_lhs else rhs
    return aqt_dot_general._update_dimension_numbers_for_backward(dims, y_is_lhs, g.ndim, y.ndim)


def quantized(raw, lhs, rhs, dims, prefix, names):
    """The int8 tensors and scales of one raw dot_general, after the contraction is split for local AQT."""
    if raw.local_aqt is not None:
        lhs, rhs, dims = aqt_dot_general._apply_local_aqt(raw.local_aqt, lhs, rhs, dims)
    raw.dg_quantizer.init_calibration()
    (lq, _), (rq, _) = aqt_dot_general.quant(lhs, rhs, None, None, raw.dg_quantizer, raw.lhs, raw.rhs, dims, False)
    return {
        f"{prefix}_{names[0]}_q": lq.qvalue, f"{prefix}_{names[0]}_scale": lq.scale[0],
        f"{prefix}_{names[1]}_q": rq.qvalue, f"{prefix}_{names[1]}_scale": rq.scale[0],
    }


def aqt_values(lhs, rhs, g, noise_dlhs, noise_drhs, dims, shards, parts):
    """Everything AQT computes for one dot. `parts` names what is returned: fwd, dlhs, drhs."""
    cfg = with_noise(aqt_int8(shards), noise_dlhs, noise_drhs)
    fwd, vjp = jax.vjp(lambda a, b: cfg(a, b, dims), lhs, rhs)
    dlhs, drhs = vjp(g)
    out = {}
    if "fwd" in parts:
        out["fwd"] = fwd
        out |= quantized(cfg.fwd, lhs, rhs, dims, "fwd", ("lhs", "rhs"))
    if "dlhs" in parts:
        out["dlhs"] = dlhs
        out |= quantized(cfg.dlhs, g, rhs, backward_dims(dims, lhs, rhs, g, False)[0], "dlhs", ("g", "rhs"))
    if "drhs" in parts:
        out["drhs"] = drhs
        if shards:
            out |= quantized(cfg.drhs, g, lhs, backward_dims(dims, lhs, rhs, g, True)[0], "drhs", ("g", "lhs"))
    return out


def split_gradient_shape(g, dims, lhs, rhs, shards):
    (g_ca, _), _ = backward_dims(dims, lhs, rhs, g, True)[0]
    shape = list(g.shape)
    shape[g_ca[0]] //= shards
    shape.insert(g_ca[0], shards)
    return tuple(shape)


def aqt_vectors():
    tensors, cases = {}, {}
    for case, (_, _, dims, _) in DOTS.items():
        for dname, dtype in DTYPES.items():
            lhs, rhs, g = dot_operands(case, dtype)
            key = f"{case}_{dname}"
            cases[key] = {"dimension_numbers": dims, "backward_dlhs": backward_dims(dims, lhs, rhs, g, False),
                          "backward_drhs": backward_dims(dims, lhs, rhs, g, True), "shard_counts": SHARD_COUNTS}
            tensors |= {f"in/{key}/lhs": lhs, f"in/{key}/rhs": rhs, f"in/{key}/g": g}

            def record(variant, shards, parts, noise_dlhs=None, noise_drhs=None):
                run = functools.partial(aqt_values, dims=dims, shards=shards, parts=parts)
                for how, fn in (("eager", run), ("jit", jax.jit(run))):
                    for name, value in fn(lhs, rhs, g, noise_dlhs, noise_drhs).items():
                        tensors[f"out/{key}/{how}/{variant}{name}"] = value

            gen = rng("noise", key)
            record("", 0, ("fwd", "dlhs"))
            noise_dlhs = jnp.asarray((gen.random(g.shape, np.float32) - 0.5))
            tensors[f"in/{key}/noise_dlhs"] = noise_dlhs
            record("stochastic_", 0, ("dlhs",), noise_dlhs)
            for shards in SHARD_COUNTS:
                record(f"shards{shards}_", shards, ("drhs",))
                if shards:
                    noise = jnp.asarray(gen.random(split_gradient_shape(g, dims, lhs, rhs, shards), np.float32) - 0.5)
                    tensors[f"in/{key}/shards{shards}_noise_drhs"] = noise
                    record(f"stochastic_shards{shards}_", shards, ("drhs",), noise_dlhs, noise)
    return tensors, cases


def numpy_aqt(x, axes, noise=None):
    """The recipe of README.md, `AQT`, in numpy: the int8 values and the scale of one operand."""
    dtype, wide = x.dtype, lambda a: a.astype(np.float32)
    absmax = np.max(np.abs(x), axis=axes, keepdims=True)
    absmax = np.where(absmax == 0, np.ones((), dtype), absmax)
    scale = (wide(absmax) * (np.float32(1) / np.float32(127.5))).astype(dtype)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = (np.float32(1) / wide(scale)).astype(dtype)
    inverse = np.where(np.isinf(inverse), np.ones((), dtype), inverse)
    y = (wide(x) * wide(inverse)).astype(dtype)
    if noise is not None:
        y = (wide(y) + noise).astype(dtype)
    return np.rint(np.clip(wide(y), -127, 127)).astype(np.int8), scale


def check_aqt(tensors):
    """Asserts that the recipe gives the recorded values bit for bit, op by op."""
    for case, (_, _, dims, _) in DOTS.items():
        for dname in DTYPES:
            get = lambda name: np.asarray(tensors[f"{name.split(':')[0]}/{case}_{dname}/{name.split(':')[1]}"])
            (lhs_ca, rhs_ca), _ = dims
            runs = [("lhs", lhs_ca, None, "fwd_lhs"), ("rhs", rhs_ca, None, "fwd_rhs")]
            runs += [("g", (-1,), None, "dlhs_g"), ("g", (-1,), get("in:noise_dlhs"), "stochastic_dlhs_g")]
            for operand, axes, noise, name in runs:
                q, scale = numpy_aqt(get(f"in:{operand}"), axes, noise)
                assert np.array_equal(q, get(f"out:eager/{name}_q")), (case, dname, name)
                want = get(f"out:eager/{name}_scale")
                normal = np.abs(scale.astype(np.float32)) >= np.finfo(np.float32).tiny  # XLA flushes subnormals to 0
                assert np.array_equal(np.where(normal, scale, 0), np.where(normal, want, 0)), (case, dname, name)


def reciprocal_rewrite(n=200_000):
    """How often `absmax * (1/127.5)`, which XLA makes of `absmax / 127.5`, differs from the division.

    XLA does so even for a single op outside jit, because the 127.5 is a constant of that op's program.
    """
    out = {}
    for dname, dtype in DTYPES.items():
        absmax = np.abs(rng("absmax").standard_normal(n)).astype(np.float32).astype(dtype)
        scale = lambda a: a / 127.5
        eager, jit = np.asarray(scale(jnp.asarray(absmax))), np.asarray(jax.jit(scale)(jnp.asarray(absmax)))
        wide = absmax.astype(np.float32)
        product = (wide * (np.float32(1) / np.float32(127.5))).astype(dtype)
        division = (wide / np.float32(127.5)).astype(dtype)
        out[dname] = {
            "samples": n,
            "product_differs_from_division": float(np.mean(product != division)),
            "eager_is_product": bool(np.all(eager == product)),
            "jit_is_product": bool(np.all(jit == product)),
        }
    return out


# --- Qwix ------------------------------------------------------------------------------------------------------------

INT8_RULE = qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8,
                        op_names=("dot_general", "einsum", "conv_general_dilated"))

# name -> (NHWC input, HWIO kernel, keyword arguments of conv_general_dilated)
CONVS = {
    "conv3x3": ((2, 6, 5, 8), (3, 3, 8, 12), dict(window_strides=(1, 1), padding=((1, 1), (1, 1)))),
    "conv3x3_stride2": ((2, 8, 6, 8), (3, 3, 8, 4), dict(window_strides=(2, 2), padding=((1, 1), (1, 1)))),
    "conv1x1": ((3, 4, 4, 16), (1, 1, 16, 8), dict(window_strides=(1, 1), padding=((0, 0), (0, 0)))),
    "conv3x3_groups2": ((2, 4, 4, 8), (3, 3, 4, 8),
                        dict(window_strides=(1, 1), padding=((1, 1), (1, 1)), feature_group_count=2)),
}
NHWC = ("NHWC", "HWIO", "NHWC")


def conv_operands(case: str, dtype):
    """The generator, for what follows, and both operands: an outlier channel, and an output of zeros."""
    lhs_shape, rhs_shape, _ = CONVS[case]
    gen = rng("qwix", case)
    lhs, rhs = normal(gen, lhs_shape), normal(gen, rhs_shape, scale=0.2)
    lhs[0, :, :, 1] *= 50.0
    rhs[..., 2] = 0.0
    return gen, jnp.asarray(lhs.astype(dtype)), jnp.asarray(rhs.astype(dtype))


EINSUMS = {
    "einsum_bsd_dnh": ("bsd,dnh->bsnh", (2, 5, 16), (16, 3, 8)),
    "einsum_bqhd_bkhd": ("bqhd,bkhd->bhqk", (2, 6, 3, 8), (2, 7, 3, 8)),
}


class Dot(nn.Module):
    dims: tuple
    weight: bool

    @nn.compact
    def __call__(self, lhs, rhs):
        rhs = self.param("kernel", lambda _: rhs) if self.weight else rhs
        return jax.lax.dot_general(lhs, rhs, self.dims)


class Einsum(nn.Module):
    equation: str
    weight: bool

    @nn.compact
    def __call__(self, lhs, rhs):
        rhs = self.param("kernel", lambda _: rhs) if self.weight else rhs
        return jnp.einsum(self.equation, lhs, rhs)


class Conv(nn.Module):
    kwargs: tuple

    @nn.compact
    def __call__(self, lhs, rhs):
        rhs = self.param("kernel", lambda _: rhs)
        return jax.lax.conv_general_dilated(lhs, rhs, dimension_numbers=NHWC, **dict(self.kwargs))


def through_provider(module, lhs, rhs):
    """Forward and VJP of a one-op module under QtProvider, the way MaxDiffusion applies it."""
    model = qwix.quantize_model(module, qwix.QtProvider([INT8_RULE]))
    variables = model.init(jax.random.PRNGKey(0), lhs, rhs)

    def apply(a, b):
        if "params" in variables:
            return model.apply({"params": {"kernel": b}}, a, b)
        return model.apply({}, a, b)

    return apply


def qwix_quantized(x, how):
    q = qarray.quantize(x, how)
    return q.qvalue, q.scale


def qwix_vectors():
    tensors, cases = {}, {}

    def record(key, lhs, rhs, g, module, how_lhs, how_rhs, note):
        def values(lhs, rhs, g):
            apply = through_provider(module, lhs, rhs)
            fwd, vjp = jax.vjp(apply, lhs, rhs)
            lq, ls = qwix_quantized(lhs, how_lhs)
            rq, rs = qwix_quantized(rhs, how_rhs)
            out = {"fwd": fwd, "fwd_lhs_q": lq, "fwd_lhs_scale": ls, "fwd_rhs_q": rq, "fwd_rhs_scale": rs}
            # Qwix 0.1.8 does not regroup the operands of a grouped convolution's derivative: it raises.
            if note.get("feature_group_count", 1) == 1:
                out["dlhs"], out["drhs"] = vjp(g)
            return out

        tensors.update({f"in/{key}/lhs": lhs, f"in/{key}/rhs": rhs, f"in/{key}/g": g})
        for how, fn in (("eager", values), ("jit", jax.jit(values))):
            for name, value in fn(lhs, rhs, g).items():
                tensors[f"out/{key}/{how}/{name}"] = value
        cases[key] = note

    for dname, dtype in DTYPES.items():
        for case, (_, _, dims, _) in DOTS.items():
            lhs, rhs, g = dot_operands(case, dtype)
            how = lambda for_lhs: dot_general.get_how_to_quantize(
                dimension_numbers=dims, ndims=(lhs.ndim, rhs.ndim), for_lhs=for_lhs, tile_size=None, qtype=jnp.int8)
            record(f"{case}_{dname}", lhs, rhs, g, Dot(dims, case != "scores"), how(True), how(False),
                   {"op": "dot_general", "dimension_numbers": dims, "residuals": "original"})
        for case, (equation, lhs_shape, rhs_shape) in EINSUMS.items():
            gen = rng("qwix", case)
            lhs, rhs = (jnp.asarray(normal(gen, s, dtype)) for s in (lhs_shape, rhs_shape))
            g = jnp.asarray(normal(gen, jax.eval_shape(lambda a, b: jnp.einsum(equation, a, b), lhs, rhs).shape, dtype))
            how = lambda for_lhs: qwix_einsum.get_how_to_quantize(
                einsum_str=equation, ndims=(lhs.ndim, rhs.ndim), for_lhs=for_lhs, tile_size=None, qtype=jnp.int8)
            record(f"{case}_{dname}", lhs, rhs, g, Einsum(equation, "dnh" in case), how(True), how(False),
                   {"op": "einsum", "equation": equation, "residuals": "original"})
        for case, (_, _, kwargs) in CONVS.items():
            gen, lhs, rhs = conv_operands(case, dtype)
            run = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=NHWC, **kwargs)
            g = jnp.asarray(normal(gen, jax.eval_shape(run, lhs, rhs).shape, dtype))
            dnums = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, NHWC)
            how = lambda for_lhs: conv_general.get_how_to_quantize(
                dimension_numbers=dnums, for_lhs=for_lhs, qtype=jnp.int8)
            record(f"{case}_{dname}", lhs, rhs, g, Conv(tuple(kwargs.items())), how(True), how(False),
                   {"op": "conv_general_dilated", "dimension_numbers": NHWC, "residuals": "quantized", **kwargs})
    return tensors, cases


def check_qwix(tensors, cases):
    """Asserts what README.md says of Qwix: int8 values, output and residuals."""
    for case, (_, _, dims, _) in DOTS.items():
        for dname, dtype in DTYPES.items():
            get = lambda name: np.asarray(tensors[f"{name.split(':')[0]}/{case}_{dname}/{name.split(':')[1]}"])
            for operand, axes in zip(("lhs", "rhs"), dims[0]):
                x, scale = get(f"in:{operand}").astype(np.float32), get(f"out:eager/fwd_{operand}_scale")
                y = (x * (np.float32(1) / scale.astype(np.float32))).astype(dtype).astype(np.float32)
                q = np.clip(np.rint(y), -128, 127).astype(np.int8)
                assert np.array_equal(q, get(f"out:eager/fwd_{operand}_q")), (case, dname, operand)
    for key, case in cases.items():
        if case["op"] != "dot_general" or not key.endswith("f32") or case["dimension_numbers"][1][0]:
            continue
        lhs, rhs, g = (np.asarray(tensors[f"in/{key}/{n}"], np.float64) for n in ("lhs", "rhs", "g"))
        dlhs = np.tensordot(g, rhs, axes=(-1, 1))
        rel = np.abs(np.asarray(tensors[f"out/{key}/eager/dlhs"]) - dlhs).max() / np.abs(dlhs).max()
        assert rel < 1e-5, (key, rel)
    for case, (_, _, kwargs) in CONVS.items():
        if kwargs.get("feature_group_count", 1) != 1:
            continue
        key = f"{case}_f32"
        lhs_q, lhs_s, rhs_q, rhs_s = (jnp.asarray(tensors[f"out/{key}/eager/fwd_{n}"]).astype(jnp.float32)
                                      for n in ("lhs_q", "lhs_scale", "rhs_q", "rhs_scale"))
        run = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=NHWC, **kwargs)
        _, vjp = jax.vjp(run, lhs_q * lhs_s, rhs_q * rhs_s)
        for name, want in zip(("dlhs", "drhs"), vjp(tensors[f"in/{key}/g"])):
            got = tensors[f"out/{key}/eager/{name}"]
            rel = float(jnp.abs(got - want).max() / jnp.abs(want).max())
            assert rel < 1e-5, (key, name, rel)


def main():
    rewrite = reciprocal_rewrite()
    print(rewrite)
    versions = {"jax": jax.__version__, "aqtp": "0.9.0", "qwix": "0.1.8"}
    tensors, cases = aqt_vectors()
    check_aqt(tensors)
    write(GOLDEN / "quant_aqt.safetensors", tensors,
          {"cases": cases, "reciprocal_rewrite": rewrite, "versions": versions})
    tensors, cases = qwix_vectors()
    check_qwix(tensors, cases)
    write(GOLDEN / "quant_qwix.safetensors", tensors, {"cases": cases, "versions": versions})


if __name__ == "__main__":
    main()
