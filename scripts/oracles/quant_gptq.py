"""GPTQ in float64, column by column as in algorithm 1 of Frantar et al. 2023, of the layer that quant_calibrated.py recorded.

Names: out/<case>/{integers,scale} and out/<case>/error, the relative L2 error of what the layer computes of the calibration batches,
beside out/<case>/nearest, that of rounding each weight to the nearest integer. Inputs are those of quant_calibrated.safetensors.
"""

import numpy as np
from safetensors.numpy import load_file

from common import GOLDEN, rel_l2, write

DAMPING = 0.01
CASES = {"int4_group": (7.5, -8, 7, 64), "int4_channel": (7.5, -8, 7, 128), "int8_channel": (127.5, -128, 127, 128)}


def rounded(w, scale, low, high):
    return np.clip(np.round(w / scale), low, high)


def scale_of(w, bound):
    return np.maximum(np.abs(w).max(1, keepdims=True) / bound, 2.0**-23)


def gptq(w, hessian, bound, low, high, group):
    w, h = w.copy(), hessian.copy()
    h += DAMPING * h.diagonal().mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    integers, scales = np.zeros(w.shape), []
    for i in range(w.shape[1]):
        if i % group == 0:
            scales.append(scale_of(w[:, i : i + group], bound)[:, 0])
        integers[:, i] = rounded(w[:, i], scales[-1], low, high)
        error = (w[:, i] - integers[:, i] * scales[-1]) / upper[i, i]
        w[:, i + 1 :] -= np.outer(error, upper[i, i + 1 :])
    return integers, np.stack(scales, 1)


def main():
    recorded = load_file(str(GOLDEN / "quant_calibrated.safetensors"))
    w = recorded["in/weight"].astype(np.float64)
    x = recorded["in/batches"].astype(np.float64).reshape(-1, w.shape[1])
    exact, tensors = x @ w.T, {}
    for case, (bound, low, high, group) in CASES.items():
        integers, scale = gptq(w, x.T @ x / len(x), bound, low, high, group)
        spread = np.repeat(scale, group, 1)
        groups = w.reshape(-1, group)
        nearest = rounded(groups, scale_of(groups, bound), low, high) * scale_of(groups, bound)
        tensors |= {
            f"out/{case}/integers": integers.astype(np.int8),
            f"out/{case}/scale": scale.astype(np.float32),
            f"out/{case}/error": np.float32([rel_l2(x @ (integers * spread).T, exact)]),
            f"out/{case}/nearest": np.float32([rel_l2(x @ nearest.reshape(w.shape).T, exact)]),
        }
    print({k: float(v[0]) for k, v in tensors.items() if v.shape == (1,)})
    write(GOLDEN / "quant_gptq.safetensors", tensors, {"versions": {"numpy": np.__version__}})


main()
