"""Tiny `SD3Transformer2DModel`s: weights, inputs, outputs, gradients.

Usage: python sd3.py [medium|dual|odd]...

Writes tests/golden/sd3_{medium,dual,odd}/ in diffusers' layout and beside it `io.safetensors`:
  in/<each parameter of forward>;
  in/cotangent: the loss is mean(out/sample * in/cotangent);
  out/sample, and for dual out/skipped, without layer 1; grad/in/{hidden_states,encoder_hidden_states,pooled_projections};
  for dual grad/param/<key of the checkpoint>, but for those that are 0: the last block's queries of the text.
Values are computed in float64 from the float32 weights and rounded once; the metadata says how far PyTorch's own float32
run is from them.
"""

import math
import shutil
import sys

import numpy as np
import torch
from diffusers import SD3Transformer2DModel

from common import GOLDEN, normal, record_denoiser, report, rng

CONFIGS = {
    "medium": dict(sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
                   num_attention_heads=2, joint_attention_dim=20, caption_projection_dim=16, pooled_projection_dim=12,
                   pos_embed_max_size=6),
    "dual": dict(sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=4,
                 num_attention_heads=3, joint_attention_dim=10, caption_projection_dim=12, pooled_projection_dim=6,
                 pos_embed_max_size=6, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
    # One head, other channels for the result than for the input, a second attention in the last block.
    "odd": dict(sample_size=8, in_channels=3, out_channels=5, num_layers=2, attention_head_dim=12,
                num_attention_heads=1, joint_attention_dim=14, caption_projection_dim=12, pooled_projection_dim=5,
                pos_embed_max_size=5, qk_norm="rms_norm", dual_attention_layers=(1,)),
}
# Not square, so that a swap of rows and columns shows.
BATCH, ROWS, COLUMNS, TEXT = 2, 6, 10, 4


def randomize(model, name):
    """Random weights; the positions too, which are read from the checkpoint."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, tensor in tensors.items():
        gen = rng("sd3", name, key)
        if tensor.ndim == 1:
            offset = 1.0 if key.endswith("weight") else 0.0
            value = offset + normal(gen, tensor.shape, scale=0.2)
        elif key == "pos_embed.pos_embed":
            value = tensor.numpy() + normal(gen, tensor.shape, scale=0.2)
        else:
            value = normal(gen, tensor.shape, scale=1.0 / math.sqrt(tensor[0].numel()))
        tensor.data = torch.from_numpy(np.asarray(value, np.float32))


def inputs(name):
    config, gen = CONFIGS[name], rng("sd3_inputs", name)
    return {
        "hidden_states": normal(gen, (BATCH, config["in_channels"], ROWS, COLUMNS)),
        "encoder_hidden_states": normal(gen, (BATCH, TEXT, config["joint_attention_dim"])),
        "pooled_projections": normal(gen, (BATCH, config["pooled_projection_dim"])),
        "timestep": np.array([812.5, 250.0], np.float32),
        "cotangent": normal(gen, (BATCH, config["out_channels"], ROWS, COLUMNS)),
    }


def run(model, name, ins, dtype):
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
    if name == "dual":
        with torch.no_grad():
            tensors["out/skipped"] = model(**t, skip_layers=[1]).sample
    tensors |= {f"grad/param/{k}": p.grad for k, p in model.named_parameters() if p.grad.abs().max() > 0}
    return {k: v.double().numpy() for k, v in tensors.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CONFIGS:
        folder = GOLDEN / f"sd3_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        model = SD3Transformer2DModel(**CONFIGS[name])
        randomize(model, name)
        model.save_pretrained(folder)
        ins = inputs(name)
        single, double = run(model, name, ins, torch.float32), run(model, name, ins, torch.float64)
        double = {k: v for k, v in double.items() if k in single}
        record_denoiser(folder, model, ins, single, double, with_gradients=name == "dual")
        for path in sorted(folder.iterdir()):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
