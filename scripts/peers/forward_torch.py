"""Seconds of a forward pass of diffusers' UNet or VAE decoder in PyTorch on this machine.

Usage: python forward_torch.py FOLDER [--part unet|vae] [--latents 32] [--rows 2] [--runs 5] [--dtype float32]
       [--device cuda] [--compile MODE]

FOLDER is a model in diffusers' layout (random_model.py makes one). Settings: inference mode, channels last, scaled dot
product attention. On processors as many threads as there are, and no torch.compile, which takes tens of minutes for this
model on two cores; on a GPU `--compile default` or another of its modes. Prints a line of JSON: the minimum and the median of
the runs after a warm-up run, how long that one took, and the peak memory of the process, or of the GPU. `speed.py` and
`gpu.py` compare it with this program.
"""

import argparse
import json
import pathlib
import resource
import statistics
import time

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def loaded(kind, arguments):
    model = kind.from_pretrained(arguments.folder / arguments.part, torch_dtype=arguments.dtype)
    return model.eval().to(arguments.device, memory_format=torch.channels_last)


def latents(arguments):
    sample = torch.randn(arguments.rows, 4, arguments.latents, arguments.latents, device=arguments.device,
                         dtype=arguments.dtype)
    return sample.to(memory_format=torch.channels_last)


def compiled(model, arguments):
    return torch.compile(model, mode=arguments.compile) if arguments.compile else model


def unet(arguments):
    model = loaded(UNet2DConditionModel, arguments)
    config, rows, place = model.config, arguments.rows, dict(device=arguments.device, dtype=arguments.dtype)
    sample, step = latents(arguments), torch.tensor(500, device=arguments.device)
    text = torch.randn(rows, 77, config.cross_attention_dim, **place)
    added = None
    if config.addition_embed_type == "text_time":
        features = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(rows, features, **place),
                 "time_ids": torch.full((rows, 6), 8.0 * arguments.latents, **place)}
    forward = compiled(model, arguments)
    return lambda: forward(sample, step, text, added_cond_kwargs=added)


def vae(arguments):
    model = loaded(AutoencoderKL, arguments)
    sample, forward = latents(arguments), compiled(model.decode, arguments)
    return lambda: forward(sample)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--part", choices=("unet", "vae"), default="unet")
    arguments.add_argument("--latents", type=int, default=32)
    arguments.add_argument("--rows", type=int, default=2)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments.add_argument("--compile", choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"))
    arguments = arguments.parse_args()
    arguments.dtype = DTYPES[arguments.dtype]
    forward = {"unet": unet, "vae": vae}[arguments.part](arguments)
    on_gpu = arguments.device == "cuda"
    seconds = []
    with torch.inference_mode():
        for _ in range(arguments.runs + 1):
            start = time.perf_counter()
            forward()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "least": min(seconds[1:]), "median": statistics.median(seconds[1:]), "runs": arguments.runs, "first": seconds[0],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else host_peak, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "device": torch.cuda.get_device_name() if on_gpu else "cpu"}))


if __name__ == "__main__":
    main()
