"""OCP's MXFP6: floats of 6 bits by ml_dtypes, with the scales of the "even" rounding (a power of two for 32 numbers).

Names: in/weight; of each case out/<case>/codes, a byte a number, out/<case>/scale, the code of `float8_e8m0fnu`, and
out/<case>/weight, the numbers that they stand for. The exponent of a scale is that of the largest magnitude, rounded to the
format's mantissa, less that of the largest number of the format.
"""

import ml_dtypes
import numpy as np

from common import GOLDEN, normal, rng, write

GROUP = 32
CASES = {"mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 3, 2), "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 2, 4)}


def weight() -> np.ndarray:
    w = normal(rng("mxfp6"), (8, 96))
    w[1] *= np.logspace(-3, 3, 96, dtype=np.float32)
    w[2, :32] = 0
    w[3] *= np.float32(1e-30)
    # Ties, numbers below the smallest one, and the largest number.
    ties = [7.5, 7.75, 0.0625, 0.1875, 0.3125, -0.0625, 1.0625, 1.1875, 28, 30, 0.03125, 0.09375, -3.875, 5.5, 2.25, -1.0]
    w[4, : len(ties)] = ties
    return w


def main():
    w = weight()
    tensors = {"in/weight": w}
    runs = w.reshape(8, -1, GROUP)
    for case, (dtype, mantissa, largest) in CASES.items():
        absmax = np.abs(runs).max(-1)
        bits = absmax.view(np.uint32) + np.uint32(1 << (23 - mantissa - 1))
        exponent = np.clip((bits >> 23).astype(np.int32) - 127 - largest, -126, 127)
        scale = np.exp2(exponent.astype(np.float64))[..., None]
        limit = np.float64(ml_dtypes.finfo(dtype).max)
        codes = np.clip(runs / scale, -limit, limit).astype(dtype)
        value = (codes.astype(np.float64) * scale).reshape(w.shape)
        raw = codes.view(np.uint8).reshape(w.shape)
        # A zero has no sign here.
        raw = np.where(codes.astype(np.float32).reshape(w.shape) == 0, 0, raw)
        tensors |= {
            f"out/{case}/codes": raw.astype(np.uint8),
            f"out/{case}/scale": (exponent + 127).astype(np.uint8),
            f"out/{case}/weight": value.astype(np.float32),
        }
    write(GOLDEN / "quant_mxfp6.safetensors", tensors, {"versions": {"ml_dtypes": ml_dtypes.__version__}})


main()
