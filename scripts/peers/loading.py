"""The speed of loading a model's weights, beside copying its files from the page cache to fresh memory.

Usage: python loading.py FOLDER [--recipe configs/base_xl.yml] [--program target/release/maxdiff-rs] [--rounds 3]

FOLDER is in diffusers' layout (random_model.py makes one). In turns: all weights are read into anonymous memory by as many
threads as there are processors, and `generate` draws an image of 256x256 pixels in one step, in bfloat16 and in int8, of
which the seconds of loading count: reading, converting, packing for the processor and, for int8, quantizing. Prints the
best of all rounds. Memory that a process has not touched before is cleared by the kernel first; both pay for that.
"""

import argparse
import concurrent.futures
import json
import mmap
import os
import pathlib
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHUNK = 16 << 20


def copy(files):
    """Seconds of reading all of `files` into fresh memory."""
    start = time.perf_counter()
    memory = [mmap.mmap(-1, path.stat().st_size) for path in files]
    opened = [os.open(path, os.O_RDONLY) for path in files]

    def read(part):
        which, at = part
        view = memoryview(memory[which])[at:at + CHUNK]
        if os.preadv(opened[which], [view], at) != len(view):
            raise OSError(f"{files[which]} is shorter than it was")

    parts = [(which, at) for which in range(len(files)) for at in range(0, len(memory[which]), CHUNK)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, parts))
    seconds = time.perf_counter() - start
    for file in opened:
        os.close(file)
    return seconds


def load(program, recipe, folder, *settings):
    """Seconds that `generate` spends on loading, and its peak memory."""
    with tempfile.TemporaryDirectory() as out:
        report = subprocess.run(
            [program, "generate", recipe, f"pretrained_model_name_or_path={folder}", "prompt=a lighthouse", "height=256",
             "width=256", "num_inference_steps=1", f"output_dir={out}", "run_name=loading", "--json", *settings],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    report = json.loads(report.splitlines()[-1])
    return report["seconds"]["load"], report["peak_host_bytes"]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--recipe", default=ROOT / "configs/base_xl.yml")
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments = arguments.parse_args()
    files = sorted(arguments.folder.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    best = {}
    for _ in range(arguments.rounds):
        found = {"copy": (copy(files), 0)}
        for name, settings in (("bfloat16", []), ("int8", ["quantization=int8"])):
            found[name] = load(arguments.program, arguments.recipe, arguments.folder, *settings)
        print({name: round(seconds, 1) for name, (seconds, _) in found.items()}, flush=True)
        best = {name: min(found[name], best.get(name, found[name])) for name in found}
    print(f"{size / 1e9:.2f} GB in {len(files)} files")
    for name, (seconds, peak) in best.items():
        ratio = best["copy"][0] / seconds
        print(f"{name}: {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s, {ratio:.2f} of the copy's rate"
              + (f", peak {peak / 1e9:.1f} GB" if peak else ""))


if __name__ == "__main__":
    main()
