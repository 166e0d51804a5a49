"""A linear layer that AMD Quark quantizes: static int8 of weight and activation, int4 of both, and SVDQuant with int4.

Needs the packages of requirements-quark.txt, as quant_quark.py.

Names: in/weight, in/batches (calibration), in/x; out/static_<dtype>_<granularity>/{input_scale,weight_scale,y}; out/w4a4_<dtype>_<group>/y, where group 0 is a scale a channel; out/svdquant and out/svdquant_w4a4/{scale,weight,down,up,
y}, where weight is what the integers stand for; and out/paper/{factors,y}, which PyTorch computes in float64. The layer is in float32 for `f32`, else bfloat16.
"""

import numpy as np
import torch
from quark.torch import ModelQuantizer
from quark.torch.algorithm.svdquant import build_quant_layer_config
from quark.torch.quantization import (
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
)
from quark.torch.quantization.config.config import SVDQuantConfig
from torch.utils.data import DataLoader

from common import GOLDEN, linear_model, normal, rng, write

OUTPUTS, INPUTS, ROWS, BATCHES, RANK = 96, 128, 16, 3, 8
GROUP = 64
INT4 = {"round_method": "half_even", "scale_type": "float"}
STATIC = {"is_dynamic": False, "round_method": "half_even", "scale_type": "float"}


def data():
    """A weight with some strong directions, and activations with outlier features, as those of transformers."""
    w = normal(rng("calibrated", "w"), (OUTPUTS, INPUTS), scale=0.05)
    w += normal(rng("calibrated", "up"), (OUTPUTS, 4), scale=0.2) @ normal(rng("calibrated", "down"), (4, INPUTS))
    features = np.exp(normal(rng("calibrated", "features"), (INPUTS,), scale=0.7))
    features[[5, 70]] *= 20
    batches = normal(rng("calibrated", "batches"), (BATCHES, ROWS, INPUTS)) * features
    x = normal(rng("calibrated", "x"), (ROWS, INPUTS)) * features
    rounded = lambda v: torch.from_numpy(v.astype(np.float32)).to(torch.bfloat16)
    return rounded(w), rounded(batches), rounded(x)


def static(w, batches, x, channel: bool) -> dict:
    spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, **STATIC).to_quantization_spec()
    of_weight = Int8PerChannelSpec(symmetric=True, ch_axis=0, **STATIC).to_quantization_spec() if channel else spec
    config = QConfig(global_quant_config=QLayerConfig(weight=of_weight, input_tensors=spec))
    model = ModelQuantizer(config).quantize_model(linear_model(w), DataLoader(list(batches), batch_size=None))
    linear = model.linear
    result = {
        "input_scale": linear._input_quantizer.scale.float().reshape(-1).numpy(),
        "weight_scale": linear._weight_quantizer.scale.float().reshape(-1).numpy(),
    }
    model = ModelQuantizer.freeze(model)
    with torch.no_grad():
        result["y"] = model(x).float().numpy()
    return result


def int4(w, x, group: int) -> dict:
    """Weight and activation in int4, with a scale for `group` features, or for 0 a channel and a token."""

    def spec(**kind):
        if group:
            return Int4PerGroupSpec(symmetric=True, ch_axis=-1, group_size=group, **INT4, **kind).to_quantization_spec()
        return Int4PerChannelSpec(symmetric=True, ch_axis=0, **INT4, **kind).to_quantization_spec()

    config = QConfig(global_quant_config=QLayerConfig(weight=spec(is_dynamic=False), input_tensors=spec(is_dynamic=True)))
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(linear_model(w)))
    with torch.no_grad():
        return {"y": model(x).float().numpy()}


def svdquant(w, batches, x, mode: str) -> dict:
    config = QConfig(
        global_quant_config=build_quant_layer_config(mode),
        exclude=["*correction*"],
        algo_config=[
            SVDQuantConfig(svd_rank=RANK, search_alpha=False, exclude_patterns=[], min_layer_size=1)
        ],
    )
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(linear_model(w), DataLoader(list(batches), batch_size=None))
    scale = model.linear.layer._weight_quantizer.scale.float().numpy()
    model = quantizer.freeze(model)
    module = model.linear
    with torch.no_grad():
        return {
            "scale": scale,
            "weight": module.layer.weight.float().numpy(),
            "down": module.correction.l1.weight.float().numpy(),
            "up": module.correction.l2.weight.float().numpy(),
            "y": model(x).float().numpy(),
        }


def paper(w, batches, x) -> dict:
    """SVDQuant in the paper's order, in float64: x / s and W diag(s) - L in int4, and L of rank RANK beside, which reads x / s."""
    w, batches, x = (v.double() for v in (w, batches, x))

    def q4(v):
        groups = v.reshape(*v.shape[:-1], -1, GROUP)
        scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=2.0**-23)
        return ((groups / scale).round().clamp(-8, 7) * scale).reshape(v.shape)

    of_x = batches.reshape(-1, INPUTS).abs().amax(0).clamp(min=1e-8)
    s = (of_x**0.5 / w.abs().amax(0).clamp(min=1e-5) ** 0.5).clamp(1e-5, 1e5)
    smooth = w * s
    u, d, v = torch.linalg.svd(smooth, full_matrices=False)
    low = (u[:, :RANK] * d[:RANK]) @ v[:RANK]
    y = q4(x / s) @ q4(smooth - low).T + (x / s) @ low.T
    return {"factors": s.float().numpy(), "y": y.float().numpy()}


def main():
    w, batches, x = data()
    out = {"in/weight": w.float().numpy(), "in/batches": batches.float().numpy(), "in/x": x.float().numpy()}
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        for channel in [False, True]:
            case = f"static_{name}_{'channel' if channel else 'tensor'}"
            result = static(w.to(dtype), batches.to(dtype), x.to(dtype), channel)
            out |= {f"out/{case}/{key}": value for key, value in result.items()}
        for group in [0, 32, 64, 128]:
            result = int4(w.to(dtype), x.to(dtype), group)
            out |= {f"out/w4a4_{name}_{group}/{key}": value for key, value in result.items()}
    out |= {f"out/paper/{key}": value for key, value in paper(w, batches, x).items()}
    result = svdquant(w, batches, x, "w4a4")
    out |= {f"out/svdquant_w4a4/{key}": value for key, value in result.items()}
    result = svdquant(w, batches, x, "w4a16")
    out |= {f"out/svdquant/{key}": value for key, value in result.items()}
    product = result["up"] @ result["down"]
    exact = w.float().numpy()
    error = np.linalg.norm(result["weight"] + product - exact) / np.linalg.norm(exact)
    print("relative error of the weight:", error, {k: v.shape for k, v in out.items()})
    versions = {"amd-quark": "0.13", "torch": torch.__version__.split("+")[0]}
    write(GOLDEN / "quant_calibrated.safetensors", out, {"rank": RANK, "versions": versions})


main()
