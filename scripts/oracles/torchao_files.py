"""Weights as torchao flattens them for safetensors, and the floats that it makes of them.

torchao needs packages of its own (requirements-formats.txt, beside those of requirements.txt). tests/golden/torchao/weights.safetensors
has the layers int8, fp8_tensor and fp8_row; floats.safetensors: out/<layer>.
"""

import torch
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from common import GOLDEN, normal, rng, write

FOLDER = GOLDEN / "torchao"
OUTPUTS, INPUTS = 16, 64


def main() -> None:
    weight = torch.from_numpy(normal(rng("torchao", "weight"), (OUTPUTS, INPUTS), scale=0.2))
    layers = {"int8": Int8WeightOnlyConfig(version=2), "fp8_row": Float8WeightOnlyConfig()}
    state, floats = {}, {}
    for layer, config in layers.items():
        model = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS))
        model[0].weight.data.copy_(weight)
        quantize_(model, config)
        state |= {f"{layer}.weight": model[0].weight, f"{layer}.bias": model[0].bias.detach()}
        floats[f"out/{layer}"] = model[0].weight.dequantize().float().detach().numpy()
    tensors, metadata = flatten_tensor_state_dict(state)
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, FOLDER / "weights.safetensors", metadata=metadata)
    write(FOLDER / "floats.safetensors", floats, {"versions": {"torchao": "0.18.0"}})


if __name__ == "__main__":
    main()
