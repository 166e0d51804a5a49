"""Single blocks of transformers at full width: FLUX.1's double and single block, Stable Diffusion 3's joint block, PixArt's
block and T5-XXL's layer, each in a network of the published configuration with as few blocks as make one of the kind.

Usage: python full_width.py [flux_double|flux_single|sd3_joint|pixart|t5]...

Writes tests/golden/full_width.safetensors: of each result out/<name>/sample, every 7th element, and out/<name>/norm. Weights
and inputs are no part of it, because both sides make them: element i of the tensor `key` is
    mix((hash(key) + i) mod 1048573) / 2^31 - 1, times a scale, plus a base,
where mix(x) is MurmurHash3's finalizer of x + 1 and hash(key) = fold(h * 31 + byte) mod 2^32. The scale is sqrt(3 / columns)
for weights of two dimensions and more, 0.1 for others, and 1 for inputs; the base is 1 for a norm's weight and 0 for others.
It is computed in float64 from weights in float32. Needs 6 GB.
"""

import json
import sys

import diffusers
import numpy as np
import torch
import transformers
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from transformers import T5Config, T5EncoderModel

from common import GOLDEN, ROOT, write

LENGTH = 1048573
STRIDE = 7
MODELS = ROOT / "src/models"


def mixed():
    x = np.arange(1, LENGTH + 1, dtype=np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x.astype(np.float64) / 2**31 - 1


TABLE = mixed()


def fill(key, shape, scale, base=0.0):
    start = 0
    for byte in key.encode():
        start = (start * 31 + byte) % 2**32
    start %= LENGTH
    table = np.roll(TABLE * scale + base, -start).astype(np.float32)
    return torch.from_numpy(np.resize(table, int(np.prod(shape))).reshape(shape))


def with_weights(model):
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key == "encoder.embed_tokens.weight":  # `shared.weight` by another name
                continue
            scale = np.sqrt(3.0 / np.prod(tensor.shape[1:])) if tensor.ndim > 1 else 0.1
            base = 1.0 if tensor.ndim == 1 and key.endswith("weight") else 0.0
            tensor.copy_(fill(key, tuple(tensor.shape), scale, base))
    return model.double().eval()


def published(path, **changes):
    config = json.loads((MODELS / path).read_text()) | changes
    return {k: v for k, v in config.items() if not k.startswith("_")}


def inputs(**shapes):
    return {k: fill(k, shape, 1.0).double() for k, shape in shapes.items()}


def flux(**layers):
    model = with_weights(FluxTransformer2DModel(**published("flux/transformer_dev.json", **layers)))
    ids = torch.zeros(6, 3)
    ids[:, 1], ids[:, 2] = torch.arange(6) // 3, torch.arange(6) % 3
    ins = inputs(hidden_states=(1, 6, 64), encoder_hidden_states=(1, 4, 4096), pooled_projections=(1, 768))
    return model(**ins, timestep=torch.tensor([0.5]).double(), guidance=torch.tensor([3.5]).double(), img_ids=ids.double(),
                 txt_ids=torch.zeros(4, 3).double()).sample


def sd3_joint():
    model = with_weights(SD3Transformer2DModel(**published("sd3/transformer_medium.json", num_layers=2,
                                                           pos_embed_max_size=16)))
    ins = inputs(hidden_states=(1, 16, 4, 6), encoder_hidden_states=(1, 4, 4096), pooled_projections=(1, 2048))
    return model(**ins, timestep=torch.tensor([500.0]).double()).sample


def pixart():
    model = with_weights(PixArtTransformer2DModel.from_config(published("pixart/transformer_sigma.json", num_layers=1)))
    ins = inputs(hidden_states=(1, 4, 4, 6), encoder_hidden_states=(1, 3, 4096))
    added = {"resolution": None, "aspect_ratio": None}
    return model(**ins, timestep=torch.tensor([500.0]).double(), encoder_attention_mask=torch.ones(1, 3).double(),
                 added_cond_kwargs=added).sample


def t5():
    model = with_weights(T5EncoderModel(T5Config(
        vocab_size=64, d_model=4096, d_kv=64, d_ff=10240, num_layers=1, num_heads=64, feed_forward_proj="gated-gelu",
        dropout_rate=0.0, tie_word_embeddings=False)))
    return model(input_ids=torch.tensor([[5, 9, 33, 2, 60, 17, 1, 0, 0]])).last_hidden_state


CASES = {"flux_double": lambda: flux(num_layers=1, num_single_layers=0),
         "flux_single": lambda: flux(num_layers=0, num_single_layers=1),
         "sd3_joint": sd3_joint, "pixart": pixart, "t5": t5}


def main():
    torch.set_num_threads(2)
    tensors = {}
    for name in sys.argv[1:] or CASES:
        with torch.no_grad():
            result = CASES[name]().flatten().numpy()
        assert np.all(np.isfinite(result)), name
        tensors[f"out/{name}/sample"] = result[::STRIDE].astype(np.float32)
        tensors[f"out/{name}/norm"] = np.array(np.linalg.norm(result), np.float32)
        print(name, result.shape, np.linalg.norm(result) / np.sqrt(result.size))
    write(GOLDEN / "full_width.safetensors", tensors,
          {"versions": {"diffusers": diffusers.__version__, "transformers": transformers.__version__,
                        "torch": torch.__version__.split("+")[0]}})


if __name__ == "__main__":
    main()
