"""Small diffusers models that AMD Quark exports, packed, and the floats that it makes of their weights.

tests/golden/quark/<case>/ is what `export_safetensors(weight_format="real_quantized")` writes: config.json and
diffusion_pytorch_model.safetensors. tests/golden/quark/floats.safetensors: in/weight, what was quantized; out/<case>, the weight that
Quark multiplies. The layer `head` is excluded. Of the case svdquant the weight is larger, in bfloat16, and not recorded; floats are the
first rows of the weight that Quark multiplies and of the product of its factors, in float32.
"""

import shutil

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization import (
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    OCP_MXFP8E4M3Spec,
    QConfig,
    QLayerConfig,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.config import SVDQuantConfig

from common import GOLDEN, normal, rng, write

FOLDER = GOLDEN / "quark"
OUTPUTS, INPUTS = 16, 128
# Of the case svdquant, that are recorded.
ROWS = 8
STATIC = {"is_dynamic": False}
INT = {"round_method": "half_even", "scale_type": "float"} | STATIC
SPECS = {
    "int8_tensor": Int8PerTensorSpec(observer_method="min_max", symmetric=True, **INT),
    "int8_tensor_asymmetric": Int8PerTensorSpec(observer_method="min_max", symmetric=False, **INT),
    "int8_channel": Int8PerChannelSpec(symmetric=True, ch_axis=0, **INT),
    "int4_channel": Int4PerChannelSpec(symmetric=True, ch_axis=0, **INT),
    "int4_group": Int4PerGroupSpec(symmetric=True, ch_axis=-1, group_size=64, **INT),
    "int4_group_asymmetric": Int4PerGroupSpec(symmetric=False, ch_axis=-1, group_size=64, **INT),
    "fp8_tensor": FP8E4M3PerTensorSpec(observer_method="min_max", **STATIC),
    "mxfp4": OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    "mxfp8": OCP_MXFP8E4M3Spec(ch_axis=-1, is_dynamic=False),
    "nvfp4": ScaleQuantSpec(
        first_stage=FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False, scale_type="float32"),
        second_stage=FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False, scale_type="float32"),
    ),
}


class Tiny(ModelMixin, ConfigMixin):
    """Two layers, of which one is quantized."""

    @register_to_config
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(INPUTS, OUTPUTS)
        self.head = torch.nn.Linear(OUTPUTS, 2)

    def forward(self, x):
        return self.head(self.linear(x))


def weight() -> np.ndarray:
    w = normal(rng("quark", "export"), (OUTPUTS, INPUTS), scale=0.3)
    w[1] = (np.arange(INPUTS) * 37 % 255 - 127.5) / 127.5  # Ties.
    w[3] = np.abs(w[3])
    w[4] = -np.abs(w[4])
    w[5, 77] = 6.0
    w[6] *= 1e-3
    w[7, 32:64] = 0
    return w


def svdquant() -> np.ndarray:
    """Exports a layer with a low-rank product, after one batch of calibration; the recorded rows."""
    torch.manual_seed(0)
    model = Tiny()
    # Quark decomposes no smaller matrix.
    model.linear, model.head = torch.nn.Linear(256, 256), torch.nn.Linear(256, 2)
    model = model.eval().to(torch.bfloat16)
    spec = SPECS["int4_group"].to_quantization_spec()
    algorithm = SVDQuantConfig(svd_rank=4, search_alpha=False, exclude_patterns=["head"])
    # Quark would quantize the factors as well.
    config = QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["head", "*correction*"], algo_config=[algorithm])
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(model, [torch.randn(8, 256, dtype=torch.bfloat16)])
    model = quantizer.freeze(model)
    packed, factors = model.linear.layer, model.linear.correction
    product = factors.l2.weight.float() @ factors.l1.weight.float()
    rows = torch.stack([packed.weight.float()[:ROWS], product[:ROWS]]).detach().numpy()
    export_safetensors(model, FOLDER / "svdquant", weight_format="real_quantized")
    return rows


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    floats = {"in/weight": weight()}
    for case, spec in SPECS.items():
        torch.manual_seed(0)
        model = Tiny().eval()
        model.linear.weight.data.copy_(torch.from_numpy(weight()))
        config = QConfig(global_quant_config=QLayerConfig(weight=spec.to_quantization_spec()), exclude=["head"])
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(model))
        floats[f"out/{case}"] = model.linear.weight.detach().float().numpy()
        if case == "nvfp4":  # Freezing leaves these as they were: what the layer multiplies is its results for unit vectors.
            with torch.no_grad():
                model.linear.bias.zero_()
                floats[f"out/{case}"] = model.linear(torch.eye(INPUTS)).T.contiguous().numpy()
        if case != "mxfp8":  # Quark does not pack it.
            export_safetensors(model, FOLDER / case, weight_format="real_quantized")
    floats["out/svdquant"] = svdquant()
    versions = {"amd-quark": "0.13", "torch": torch.__version__.split("+")[0]}
    write(FOLDER / "floats.safetensors", floats, {"versions": versions})


if __name__ == "__main__":
    main()
