"""This program and PyTorch in turns on the same machine: seconds of a denoising step and of decoding, and memory.

Usage: python speed.py --sdxl FOLDER --sd15 FOLDER [--program target/release/maxdiff-rs] [--only NAME] [--steps 8]

random_model.py makes the FOLDERs. For each case PyTorch in bfloat16 runs first (forward_torch.py: the fastest of its
runs), then `generate` in bfloat16 and in int8 (the mean over its steps, the first and the sampler included, so the
comparison is not in its favour). Prints a line of Markdown table for each case as soon as it is known; ratios are this
program's seconds over PyTorch's. Peak memory is of the whole process: text encoders, UNet and VAE one after the other
here, the one model alone in PyTorch.
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


def torch(folder, part, latents, rows, runs):
    script = ROOT / "scripts/peers/forward_torch.py"
    return last_json([sys.executable, script, folder, "--part", part, f"--latents={latents}", f"--rows={rows}",
                      f"--runs={runs}"])


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
    arguments = arguments.parse_args()
    print("| case | PyTorch bf16 | bf16 | ratio | int8 | ratio | peak GB PyTorch, bf16, int8 |")
    print("|---|---|---|---|---|---|---|", flush=True)
    row = "| {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.1f}, {:.1f}, {:.1f} |"
    decoded = set()
    for name in arguments.only or CASES:
        family, recipe, latents, rows = CASES[name]
        folder = getattr(arguments, family)
        if folder is None:
            continue
        peer = torch(folder, "unet", latents, rows, arguments.steps)
        runs = [ours(arguments.program, recipe, folder, latents, rows, arguments.steps, *settings)
                for settings in ([], ["quantization=int8"])]
        step = [run["seconds"]["denoise"] / run["unet_runs"] for run in runs]
        peaks = [peer["peak_bytes"], *(run["peak_host_bytes"] for run in runs)]
        print(row.format(f"{name} step", peer["least"], step[0], step[0] / peer["least"], step[1],
                         step[1] / peer["least"], *(peak / 1e9 for peak in peaks)), flush=True)
        if (family, latents) not in decoded:
            decoded.add((family, latents))
            peer = torch(folder, "vae", latents, 1, 2)
            decode = [run["seconds"]["decode"] for run in runs]
            print(row.format(f"{family}-{latents} decode", peer["least"], decode[0], decode[0] / peer["least"],
                             decode[1], decode[1] / peer["least"], peer["peak_bytes"] / 1e9,
                             *(run["peak_host_bytes"] / 1e9 for run in runs)), flush=True)


if __name__ == "__main__":
    main()
