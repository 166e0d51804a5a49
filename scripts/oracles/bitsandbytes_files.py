"""Weights as bitsandbytes writes them into safetensors, and the floats that it makes of them.

tests/golden/bitsandbytes/weights.safetensors has the layers nf4, nested (NF4 with quantized scales), fp4 and int8, by the
names that diffusers' and transformers' save_pretrained give them. floats.safetensors: in/weight, what was quantized; out/<layer>,
the floats in float32.
"""

import bitsandbytes.functional as bnb
import numpy as np
import torch
from safetensors.torch import save_file

from common import GOLDEN, normal, rng, write

FOLDER = GOLDEN / "bitsandbytes"
OUTPUTS, INPUTS = 20, 128


def weight() -> np.ndarray:
    w = normal(rng("bitsandbytes", "weight"), (OUTPUTS, INPUTS), scale=0.2)
    w[1, :64] = 0
    w[2, 5] = 3.0
    w[3] *= 1e-6
    return w


def main() -> None:
    w = torch.from_numpy(weight())
    tensors, floats = {}, {"in/weight": weight()}
    for layer, kind, nested in [("nf4", "nf4", False), ("nested", "nf4", True), ("fp4", "fp4", False)]:
        codes, state = bnb.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors[f"{layer}.weight"] = codes
        tensors |= {f"{layer}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        floats[f"out/{layer}"] = bnb.dequantize_4bit(codes, state).numpy()
    codes, scales, _ = bnb.int8_vectorwise_quant(w.half())
    tensors |= {"int8.weight": codes, "int8.SCB": scales, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    # What the forward pass of `MatMul8bitLt` and its gradient multiply.
    floats["out/int8"] = (codes.float() * scales.unsqueeze(1).mul(1.0 / 127.0)).numpy()
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, FOLDER / "weights.safetensors", metadata={"format": "pt"})
    write(FOLDER / "floats.safetensors", floats, {"versions": {"bitsandbytes": "0.50.2"}})


if __name__ == "__main__":
    main()
