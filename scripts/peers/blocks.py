"""FLUX.1's blocks and PixArt's transformer at full size, in this program and in PyTorch, in one run on the same machine.

Usage: python blocks.py [--program target/release/maxdiff-rs] [--only NAME] [--pixels 512] [--runs 5]

Cases: `flux-double` and `flux-single`, FLUX.1 dev's transformer with one double or one single block (the layers around the
blocks are in it), and `pixart`, PixArt-Sigma's whole transformer, each on random weights in bfloat16 and the tokens of a
square image. For each case PyTorch runs first, in inference mode with scaled dot product attention and as many threads as
processors; then `module run` in bfloat16 and with quantization=int8. All times are the least of the runs after the first.
Prints a line of Markdown table for each case as soon as it is known: seconds, ratios of this program's over PyTorch's, and
how far all results are from PyTorch's in float32 (relative L2). The weights (at most 1.3 GB) lie in a temporary folder.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = ("flux-double", "flux-single", "pixart")


def published(family):
    return json.loads((ROOT / f"src/models/{family}").read_text())


def flux(double, single, pixels):
    config = published("flux/transformer_dev.json") | {"num_layers": double, "num_single_layers": single}
    side, text = pixels // 16, 512
    ids = np.zeros((side, side, 3), np.float32)
    ids[..., 1] += np.arange(side)[:, None]
    ids[..., 2] += np.arange(side)[None, :]
    inputs = {"hidden_states": (1, side * side, config["in_channels"]),
              "encoder_hidden_states": (1, text, config["joint_attention_dim"]),
              "pooled_projections": (1, config["pooled_projection_dim"])}
    given = {"timestep": np.array([0.5], np.float32), "guidance": np.array([3.5], np.float32),
             "img_ids": ids.reshape(-1, 3), "txt_ids": np.zeros((text, 3), np.float32)}
    return FluxTransformer2DModel, config, inputs, given


def pixart(pixels):
    config = published("pixart/transformer_sigma.json")
    side, text = pixels // 8, 300
    inputs = {"hidden_states": (1, config["in_channels"], side, side),
              "encoder_hidden_states": (1, text, config["caption_channels"])}
    given = {"timestep": np.array([500.0], np.float32), "encoder_attention_mask": np.ones((1, text), np.float32)}
    return PixArtTransformer2DModel, config, inputs, given


def made(name, pixels):
    return {"flux-double": lambda: flux(1, 0, pixels), "flux-single": lambda: flux(0, 1, pixels),
            "pixart": lambda: pixart(pixels)}[name]()


def model_of(kind, config, folder):
    """Random weights of a trained model's size, which are the same in every run."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = kind.from_config({k: v for k, v in config.items() if not k.startswith("_")}).eval()
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    return model


def peer(model, inputs, runs):
    tensors = {k: torch.from_numpy(v) for k, v in inputs.items()}
    # Positions are float32 in diffusers' pipeline too.
    kept = ("img_ids", "txt_ids", "timestep", "guidance")
    tensors = {k: v if k in kept else v.to(torch.bfloat16) for k, v in tensors.items()}
    more = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    more = more if isinstance(model, PixArtTransformer2DModel) else {}
    seconds = []
    with torch.inference_mode():
        for _ in range(runs + 1):
            start = time.perf_counter()
            sample = model(**tensors, **more).sample
            seconds.append(time.perf_counter() - start)
        exact = model.float()(**{k: v.float() for k, v in tensors.items()}, **more).sample
    return min(seconds[1:]), sample.float().numpy(), exact.numpy()


def ours(program, folder, inputs, runs, *settings):
    with tempfile.TemporaryDirectory() as out:
        out = pathlib.Path(out)
        save_file(inputs, out / "in.safetensors")
        call = [program, "module", "run", folder, "--inputs", out / "in.safetensors", "--outputs",
                out / "out.safetensors", f"--runs={runs + 1}", "--json", "hardware=cpu", "weights_dtype=bfloat16",
                "activations_dtype=bfloat16", *settings]
        found = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout
        return json.loads(found.strip().splitlines()[-1])["seconds"]["run"], load_file(out / "out.safetensors")["sample"]


def distance(found, expected):
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--only", action="append", choices=CASES)
    arguments.add_argument("--pixels", type=int, default=512)
    arguments.add_argument("--runs", type=int, default=5)
    arguments = arguments.parse_args()
    print("| case | PyTorch bf16 | bf16 | ratio | int8 | ratio | distance PyTorch bf16, bf16, int8 |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.only or CASES:
        kind, config, shapes, inputs = made(name, arguments.pixels)
        gen = np.random.default_rng(0)
        inputs |= {k: gen.standard_normal(shape, np.float32) for k, shape in shapes.items()}
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(kind, config, folder)
            least, theirs, expected = peer(model, inputs, arguments.runs)
            del model
            bf16, int8 = (ours(arguments.program, folder, inputs, arguments.runs, *settings)
                          for settings in ([], ["quantization=int8"]))
        print(f"| {name} {arguments.pixels}x{arguments.pixels} | {least:.3f} | {bf16[0]:.3f} | {bf16[0] / least:.2f} "
              f"| {int8[0]:.3f} | {int8[0] / least:.2f} | {distance(theirs, expected):.1e}, "
              f"{distance(bf16[1], expected):.1e}, {distance(int8[1], expected):.1e} |", flush=True)
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)


if __name__ == "__main__":
    main()
