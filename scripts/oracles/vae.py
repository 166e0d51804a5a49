"""Tiny `AutoencoderKL`s: weights, inputs, outputs.

Usage: python vae.py

Writes tests/golden/vae_sd/ (four levels and both 1x1 convolutions, as Stable Diffusion's) and tests/golden/vae_shift/
(a shift factor and no 1x1 convolutions, as Flux's and SD3's, and no attention) in diffusers' layout, and beside each
`io.safetensors`:
  in/images, in/noise, in/latents (as the diffusion model makes them);
  out/mean, out/logvar: of `encode(images).latent_dist`; in `vae_sd` the log-variance reaches both of its bounds;
  out/latents: (mean + exp(logvar / 2) * noise - shift_factor) * scaling_factor;
  out/images: `decode(latents / scaling_factor + shift_factor)`.
Values are computed in float64 from the float32 weights and rounded once; the metadata says how far PyTorch's own
float32 and bfloat16 runs are from them.
"""

import json
import math
import shutil

import numpy as np
import torch
from diffusers import AutoencoderKL

from common import GOLDEN, normal, rel_l2, report, rng, write

CONFIGS = {
    "sd": dict(block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4,
               sample_size=64, scaling_factor=0.18215),
    "shift": dict(block_out_channels=(4, 8), layers_per_block=2, latent_channels=6, norm_num_groups=2,
                  sample_size=16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False,
                  use_post_quant_conv=False, mid_block_add_attention=False),
}
# Not square: a swap of height and width shows.
BATCH, ROWS, COLUMNS = 2, 3, 4


def randomize(model: torch.nn.Module, name: str) -> None:
    """Replaces every weight; nothing stays zero or one, and activations stay of order one."""
    for key, param in model.named_parameters():
        gen = rng("vae", name, key)
        if param.ndim == 1:
            offset = 1.0 if "norm" in key and key.endswith("weight") else 0.0
            value = offset + normal(gen, param.shape, scale=0.2)
        else:
            value = normal(gen, param.shape, scale=1.0 / math.sqrt(param[0].numel()))
        if key == "quant_conv.weight":
            value[len(value) // 2:] *= 25  # the log-variance then leaves its bounds in places
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def run(model: AutoencoderKL, ins: dict, dtype: torch.dtype) -> dict:
    model = model.to(dtype).eval()
    t = {k: torch.from_numpy(v).to(dtype) for k, v in ins.items()}
    shift, scale = model.config.shift_factor or 0.0, model.config.scaling_factor
    with torch.no_grad():
        posterior = model.encode(t["images"]).latent_dist
        latents = (posterior.mean + posterior.std * t["noise"] - shift) * scale
        images = model.decode(t["latents"] / scale + shift).sample
    out = {"mean": posterior.mean, "logvar": posterior.logvar, "latents": latents, "images": images}
    return {f"out/{k}": v.double().numpy() for k, v in out.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, config in CONFIGS.items():
        folder = GOLDEN / f"vae_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        levels = len(config["block_out_channels"])
        model = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * levels,
                              up_block_types=("UpDecoderBlock2D",) * levels, **config)
        randomize(model, name)
        model.save_pretrained(folder)
        gen, multiple = rng("vae_inputs", name), 2 ** (levels - 1)
        latents = (BATCH, config["latent_channels"], ROWS, COLUMNS)
        ins = {"images": np.tanh(normal(gen, (BATCH, 3, ROWS * multiple, COLUMNS * multiple))),
               "noise": normal(gen, latents), "latents": normal(gen, latents)}
        runs = {kind: run(model, ins, getattr(torch, kind)) for kind in ("float64", "float32", "bfloat16")}
        # `to(bfloat16)` rounded the weights for good, so it is last.
        double = runs["float64"]
        if name == "sd":
            logvar = double["out/logvar"]
            assert (logvar == -30).any() and (logvar == 20).any() and (abs(logvar) < 20).mean() > 0.5, "bounds"
        meta = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "versions": {"diffusers": json.load(open(folder / "config.json"))["_diffusers_version"],
                         "torch": torch.__version__.split("+")[0]},
        } | {f"pytorch_{kind}_rel_l2": {k: rel_l2(runs[kind][k], double[k]) for k in double}
             for kind in ("float32", "bfloat16")}
        print(name, meta)
        tensors = {f"in/{k}": v for k, v in ins.items()} | {k: v.astype(np.float32) for k, v in double.items()}
        write(folder / "io.safetensors", tensors, meta)
        for path in sorted(folder.iterdir()):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
