"""This program and PyTorch in turns on one GPU: SDXL at 1024x1024 with guidance, seconds of a denoising step.

Usage: python gpu.py FOLDER [--program target/release/maxdiff-rs] [--images 1 4] [--quantization "" int8 fp8] [--compile default]

random_model.py makes the FOLDER. For each number of images PyTorch in bfloat16 runs first (forward_torch.py: torch.compile,
the median of its UNet's runs), then `generate` for each quantization, with its sampler. Each `generate` runs twice, of 20 and
of 60 steps, and the second finds its programs compiled: a step is a fortieth of the difference, without what the first steps
of a program take. Prints a line of Markdown table for each case as soon as it is known.
"""

import argparse
import pathlib
import sys

import speed
from speed import ROOT, last_json

LATENTS = 128
STEPS = (20, 60)


def torch(folder, images, mode):
    script = ROOT / "scripts/peers/forward_torch.py"
    return last_json([sys.executable, script, folder, f"--latents={LATENTS}", f"--rows={2 * images}", "--runs=20",
                      "--device=cuda", f"--compile={mode}"])


def ours(arguments, images, quantization, steps):
    return speed.ours(arguments.program, "base_xl.yml", arguments.folder, LATENTS, 2, steps,
                      "hardware=gpu", f"num_images_per_prompt={images}", f"quantization={quantization}")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--images", type=int, nargs="+", default=[1, 4])
    arguments.add_argument("--quantization", nargs="*", default=["", "int8", "fp8"])
    arguments.add_argument("--compile", default="default")
    arguments = arguments.parse_args()
    print("| images, in | seconds of a step | of PyTorch's | seconds to compile | of decoding |")
    print("|---|---|---|---|---|", flush=True)
    for images in arguments.images:
        peer = torch(arguments.folder, images, arguments.compile)
        print(f"| {images}, PyTorch {peer['torch']} bf16 on {peer['device']} | {peer['median']:.4f} | 1 | {peer['first']:.0f} | |",
              flush=True)
        for quantization in arguments.quantization:
            runs = [ours(arguments, images, quantization, steps) for steps in STEPS]
            seconds = [run["seconds"] for run in runs]
            step = (seconds[1]["denoise"] - seconds[0]["denoise"]) / (STEPS[1] - STEPS[0])
            print(f"| {images}, {quantization or 'bf16'} | {step:.4f} | {step / peer['median']:.2f} | "
                  f"{seconds[0]['compile']:.0f} | {seconds[1]['decode']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
