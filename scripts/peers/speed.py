"""This program and PyTorch in turns on the same machine: seconds of a denoising step and of decoding, and memory.

Usage: python speed.py --sdxl FOLDER --sd15 FOLDER [--program target/release/maxdiff-rs] [--only NAME] [--steps 8] [--float32]

random_model.py makes the FOLDERs. For each case PyTorch in bfloat16 runs first (forward_torch.py: the fastest of its
runs), then `generate` in bfloat16 and in int8 (the mean over its steps, the first and the sampler included, so the
comparison is not in its favour); with --float32 both in float32 alone. Prints a line
of Markdown table for each case as soon as it is known; ratios are this program's seconds over PyTorch's. Peak memory is
of the whole process: text encoders, UNet and VAE one after the other here, the one model alone in PyTorch.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Family, recipe, side of the latents, rows of the UNet's batch.
CASES = {
    "sdxl-32-2": ("sdxl", "base_xl.yml", 32, 2),
    "sdxl-32-1": ("sdxl", "base_xl.yml", 32, 1),
    "sdxl-64-2": ("sdxl", "base_xl.yml", 64, 2),
    "sdxl-64-1": ("sdxl", "base_xl.yml", 64, 1),
    "sd15-64-2": ("sd15", "base15.yml", 64, 2),
    "sd15-64-1": ("sd15", "base15.yml", 64, 1),
}


def last_json(arguments):
    found = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(found.strip().splitlines()[-1])


def torch(folder, part, latents, rows, runs, dtype):
    script = ROOT / "scripts/peers/forward_torch.py"
    return last_json([sys.executable, script, folder, "--part", part, f"--latents={latents}", f"--rows={rows}",
                      f"--runs={runs}", f"--dtype={dtype}"])


def ours(program, recipe, folder, latents, rows, steps, *settings):
    with tempfile.TemporaryDirectory() as out:
        return last_json([
            program, "generate", ROOT / "configs" / recipe, f"pretrained_model_name_or_path={folder}",
            "prompt=a lighthouse", f"height={8 * latents}", f"width={8 * latents}", f"num_inference_steps={steps}",
            f"do_classifier_free_guidance={rows == 2}", f"output_dir={out}", "run_name=speed", "--json", *settings])


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--sdxl", type=pathlib.Path)
    arguments.add_argument("--sd15", type=pathlib.Path)
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--only", action="append", choices=CASES)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--float32", action="store_true")
    arguments = arguments.parse_args()
    dtype = "float32" if arguments.float32 else "bfloat16"
    variants = {"bf16": [], "int8": ["quantization=int8"]}
    if arguments.float32:
        variants = {"float32": ["weights_dtype=float32", "activations_dtype=float32"]}
    columns = " | ".join(f"{name} | ratio" for name in variants)
    print(f"| case | PyTorch {dtype} | {columns} | peak GB PyTorch, {', '.join(variants)} |")
    print("|---" * (3 + 2 * len(variants)) + "|", flush=True)

    def show(case, peer, seconds, runs):
        times = " | ".join(f"{each:.2f} | {each / peer['least']:.2f}" for each in seconds)
        peaks = [peer["peak_bytes"], *(run["peak_host_bytes"] for run in runs)]
        peaks = ", ".join(f"{peak / 1e9:.1f}" for peak in peaks)
        print(f"| {case} | {peer['least']:.2f} | {times} | {peaks} |", flush=True)

    decoded = set()
    for name in arguments.only or CASES:
        family, recipe, latents, rows = CASES[name]
        folder = getattr(arguments, family)
        if folder is None:
            continue
        peer = torch(folder, "unet", latents, rows, arguments.steps, dtype)
        runs = [ours(arguments.program, recipe, folder, latents, rows, arguments.steps, *settings)
                for settings in variants.values()]
        show(f"{name} step", peer, [run["seconds"]["denoise"] / run["unet_runs"] for run in runs], runs)
        if (family, latents) not in decoded:
            decoded.add((family, latents))
            peer = torch(folder, "vae", latents, 1, 2, dtype)
            show(f"{family}-{latents} decode", peer, [run["seconds"]["decode"] for run in runs], runs)


if __name__ == "__main__":
    main()
