"""SDXL-Lightning on the tiny SDXL pipeline: distilled weights as a UNet and as a LoRA, and the results of diffusers.

Usage: python lightning.py (after pipeline.py, whose pipeline it uses)

Writes tests/golden/lightning/: unet.safetensors (a UNet's weights in float16), lora.safetensors (kohya's names, as
SDXL-Lightning's LoRAs have them) and io.safetensors with in/latents (unit normal) and the last latents of four steps
with trailing timesteps and no guidance: out/unet and out/lora (on the pipeline's own UNet) by EulerDiscreteScheduler, as
SDXL-Lightning's authors say, and out/both (the LoRA on the other UNet) by DDIMScheduler, as MaxDiffusion's recipe says. The
metadata has the prompts and the steps.
"""

import shutil

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DDIMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from safetensors.torch import save_file

from common import GOLDEN, normal, report, rng, write
from pipeline import PROMPTS, randomize
from textual_inversion import pipeline

FOLDER = GOLDEN / "lightning"
STEPS = 4
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.1."
# Layers of several kinds: linear, 3x3 convolution and 1x1 convolution.
LAYERS = ["time_embedding.linear_1", BLOCK + "attn1.to_q", BLOCK + "attn2.to_k", BLOCK + "attn2.to_out.0",
          BLOCK + "ff.net.0.proj", "up_blocks.1.attentions.1.proj_in", "mid_block.resnets.1.conv1",
          "down_blocks.1.resnets.0.conv_shortcut"]


def lora(unet):
    """Factors of rank 2 with alpha 2, so that each product counts by one."""
    tensors = {}
    for layer in LAYERS:
        weight = unet.get_submodule(layer).weight
        factors = {"lora_down": (2, *weight.shape[1:]), "lora_up": (weight.shape[0], 2, *(1,) * (weight.ndim - 2))}
        name = "lora_unet_" + layer.replace(".", "_")
        for factor, shape in factors.items():
            value = normal(rng("lightning", layer, factor), shape, scale=0.8 / np.sqrt(np.prod(shape[1:])))
            tensors[f"{name}.{factor}.weight"] = torch.from_numpy(np.asarray(value, np.float16))
        tensors[f"{name}.alpha"] = torch.tensor(2.0, dtype=torch.float16)
    return tensors


def main():
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    pipe = pipeline("sdxl")
    pipe.set_progress_bar_config(disable=True)
    own = pipe.unet
    other = randomize(UNet2DConditionModel.from_config(own.config), "unet_lightning")
    factors = lora(own)
    save_file({key: value.half() for key, value in other.state_dict().items()}, FOLDER / "unet.safetensors")
    save_file(factors, FOLDER / "lora.safetensors")
    latents = normal(rng("lightning", "latents"), (len(PROMPTS), 4, 8, 8))
    tensors = {"in/latents": latents}
    config = dict(pipe.scheduler.config)
    for case, unet, sampler, has_lora in (
            ("unet", other, EulerDiscreteScheduler, False), ("lora", own, EulerDiscreteScheduler, True),
            ("both", other, DDIMScheduler, True)):
        # As SDXL's scheduler_config.json has it for DDIM; Euler has no such keys.
        more = dict(clip_sample=False, set_alpha_to_one=False) if sampler is DDIMScheduler else {}
        pipe.register_modules(unet=unet)
        pipe.scheduler = sampler.from_config(config, timestep_spacing="trailing", **more)
        if has_lora:
            pipe.load_lora_weights(dict(factors))
            assert len(pipe.get_active_adapters()) == 1
        with torch.no_grad():
            tensors[f"out/{case}"] = pipe(prompt=PROMPTS, height=16, width=16, num_inference_steps=STEPS, guidance_scale=0.0,
                                          latents=torch.from_numpy(latents), output_type="latent").images.numpy()
        if has_lora:
            pipe.unload_lora_weights()
    write(FOLDER / "io.safetensors", tensors, {
        "prompts": PROMPTS, "steps": STEPS,
        "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0],
                     "transformers": transformers.__version__}})
    for name in ("unet", "lora"):
        report(FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    main()
