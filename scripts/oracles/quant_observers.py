"""Ranges and scales that observers of AMD Quark and PyTorch find.

Needs the packages of requirements-quark.txt, as quant_quark.py.

Names: in/batches are three batches of one activation in bfloat16; in/positive is without negative values.
out/<observer>/{scale,range}: of all values as one batch, but those of `batches` for `min_max`, `ema` and `power_of_two`.
out/quark_<observer>_<case>/{scale,zero_point} are what Quark's own observers give, with their defects.
Quark's search of MSE looks at the last three bins of its histogram only; recorded is what its own fake quantization gives
for the shares of the range in hundredths from 20 on.
"""

import numpy as np
import torch
from quark.torch.quantization import Int8PerChannelSpec, Int8PerTensorSpec
from quark.torch.quantization.observer.observer import (
    PerChannelPowOf2MinMaxObserver,
    PerTensorHistogramObserver,
    PerTensorHistogramObserverPro,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
    PerTensorPowOf2MinMaxObserver,
)
from torch.ao.quantization.observer import HistogramObserver, MovingAverageMinMaxObserver

from common import GOLDEN, normal, rng, write

BATCHES, COUNT, ROWS = 3, 2048, 8
PERCENTILES = [99.99999999, 99.9, 97.5]
STATIC = {"is_dynamic": False, "round_method": "half_even", "scale_type": "float"}


def spec(symmetric=True):
    return Int8PerTensorSpec(observer_method="min_max", symmetric=symmetric, **STATIC).to_quantization_spec()


def values() -> torch.Tensor:
    """With heavy tails, another range in each batch, zeros, and one outlier."""
    x = normal(rng("observers", "x"), (BATCHES, COUNT)) * np.exp(normal(rng("observers", "tails"), (BATCHES, COUNT)))
    x *= np.array([[1.0], [0.6], [1.7]])
    x[1, :40] = 0
    x[2, 11] = 61.3
    return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16).float()


def batches_of(observer, x):
    for batch in x:
        observer(batch)
    return observer


def qparams(observer):
    scale, zero_point = observer._calculate_qparams()
    return scale.float().reshape(-1).numpy(), zero_point.to(torch.int32).reshape(-1).numpy()


def mse(x: torch.Tensor) -> float:
    observer = PerTensorMSEObserver(spec())
    absmax = x.abs().max()
    zero = torch.tensor(0.0)
    best = (float("inf"), None)
    for share in range(100, 19, -1):
        amax = absmax * torch.tensor(share / 100.0)
        error = ((observer.int_fake_tensor_quant(x, zero, amax) - x).double() ** 2).sum().item()
        if error < best[0]:
            best = (error, observer.calculate_int_quant_params(zero, amax)[0].item())
    return best[1]


def main():
    x = values()
    positive = x.abs()
    out = {"in/batches": x.numpy()}
    for name, data in [("signed", x), ("positive", positive)]:
        for symmetric in [True, False]:
            case = f"{name}_{'symmetric' if symmetric else 'asymmetric'}"
            scale, zero_point = qparams(batches_of(PerTensorMinMaxObserver(spec(symmetric)), data))
            out[f"out/min_max_{case}/scale"] = scale
            out[f"out/min_max_{case}/zero_point"] = zero_point
            for kind, own in [
                ("histogram", PerTensorHistogramObserver),
                ("mse", PerTensorMSEObserver),
                ("percentile", PerTensorPercentileObserver),
            ]:
                observer = own(spec(symmetric))
                observer(data.flatten())
                scale, zero_point = qparams(observer)
                out[f"out/quark_{kind}_{case}/scale"] = scale
                out[f"out/quark_{kind}_{case}/zero_point"] = zero_point
            for bins in [256, 2048]:
                scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
                observer = HistogramObserver(bins=bins, dtype=torch.qint8, qscheme=scheme)
                observer(data.flatten())
                low, high = observer._non_linear_param_search()
                out[f"out/histogram_{bins}_{case}/range"] = np.array([low.item(), high.item()], np.float32)
                out[f"out/histogram_{bins}_{case}/scale"] = observer.calculate_qparams()[0].numpy()
        for percentile in PERCENTILES:
            observer = PerTensorPercentileObserver(spec())
            observer.percentile = percentile
            observer(data.flatten())
            out[f"out/percentile_{percentile}_{name}/scale"] = qparams(observer)[0]
        out[f"out/mse_{name}/scale"] = np.array([mse(data.flatten())], np.float32)
        observer = PerTensorHistogramObserverPro(spec())
        observer(data.flatten())
        out[f"out/histogrampro_{name}/scale"] = observer._calculate_qparams()[0].numpy()
    observer = PerTensorPowOf2MinMaxObserver(spec())
    observer(x.flatten())
    out["out/power_of_two/scale"] = qparams(observer)[0]
    channel = Int8PerChannelSpec(symmetric=True, ch_axis=0, **STATIC).to_quantization_spec()
    observer = PerChannelPowOf2MinMaxObserver(channel)
    observer(x.reshape(BATCHES * ROWS, -1))
    out["out/power_of_two_channel/scale"] = qparams(observer)[0]
    observer = batches_of(MovingAverageMinMaxObserver(averaging_constant=0.01), x)
    out["out/ema/range"] = np.array([observer.min_val.item(), observer.max_val.item()], np.float32)
    versions = {"amd-quark": "0.13", "torch": torch.__version__.split("+")[0]}
    write(GOLDEN / "quant_observers.safetensors", out, {"percentiles": PERCENTILES, "versions": versions})
    for key, value in out.items():
        if key.startswith("out/"):
            print(key, value.reshape(-1)[:4])


main()
