"""A linear layer that AMD Quark calibrates: static int8 of weight and activation, and SVDQuant with int4 in groups.

Needs the packages of requirements-quark.txt, as quant_quark.py.

Names: in/weight, in/batches (calibration), in/x; out/static_<dtype>_<granularity>/{input_scale,weight_scale,y}; and
out/svdquant/{weight,down,up,y}, where weight is what the integers stand for. The layer is in float32 for `f32`, else bfloat16.
"""

import numpy as np
import torch
from quark.torch import ModelQuantizer
from quark.torch.algorithm.svdquant import build_quant_layer_config
from quark.torch.quantization import Int8PerChannelSpec, Int8PerTensorSpec, QConfig, QLayerConfig
from quark.torch.quantization.config.config import SVDQuantConfig
from torch.utils.data import DataLoader

from common import GOLDEN, normal, rng, write

OUTPUTS, INPUTS, ROWS, BATCHES, RANK = 96, 128, 16, 3, 8
STATIC = {"is_dynamic": False, "round_method": "half_even", "scale_type": "float"}


class Model(torch.nn.Module):
    """Quark asks models for their device."""

    device = torch.device("cpu")

    def __init__(self, w: torch.Tensor):
        super().__init__()
        self.linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=w.dtype)
        self.linear.weight.data.copy_(w)

    def forward(self, x):
        return self.linear(x)


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
    model = ModelQuantizer(config).quantize_model(Model(w), DataLoader(list(batches), batch_size=None))
    linear = model.linear
    result = {
        "input_scale": linear._input_quantizer.scale.float().reshape(-1).numpy(),
        "weight_scale": linear._weight_quantizer.scale.float().reshape(-1).numpy(),
    }
    model = ModelQuantizer.freeze(model)
    with torch.no_grad():
        result["y"] = model(x).float().numpy()
    return result


def svdquant(w, batches, x) -> dict:
    config = QConfig(
        global_quant_config=build_quant_layer_config("w4a16"),
        exclude=["*correction*"],
        algo_config=[
            SVDQuantConfig(svd_rank=RANK, search_alpha=False, exclude_patterns=[], min_layer_size=1)
        ],
    )
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(Model(w), DataLoader(list(batches), batch_size=None))
    model = quantizer.freeze(model)
    module = model.linear
    with torch.no_grad():
        return {
            "weight": module.layer.weight.float().numpy(),
            "down": module.correction.l1.weight.float().numpy(),
            "up": module.correction.l2.weight.float().numpy(),
            "y": model(x).float().numpy(),
        }


def main():
    w, batches, x = data()
    out = {"in/weight": w.float().numpy(), "in/batches": batches.float().numpy(), "in/x": x.float().numpy()}
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        for channel in [False, True]:
            case = f"static_{name}_{'channel' if channel else 'tensor'}"
            result = static(w.to(dtype), batches.to(dtype), x.to(dtype), channel)
            out |= {f"out/{case}/{key}": value for key, value in result.items()}
    result = svdquant(w, batches, x)
    out |= {f"out/svdquant/{key}": value for key, value in result.items()}
    product = result["up"] @ result["down"]
    exact = w.float().numpy()
    error = np.linalg.norm(result["weight"] + product - exact) / np.linalg.norm(exact)
    print("relative error of the weight:", error, {k: v.shape for k, v in out.items()})
    versions = {"amd-quark": "0.13", "torch": torch.__version__.split("+")[0]}
    write(GOLDEN / "quant_calibrated.safetensors", out, {"rank": RANK, "versions": versions})


main()
