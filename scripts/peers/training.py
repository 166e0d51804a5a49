"""This program and PyTorch with PEFT in turns on the same machine: seconds of a training step, and memory.

Usage: python training.py --sdxl FOLDER --sd15 FOLDER [--program target/release/maxdiff-rs] [--only CASE] [--steps 4]

random_model.py makes the FOLDERs. For each case PyTorch in bfloat16 runs first (training_torch.py: the fastest of its steps
after the first), then `train` on one picture, its fastest step after the first too: on the folder in bfloat16 and, for
LoRAs, on the same UNet stored in int8. All weights are trained by AdamW8bit here and by AdamW with moments in bfloat16 there.
Prints a line of Markdown table for each run as soon as it is known. Peak memory is of the whole process, which here also
encodes the picture and its caption, compiles, and writes a checkpoint.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy
from PIL import Image

from measured import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Family, recipe, side of the latents, rank of the updates, what the run says beside that.
CASES = {
    "sdxl-lora": ("sdxl", "base_xl.yml", 64, 16, []),
    "sd15-lora": ("sd15", "base15.yml", 64, 16, []),
    "sd15-full": ("sd15", "base15.yml", 32, 0, ["optimizer_type=AdamW8bit", "stochastic_rounding=True"]),
}


def ours(program, recipe, folder, pictures, steps, settings):
    """The fastest step after the first, in seconds, the losses, and the peak bytes."""
    with tempfile.TemporaryDirectory() as out:
        _, peak, _ = run([program, "train", ROOT / "configs" / recipe, f"pretrained_model_name_or_path={folder}",
                          "hardware=cpu", "dataset_type=folder", f"train_data_dir={pictures}", f"max_train_steps={steps + 1}",
                          "weights_dtype=bfloat16", "log_period=1", "sample_every=-1", "checkpoint_every=-1",
                          f"output_dir={out}", "run_name=peer", *settings])
        lines = [json.loads(line) for line in (pathlib.Path(out) / "peer/metrics.jsonl").read_text().splitlines()]
    seconds = [line["perf/step_time_seconds"] for line in lines if "perf/step_time_seconds" in line]
    return min(seconds[1:]), [line["learning/loss"] for line in lines if "learning/loss" in line], peak


def stored_int8(program, recipe, folder, out):
    run([program, "quantize", ROOT / "configs" / recipe, f"pretrained_model_name_or_path={folder}", "weights_dtype=bfloat16",
         "quantization=int8_w8a16", "--output", out])
    return out


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--sdxl", type=pathlib.Path)
    arguments.add_argument("--sd15", type=pathlib.Path)
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--only", action="append", choices=CASES)
    arguments.add_argument("--steps", type=int, default=4)
    arguments = arguments.parse_args()
    print("| case | s a step | over PyTorch | peak GB | losses |\n|---|---|---|---|---|", flush=True)

    def row(name, seconds, peer, peak, losses):
        print(f"| {name} | {seconds:.2f} | {seconds / peer:.2f} | {peak / 1e9:.1f} | "
              f"{', '.join(f'{loss:.3f}' for loss in losses)} |", flush=True)

    for name in arguments.only or CASES:
        family, recipe, latents, rank, settings = CASES[name]
        folder = getattr(arguments, family)
        if folder is None:
            continue
        _, peak, printed = run([sys.executable, ROOT / "scripts/peers/training_torch.py", folder, f"--lora-rank={rank}",
                                f"--latents={latents}", f"--steps={arguments.steps}"])
        peer = json.loads(printed)
        row(f"{name}, PyTorch", peer["least"], peer["least"], peak, peer["losses"])
        with tempfile.TemporaryDirectory() as temporary:
            temporary = pathlib.Path(temporary)
            pictures = temporary / "pictures"
            pictures.mkdir()
            noise = numpy.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=numpy.uint8)
            Image.fromarray(noise).resize((8 * latents, 8 * latents)).save(pictures / "0.png")
            (pictures / "0.txt").write_text("a lighthouse on a cliff")
            settings = [f"resolution={8 * latents}", f"lora_rank={rank}", *settings]
            found = ours(arguments.program, recipe, folder, pictures, arguments.steps, settings)
            row(f"{name}, bf16", found[0], peer["least"], found[2], found[1])
            if rank:
                stored = stored_int8(arguments.program, recipe, folder, temporary / "int8")
                found = ours(arguments.program, recipe, stored, pictures, arguments.steps, settings)
                row(f"{name}, stored int8", found[0], peer["least"], found[2], found[1])


if __name__ == "__main__":
    main()
