"""Seconds of a forward pass of diffusers' UNet or VAE decoder in PyTorch, bfloat16, on this machine's processors.

Usage: python forward_torch.py FOLDER [--part unet|vae] [--latents 32] [--rows 2] [--runs 5]

FOLDER is a model in diffusers' layout (random_model.py makes one). Settings: inference mode, channels last, scaled dot
product attention, as many threads as processors; not torch.compile, which takes tens of minutes for this model on two
cores. Prints a line of JSON: the minimum and the median of the runs after a warm-up run, and the peak memory of the
process. `speed.py` compares it with this program.
"""

import argparse
import json
import pathlib
import resource
import statistics
import time

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel


def unet(arguments):
    model = UNet2DConditionModel.from_pretrained(arguments.folder / "unet", torch_dtype=torch.bfloat16)
    model = model.eval().to(memory_format=torch.channels_last)
    rows, side = arguments.rows, arguments.latents
    sample = torch.randn(rows, 4, side, side, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    text = torch.randn(rows, 77, model.config.cross_attention_dim, dtype=torch.bfloat16)
    added = None
    if model.config.addition_embed_type == "text_time":
        features = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(rows, features, dtype=torch.bfloat16),
                 "time_ids": torch.full((rows, 6), 8.0 * side, dtype=torch.bfloat16)}
    return lambda: model(sample, torch.tensor(500), text, added_cond_kwargs=added)


def vae(arguments):
    model = AutoencoderKL.from_pretrained(arguments.folder / "vae", torch_dtype=torch.bfloat16)
    model = model.eval().to(memory_format=torch.channels_last)
    rows, side = arguments.rows, arguments.latents
    latents = torch.randn(rows, 4, side, side, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    return lambda: model.decode(latents)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--part", choices=("unet", "vae"), default="unet")
    arguments.add_argument("--latents", type=int, default=32)
    arguments.add_argument("--rows", type=int, default=2)
    arguments.add_argument("--runs", type=int, default=5)
    arguments = arguments.parse_args()
    forward = {"unet": unet, "vae": vae}[arguments.part](arguments)
    seconds = []
    with torch.inference_mode():
        for _ in range(arguments.runs + 1):
            start = time.perf_counter()
            forward()
            seconds.append(time.perf_counter() - start)
    print(json.dumps({
        "least": min(seconds[1:]), "median": statistics.median(seconds[1:]), "runs": arguments.runs,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "torch": torch.__version__,
        "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
