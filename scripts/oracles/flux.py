"""Tiny `FluxTransformer2DModel`s: weights, inputs, outputs, gradients.

Usage: python flux.py [dev|schnell|odd]...

Writes tests/golden/flux_{dev,schnell,odd}/ in diffusers' layout (`odd` in shards) and beside it `io.safetensors`:
  in/<each parameter of forward>;
  in/cotangent: the loss is mean(out/sample * in/cotangent);
  out/sample; grad/in/{hidden_states,encoder_hidden_states,pooled_projections}; for dev grad/param/<key of the
  checkpoint>.
Values are computed in float64 from the float32 weights and rounded once; the metadata says how far PyTorch's own float32
run is from them.
"""

import math
import shutil
import sys

import numpy as np
import torch
from diffusers import FluxTransformer2DModel

from common import GOLDEN, normal, record_denoiser, report, rng, write

CONFIGS = {
    "dev": dict(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
                joint_attention_dim=20, pooled_projection_dim=12, guidance_embeds=True, axes_dims_rope=(2, 2, 4)),
    "schnell": dict(in_channels=8, num_layers=2, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
                    joint_attention_dim=12, pooled_projection_dim=10, guidance_embeds=False, axes_dims_rope=(4, 2, 2)),
    # An odd number of heads, other channels for the result than for the input.
    "odd": dict(in_channels=12, out_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=6,
                num_attention_heads=3, joint_attention_dim=14, pooled_projection_dim=6, guidance_embeds=True,
                axes_dims_rope=(2, 2, 2)),
}
# Not square, so that a swap of rows and columns shows.
BATCH, ROWS, COLUMNS, TEXT = 2, 3, 5, 4


def randomize(model, name):
    for key, param in model.named_parameters():
        gen = rng("flux", name, key)
        if param.ndim == 1:
            offset = 1.0 if key.endswith("weight") else 0.0
            value = offset + normal(gen, param.shape, scale=0.2)
        else:
            value = normal(gen, param.shape, scale=1.0 / math.sqrt(param[0].numel()))
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def inputs(name):
    config, gen = CONFIGS[name], rng("flux_inputs", name)
    image = ROWS * COLUMNS
    img_ids = np.zeros((ROWS, COLUMNS, 3), np.float32)
    img_ids[..., 1] += np.arange(ROWS)[:, None]
    img_ids[..., 2] += np.arange(COLUMNS)[None, :]
    out = {
        "hidden_states": normal(gen, (BATCH, image, config["in_channels"])),
        "encoder_hidden_states": normal(gen, (BATCH, TEXT, config["joint_attention_dim"])),
        "pooled_projections": normal(gen, (BATCH, config["pooled_projection_dim"])),
        "timestep": np.array([0.8125, 0.25], np.float32),
        "img_ids": img_ids.reshape(image, 3),
        "txt_ids": np.zeros((TEXT, 3), np.float32),
    }
    if name == "odd":
        # Positions that no pipeline has: all axes turn.
        out["txt_ids"] = normal(gen, (TEXT, 3), scale=3.0)
        out["img_ids"][:, 0] = 2.0
    if config["guidance_embeds"]:
        out["guidance"] = np.array([3.5, 1.25], np.float32)
    out["cotangent"] = normal(gen, (BATCH, image, config.get("out_channels", config["in_channels"])))
    return out


def run(model, ins, dtype):
    model = model.to(dtype).eval()
    model.zero_grad(set_to_none=True)
    t = {k: torch.from_numpy(v).to(dtype) for k, v in ins.items()}
    wanted = ("hidden_states", "encoder_hidden_states", "pooled_projections")
    for k in wanted:
        t[k].requires_grad_(True)
    cotangent = t.pop("cotangent")
    out = model(**t).sample
    (out * cotangent).mean().backward()
    tensors = {"out/sample": out.detach()} | {f"grad/in/{k}": t[k].grad for k in wanted}
    tensors |= {f"grad/param/{k}": p.grad for k, p in model.named_parameters()}
    return {k: v.double().numpy() for k, v in tensors.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CONFIGS:
        folder = GOLDEN / f"flux_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        model = FluxTransformer2DModel(**CONFIGS[name])
        randomize(model, name)
        model.save_pretrained(folder, max_shard_size="60KB" if name == "odd" else "5GB")
        ins = inputs(name)
        single, double = run(model, ins, torch.float32), run(model, ins, torch.float64)
        record_denoiser(folder, model, ins, single, double, with_gradients=name == "dev")
        for path in sorted(folder.iterdir()):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
