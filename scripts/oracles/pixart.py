"""Tiny `PixArtTransformer2DModel`s: weights, inputs, outputs, gradients.

Usage: python pixart.py [alpha|sigma|odd]...

Writes tests/golden/pixart_{alpha,sigma,odd}/ in diffusers' layout and beside it `io.safetensors`:
  in/<each parameter of forward, and of added_cond_kwargs>;
  in/cotangent: the loss is mean(out/sample * in/cotangent);
  out/sample; grad/in/{hidden_states,encoder_hidden_states}; for alpha grad/param/<key of the checkpoint>, but for those that
  are 0 up to rounding: the biases of keys, which shift all scores of a query alike.
Values are computed in float64 from the float32 weights and rounded once; the metadata says how far PyTorch's own float32
run is from them.
"""

import math
import shutil
import sys

import numpy as np
import torch
from diffusers import PixArtTransformer2DModel

from common import GOLDEN, normal, record_denoiser, report, rng

CONFIGS = {
    "alpha": dict(sample_size=8, in_channels=4, out_channels=8, num_layers=1, attention_head_dim=12,
                  num_attention_heads=2, cross_attention_dim=24, caption_channels=20, use_additional_conditions=True),
    "sigma": dict(sample_size=12, in_channels=4, out_channels=8, num_layers=2, attention_head_dim=4,
                  num_attention_heads=3, cross_attention_dim=12, caption_channels=10, interpolation_scale=2,
                  use_additional_conditions=False),
    # One head, as many channels in the result as in the input.
    "odd": dict(sample_size=6, in_channels=3, out_channels=3, num_layers=1, attention_head_dim=12,
                num_attention_heads=1, cross_attention_dim=12, caption_channels=7, use_additional_conditions=True),
}
# Not square, so that a swap of rows and columns shows.
BATCH, ROWS, COLUMNS, TEXT = 2, 6, 10, 4


def randomize(model, name):
    for key, param in model.named_parameters():
        gen = rng("pixart", name, key)
        if param.ndim == 1 or key.endswith("scale_shift_table"):
            value = normal(gen, param.shape, scale=0.2)
        else:
            value = normal(gen, param.shape, scale=1.0 / math.sqrt(param[0].numel()))
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def inputs(name):
    config, gen = CONFIGS[name], rng("pixart_inputs", name)
    out = {
        "hidden_states": normal(gen, (BATCH, config["in_channels"], ROWS, COLUMNS)),
        "encoder_hidden_states": normal(gen, (BATCH, TEXT, config["caption_channels"])),
        "encoder_attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32),
        "timestep": np.array([812.5, 250.0], np.float32),
        "cotangent": normal(gen, (BATCH, config["out_channels"], ROWS, COLUMNS)),
    }
    if config["use_additional_conditions"]:
        out["resolution"] = np.array([[512, 768], [1024, 640]], np.float32)
        out["aspect_ratio"] = np.array([[0.6666667], [1.6]], np.float32)
    return out


def run(model, ins, dtype):
    model = model.to(dtype).eval()
    model.zero_grad(set_to_none=True)
    t = {k: torch.from_numpy(v).to(dtype) for k, v in ins.items()}
    wanted = ("hidden_states", "encoder_hidden_states")
    for k in wanted:
        t[k].requires_grad_(True)
    cotangent = t.pop("cotangent")
    size = {k: t.pop(k) for k in ("resolution", "aspect_ratio") if k in t} or None
    out = model(**t, added_cond_kwargs=size).sample
    (out * cotangent).mean().backward()
    tensors = {"out/sample": out.detach()} | {f"grad/in/{k}": t[k].grad for k in wanted}
    tensors |= {f"grad/param/{k}": p.grad for k, p in model.named_parameters() if not k.endswith("to_k.bias")}
    return {k: v.double().numpy() for k, v in tensors.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CONFIGS:
        folder = GOLDEN / f"pixart_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        model = PixArtTransformer2DModel(**CONFIGS[name])
        randomize(model, name)
        model.save_pretrained(folder)
        ins = inputs(name)
        single, double = run(model, ins, torch.float32), run(model, ins, torch.float64)
        record_denoiser(folder, model, ins, single, double, with_gradients=name == "alpha")
        for path in sorted(folder.iterdir()):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
