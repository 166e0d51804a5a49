"""A tiny `AutoencoderTiny`, the architecture of TAESD, in diffusers' own folder, and its results.

Usage: python vae_tiny.py (after pipeline.py, whose latents it decodes)

Writes tests/golden/vae_tiny/: config.json, diffusion_pytorch_model.safetensors, and io.safetensors with in/x (images in
[-1, 1]), out/latents, in/z (latents, some beyond the bound of 3), out/sample, and out/pipeline_sd15, the images of the last
latents of that pipeline, in [0, 1]; computed in float64 from the float32 weights. Also in float32 the last latents of ten steps
of the pipeline sd21 with this autoencoder, from its recorded image and mask: out/image_0.6 and out/mask_0.6.
"""

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import AutoencoderTiny, DDIMScheduler, StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
from diffusers import UNet2DConditionModel
from safetensors.numpy import load_file
from transformers import CLIPTextModel

from common import GOLDEN, normal, report, rng, write
from pipeline import GUIDANCE, NEGATIVE, PROMPTS
from textual_inversion import tokenizer

FOLDER = GOLDEN / "vae_tiny"


def from_image(vae):
    folder = GOLDEN / "pipeline_sd21"
    given = load_file(folder / "from_image.safetensors")
    part = lambda cls, name: cls.from_pretrained(folder / name, torch_dtype=torch.float32).eval()
    parts = dict(vae=vae, unet=part(UNet2DConditionModel, "unet"), text_encoder=part(CLIPTextModel, "text_encoder"),
                 tokenizer=tokenizer("<|endoftext|>"), scheduler=DDIMScheduler.from_pretrained(folder / "scheduler"),
                 safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    images, masks = ([PIL.Image.fromarray(given[f"in/{kind}"])] * len(PROMPTS) for kind in ("image", "mask"))
    outs = {}
    for kind, cls, more in (("image_0.6", StableDiffusionImg2ImgPipeline, {}),
                            ("mask_0.6", StableDiffusionInpaintPipeline, dict(mask_image=masks, height=16, width=16))):
        pipe = cls(**parts)
        pipe.set_progress_bar_config(disable=True)
        with torch.no_grad():
            outs[f"out/{kind}"] = pipe(
                prompt=PROMPTS, negative_prompt=[NEGATIVE] * len(PROMPTS), num_inference_steps=10, guidance_scale=GUIDANCE,
                image=images, strength=0.6, generator=[torch.Generator("cpu").manual_seed(i) for i in range(len(PROMPTS))],
                output_type="latent", **more).images.numpy()
    return outs


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
    outs = from_image(vae.eval())
    vae = vae.double()
    x = np.clip(normal(rng("vae_tiny", "x"), (2, 3, 12, 16), scale=0.5), -1, 1)
    z = normal(rng("vae_tiny", "z"), (2, 4, 6, 8), scale=2.0)
    last = load_file(GOLDEN / "pipeline_sd15/io.safetensors")["out/latents"]
    with torch.no_grad():
        latents = vae.encode(torch.from_numpy(x).double()).latents
        decode = lambda z: vae.decode(torch.from_numpy(z).double()).sample.float().numpy()
        write(FOLDER / "io.safetensors",
              {"in/x": x, "out/latents": latents.float().numpy(), "in/z": z, "out/sample": decode(z),
               "out/pipeline_sd15": np.clip(decode(last / vae.config.scaling_factor) / 2 + 0.5, 0, 1), **outs},
              {"versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})


if __name__ == "__main__":
    main()
