"""Weights in AMD Quark's formats: scales, zero points, and the weights that are left.

amd-quark needs packages of its own (requirements-quark.txt), g++ and ninja: it compiles a library when it is first imported.

Names: in/<dtype>/weight; out/<case>_<dtype>/{scale,zero_point,weight}. The weight of a result is what Quark's freeze writes:
(integers - zero point) * scale, rounded to the dtype. The rows of the weight have other ranges; among them are ties, zeros,
values of one sign, an outlier and tiny values.
"""

import numpy as np
import torch
from quark.torch import ModelQuantizer
from quark.torch.quantization import (
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
)

from common import GOLDEN, linear_model, normal, rng, write

OUTPUTS, INPUTS, GROUP = 12, 128, 64
STATIC = {"is_dynamic": False}
INT = {"round_method": "half_even", "scale_type": "float"} | STATIC


def spec_of(case: str) -> QTensorConfig:
    specs = {
        "int8_tensor": Int8PerTensorSpec(observer_method="min_max", symmetric=True, **INT),
        "int8_tensor_asymmetric": Int8PerTensorSpec(observer_method="min_max", symmetric=False, **INT),
        "int8_channel": Int8PerChannelSpec(symmetric=True, ch_axis=0, **INT),
        "int8_channel_asymmetric": Int8PerChannelSpec(symmetric=False, ch_axis=0, **INT),
        "int4_channel": Int4PerChannelSpec(symmetric=True, ch_axis=0, **INT),
        "int4_group": Int4PerGroupSpec(symmetric=True, ch_axis=-1, group_size=GROUP, **INT),
        "int4_group_asymmetric": Int4PerGroupSpec(symmetric=False, ch_axis=-1, group_size=GROUP, **INT),
        "fp8_tensor": FP8E4M3PerTensorSpec(observer_method="min_max", **STATIC),
    }
    return specs[case].to_quantization_spec()


CASES = [
    "int8_tensor",
    "int8_tensor_asymmetric",
    "int8_channel",
    "int8_channel_asymmetric",
    "int4_channel",
    "int4_group",
    "int4_group_asymmetric",
    "fp8_tensor",
]


def weight() -> np.ndarray:
    w = normal(rng("quark", "weight"), (OUTPUTS, INPUTS), scale=0.3)
    w[1] = (np.arange(INPUTS) * 37 % 255 - 127.5) / 127.5  # Ties.
    w[2] = 0
    w[3] = np.abs(w[3])
    w[4] = -np.abs(w[4])
    w[5, 77] = 6.0
    w[6] *= 1e-9
    return w


def quantized(w: torch.Tensor, case: str) -> dict:
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec_of(case))))
    model = quantizer.quantize_model(linear_model(w))
    of_weight = model.linear._weight_quantizer
    result = {"scale": of_weight.scale.float().numpy()}
    if case.endswith("asymmetric"):
        result["zero_point"] = of_weight.zero_point.to(torch.int8).numpy()
    model = quantizer.freeze(model)
    result["weight"] = model.linear.weight.detach().float().numpy()
    return result


def main():
    tensors = {}
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        w = torch.from_numpy(weight()).to(dtype)
        tensors[f"in/{name}/weight"] = w.float().numpy()
        for case in CASES:
            for key, value in quantized(w, case).items():
                tensors[f"out/{case}_{name}/{key}"] = value
    versions = {"amd-quark": "0.13", "torch": torch.__version__.split("+")[0]}
    write(GOLDEN / "quant_quark.safetensors", tensors, {"cases": CASES, "group": GROUP, "versions": versions})


main()
