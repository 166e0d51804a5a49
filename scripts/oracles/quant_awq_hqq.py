"""AWQ's and HQQ's formulas in float64, from the papers and their authors' code.

AWQ (Lin et al. 2024): the layer that quant_calibrated.py recorded, int4 in groups of 64 in AMD Quark's numerics. out/awq/errors has, for
the powers 0, 1/20 .. 19/20 of the mean magnitudes of features, the relative L2 error of what the layer computes of the calibration
batches; out/awq/factors the factors of the best.
HQQ (Badri and Shaji 2023): in/heavy, a weight of Student's t distribution with 3 degrees of freedom; out/hqq_<bits>/{codes,scale,zero}
with groups of 32, and out/hqq_<bits>/errors, the mean magnitude and the root mean square of errors, then both of rounding to the nearest
code between the lowest and the highest number.
"""

import numpy as np
from safetensors.numpy import load_file

from common import GOLDEN, rel_l2, rng, write

GROUP = 64
HQQ_GROUP = 32
NORM, BETA, GROWTH, ITERATIONS = 0.7, 10.0, 1.01, 20


def int4(w):
    groups = w.reshape(-1, GROUP)
    scale = np.maximum(np.abs(groups).max(1, keepdims=True) / 7.5, 2.0**-23)
    return (np.clip(np.round(groups / scale), -8, 7) * scale).reshape(w.shape)


def awq(w, x):
    exact, magnitudes, errors, all_factors = x @ w.T, np.abs(x).mean(0), [], []
    for i in range(20):
        factors = np.maximum(np.maximum(magnitudes, 1e-4) ** (i / 20), 1e-4)
        factors /= np.sqrt(factors.max() * factors.min())
        errors.append(rel_l2((x / factors) @ int4(w * factors).T, exact))
        all_factors.append(factors)
    return np.float32(errors), all_factors[int(np.argmin(errors))].astype(np.float32)


def hqq_zero(w, scale, low, high):
    inverse, beta = 1 / scale, BETA
    zero = low - w.min() * inverse
    best, least = zero, np.inf
    for _ in range(ITERATIONS):
        codes = np.clip(np.round(w * inverse + zero), low, high)
        left = w - (codes - zero) / inverse
        size = np.abs(left)
        with np.errstate(divide="ignore"):
            shrunk = np.sign(left) * np.maximum(size - size ** (NORM - 1) / beta, 0)
        error = size.mean()
        if error >= least:
            break
        best, least = zero, error
        zero = np.mean(codes - (w - shrunk) * inverse)
        beta *= GROWTH
    return best


def hqq(w, low, high):
    codes, scales, zeros, left, nearest = [], [], [], [], []
    for run in w.reshape(-1, HQQ_GROUP):
        scale = (run.max() - run.min()) / (high - low)
        zero = hqq_zero(run, scale, low, high)
        codes.append(np.clip(np.round(run / scale + zero), low, high))
        scales.append(scale)
        zeros.append(zero)
        left.append(run - (codes[-1] - zero) * scale)
        first = low - run.min() / scale
        nearest.append(run - (np.clip(np.round(run / scale + first), low, high) - first) * scale)
    measures = [f(np.stack(e)) for e in (left, nearest) for f in (lambda e: np.abs(e).mean(), lambda e: np.sqrt((e**2).mean()))]
    return np.stack(codes), np.float32(scales), np.float32(zeros), np.float32(measures)


def main():
    recorded = load_file(str(GOLDEN / "quant_calibrated.safetensors"))
    w = recorded["in/weight"].astype(np.float64)
    errors, factors = awq(w, recorded["in/batches"].astype(np.float64).reshape(-1, w.shape[1]))
    heavy = (0.02 * rng("quant", "hqq").standard_t(3, (32, 128))).astype(np.float32)
    tensors = {"out/awq/errors": errors, "out/awq/factors": factors, "in/heavy": heavy}
    for bits, low, high in ((4, 0, 15), (8, -128, 127)):
        codes, scale, zero, measures = hqq(heavy.astype(np.float64), low, high)
        tensors |= {
            f"out/hqq_{bits}/codes": codes.astype(np.int8),
            f"out/hqq_{bits}/scale": scale,
            f"out/hqq_{bits}/zero": zero,
            f"out/hqq_{bits}/errors": measures,
        }
    print({k: v for k, v in tensors.items() if k.endswith("errors")})
    write(GOLDEN / "quant_awq_hqq.safetensors", tensors, {"versions": {"numpy": np.__version__}})


main()
