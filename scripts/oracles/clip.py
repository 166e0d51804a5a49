"""Tiny CLIP text encoders: weights, inputs, outputs and gradients.

Usage: python clip.py

Writes tests/golden/clip_quick_gelu/ (as in SD 1.5: quick_gelu, `eos_token_id` 2, pooled at the highest token id) and
tests/golden/clip_gelu/ (as SDXL's second encoder: gelu, a real `eos_token_id`, pooled at its first place, projection).
`io.safetensors` beside each: in/input_ids, in/cotangent_*, out/last_hidden_state, out/hidden_states.<i> (0 is the
embedding; the last is before the final norm), out/pooler_output or out/text_embeds, grad/param/<key>.
The loss is mean(last_hidden_state * c) + mean(hidden_states[-2] * c) + mean(pooled * c), each with its cotangent.
Values are computed in float64 and rounded once. The gradient of a `k_proj.bias` is zero (softmax does not see a shift
shared by all keys) and is recorded as exactly that.
"""

import math
import shutil

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from common import GOLDEN, normal, rel_l2, report, rng, write

SHARED = dict(vocab_size=64, hidden_size=16, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
              max_position_embeddings=11, bos_token_id=62, pad_token_id=63)
MODELS = {
    "clip_quick_gelu": (CLIPTextModel, dict(SHARED, hidden_act="quick_gelu", eos_token_id=2), [
        [62, 5, 9, 33, 63, 63, 63, 63, 63, 63, 63],
        [62, 2, 40, 41, 2, 7, 7, 1, 0, 63, 2],
    ]),
    "clip_gelu": (CLIPTextModelWithProjection,
                  dict(SHARED, hidden_act="gelu", eos_token_id=61, pad_token_id=0, projection_dim=10), [
        [62, 5, 9, 33, 61, 0, 0, 0, 0, 0, 0],
        [62, 63, 40, 61, 41, 61, 63, 1, 0, 0, 0],  # an added token above eos: argmax would pool at 63
    ]),
}


def checkpoint_key(key: str) -> str:
    """The key of published checkpoints; transformers 5 drops the `text_model.` of CLIPTextModel in memory."""
    return key if key.startswith(("text_model.", "text_projection.")) else f"text_model.{key}"


def randomize(model: torch.nn.Module, name: str) -> None:
    for key, param in model.named_parameters():
        gen = rng("clip", name, checkpoint_key(key))
        if param.ndim == 1:
            value = (1.0 if "norm" in key and key.endswith("weight") else 0.0) + normal(gen, param.shape, scale=0.2)
        elif "embedding" in key:
            value = normal(gen, param.shape, scale=0.7)
        else:
            value = normal(gen, param.shape, scale=1.0 / math.sqrt(param.shape[1]))
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def run(model, ids: np.ndarray, cotangents: dict, dtype: torch.dtype) -> dict:
    model = model.to(dtype).eval()
    model.zero_grad(set_to_none=True)
    out = model(torch.from_numpy(ids), output_hidden_states=True)
    pooled_name = "text_embeds" if "text_embeds" in out else "pooler_output"
    values = {"last_hidden_state": out.last_hidden_state, pooled_name: out[pooled_name]}
    values |= {f"hidden_states.{i}": h for i, h in enumerate(out.hidden_states)}
    picked = {"last_hidden_state": out.last_hidden_state, "penultimate": out.hidden_states[-2], "pooled": out[pooled_name]}
    sum((v * torch.from_numpy(cotangents[k]).to(dtype)).mean() for k, v in picked.items()).backward()
    tensors = {f"out/{k}": v.detach() for k, v in values.items()}
    tensors |= {f"grad/param/{checkpoint_key(k)}": p.grad for k, p in model.named_parameters()}
    tensors = {k: v.double().numpy() for k, v in tensors.items()}
    for key in (k for k in tensors if k.endswith("k_proj.bias")):
        assert np.abs(tensors[key]).max() < 1e-7, key
        tensors[key] = np.zeros_like(tensors[key])
    return tensors


def main():
    torch.set_num_threads(1)
    for name, (kind, config, ids) in MODELS.items():
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        model = kind(CLIPTextConfig(attn_implementation="sdpa", **config))
        randomize(model, name)
        model.save_pretrained(folder)
        weights = {checkpoint_key(k): v for k, v in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        ids = np.array(ids, np.int64)
        gen, batch, length, width = rng("clip_inputs", name), *ids.shape, config["hidden_size"]
        cotangents = {"last_hidden_state": normal(gen, (batch, length, width)),
                      "penultimate": normal(gen, (batch, length, width)),
                      "pooled": normal(gen, (batch, config.get("projection_dim", width)))}
        single, double = run(model, ids, cotangents, torch.float32), run(model, ids, cotangents, torch.float64)
        meta = {"parameters": sum(p.numel() for p in model.parameters()),
                "pytorch_float32_worst_rel_l2": max(rel_l2(single[k], double[k]) for k in double
                                                    if not k.endswith("k_proj.bias")),
                "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}}
        print(name, meta)
        write(folder / "io.safetensors",
              {"in/input_ids": ids} | {f"in/cotangent_{k}": v for k, v in cotangents.items()}
              | {k: v.astype(np.float32) for k, v in double.items()}, meta)
        for path in sorted(folder.iterdir()):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
