"""Whole tiny PixArt pipelines: folders in diffusers' layout, and the results of its PixArtAlphaPipeline and PixArtSigmaPipeline.

Usage: python pixart_pipeline.py (after pipeline.py and t5_tokenizer.py, whose autoencoder and vocabulary it uses)

Writes tests/golden/pipeline_pixart_{alpha,sigma}/: the folder of a pipeline (float16 weights; left out are the autoencoder,
which is that of pipeline_sd15, T5, which is that of pipeline_flux_dev, and the tokenizer, which is that of
tests/golden/t5_tokenizer) and io.safetensors with in/latents (unit normal), out/latents after the last step and out/images
(decoded, in [0, 1]). The metadata has the prompts, the negative prompt, the steps, the guidance and the length of T5's
sequences. All in float32 on the CPU, as diffusers computes it, from the weights rounded to float16.
"""

import shutil
import tempfile

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (AutoencoderKL, DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtSigmaPipeline,
                       PixArtTransformer2DModel)
from transformers import T5Tokenizer

from common import GOLDEN, normal, report, rng, write
from flux_pipeline import tiny_t5

# Captions are made lower case.
PROMPTS, NEGATIVE = ["A red Castle above a blue river", "grün Café, 绿色 lighthouse"], "Fog"
LENGTH = 24
HEIGHT, WIDTH = 16, 24
TRANSFORMER = dict(in_channels=4, out_channels=8, num_layers=2, attention_head_dim=12, num_attention_heads=2,
                   cross_attention_dim=24, caption_channels=20)
# A side of 128 latents has the pipeline of alpha give the size.
KINDS = {
    "alpha": dict(pipeline=PixArtAlphaPipeline, transformer=dict(sample_size=128)),
    "sigma": dict(pipeline=PixArtSigmaPipeline,
                  transformer=dict(sample_size=8, interpolation_scale=2, use_additional_conditions=False)),
}
STEPS, GUIDANCE = 20, 4.5


def randomize(model, name):
    """Random weights of a trained model's size, rounded to float16."""
    for key, param in model.named_parameters():
        gen = rng("pixart_pipeline", name, key)
        if param.ndim == 1 or key.endswith("scale_shift_table"):
            value = normal(gen, param.shape, scale=0.1)
        else:
            value = normal(gen, param.shape, scale=0.7 / np.sqrt(np.prod(param.shape[1:])))
        param.data = torch.from_numpy(np.asarray(value, np.float16).astype(np.float32))
    return model.eval()


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as alone:
        shutil.copy(GOLDEN / "t5_tokenizer/spiece.model", alone)
        tokenizer = T5Tokenizer.from_pretrained(alone)
    vae = AutoencoderKL.from_pretrained(GOLDEN / "pipeline_sd15/vae", torch_dtype=torch.float32).eval()
    scheduler = DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    for name, kind in KINDS.items():
        transformer = randomize(PixArtTransformer2DModel(**TRANSFORMER, **kind["transformer"]), name)
        pipe = kind["pipeline"](tokenizer=tokenizer, text_encoder=tiny_t5(), vae=vae, transformer=transformer,
                                scheduler=scheduler)
        pipe.set_progress_bar_config(disable=True)
        folder = GOLDEN / f"pipeline_pixart_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        channels = vae.config.latent_channels
        latents = torch.from_numpy(normal(rng("pixart_pipeline", name, "latents"),
                                          (len(PROMPTS), channels, HEIGHT // 2, WIDTH // 2)))
        shared = dict(prompt=PROMPTS, negative_prompt=[NEGATIVE] * len(PROMPTS), height=HEIGHT, width=WIDTH,
                      num_inference_steps=STEPS, guidance_scale=GUIDANCE, max_sequence_length=LENGTH, latents=latents,
                      clean_caption=False, use_resolution_binning=False)
        with torch.no_grad():
            made = pipe(**shared, output_type="latent").images
            images = pipe(**shared, output_type="pt").images
        tensors = {"in/latents": latents.numpy(), "out/latents": made.numpy(), "out/images": images.numpy()}
        pipe.to(torch.float16).save_pretrained(folder)
        pipe.to(torch.float32)
        for part in ("tokenizer", "text_encoder", "vae"):
            shutil.rmtree(folder / part)
        meta = {"prompts": PROMPTS, "negative_prompt": NEGATIVE, "steps": STEPS, "length": LENGTH,
                "image_size": [HEIGHT, WIDTH], "call": {"guidance_scale": GUIDANCE},
                "versions": {"diffusers": diffusers.__version__, "transformers": transformers.__version__,
                             "torch": torch.__version__.split("+")[0]}}
        write(folder / "io.safetensors", tensors, meta)
        for path in sorted(folder.rglob("*.safetensors")):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
