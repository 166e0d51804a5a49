"""A tiny `AutoencoderTiny`, the architecture of TAESD, in diffusers' own folder, and its results.

Usage: python vae_tiny.py (after pipeline.py, whose latents it decodes)

Writes tests/golden/vae_tiny/: config.json, diffusion_pytorch_model.safetensors, and io.safetensors with in/x (images in
[-1, 1]), out/latents, in/z (latents, some beyond the bound of 3), out/sample, and out/pipeline_sd15, the images of the last
latents of that pipeline, in [0, 1]. Computed in float64 from the float32 weights.
"""

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderTiny
from safetensors.numpy import load_file

from common import GOLDEN, normal, report, rng, write

FOLDER = GOLDEN / "vae_tiny"


def main():
    torch.set_num_threads(1)
    vae = AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 2),
                          num_decoder_blocks=(2, 1))
    for key, param in vae.named_parameters():
        gen = rng("vae_tiny", key)
        scale = 0.1 if param.ndim == 1 else 1.2 / np.sqrt(np.prod(param.shape[1:]))
        param.data = torch.from_numpy(normal(gen, param.shape, scale=scale))
    vae.save_pretrained(FOLDER)
    report(FOLDER / "diffusion_pytorch_model.safetensors")
    vae = vae.double().eval()
    x = np.clip(normal(rng("vae_tiny", "x"), (2, 3, 12, 16), scale=0.5), -1, 1)
    z = normal(rng("vae_tiny", "z"), (2, 4, 6, 8), scale=2.0)
    last = load_file(GOLDEN / "pipeline_sd15/io.safetensors")["out/latents"]
    with torch.no_grad():
        latents = vae.encode(torch.from_numpy(x).double()).latents
        decode = lambda z: vae.decode(torch.from_numpy(z).double()).sample.float().numpy()
        write(FOLDER / "io.safetensors",
              {"in/x": x, "out/latents": latents.float().numpy(), "in/z": z, "out/sample": decode(z),
               "out/pipeline_sd15": np.clip(decode(last / vae.config.scaling_factor) / 2 + 0.5, 0, 1)},
              {"versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})


if __name__ == "__main__":
    main()
