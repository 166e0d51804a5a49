"""One forward pass of a full-size UNet against diffusers, float32, on the same random weights and inputs.

Usage: python full_size.py FOLDER [--latents 32] [--rows 1] [--program target/release/maxdiff-rs]

FOLDER is a model in diffusers' layout (random_model.py makes one). Prints the relative L2 distance of the results; the
weights of SDXL take 10 GB here and, after that, there.
"""

import argparse
import pathlib
import subprocess
import tempfile

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]


def expected(folder, latents, rows):
    """Inputs by name, and diffusers' result."""
    generator = torch.Generator().manual_seed(0)
    model = UNet2DConditionModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    config = model.config
    inputs = {
        "sample": torch.randn(rows, config.in_channels, latents, latents, generator=generator),
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": torch.randn(rows, 77, config.cross_attention_dim, generator=generator),
    }
    added = None
    if config.addition_embed_type == "text_time":
        features = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(rows, features, generator=generator),
                 "time_ids": torch.full((rows, 6), 8.0 * latents)}
    with torch.inference_mode():
        result = model(inputs["sample"], inputs["timestep"], inputs["encoder_hidden_states"],
                       added_cond_kwargs=added).sample
    return {**inputs, **(added or {})}, result.clone()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--latents", type=int, default=32)
    arguments.add_argument("--rows", type=int, default=1)
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments = arguments.parse_args()
    inputs, result = expected(arguments.folder / "unet", arguments.latents, arguments.rows)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        save_file({name: value.contiguous() for name, value in inputs.items()}, folder / "in.safetensors")
        subprocess.run([
            arguments.program, "module", "run", arguments.folder / "unet", "--inputs", folder / "in.safetensors",
            "--outputs", folder / "out.safetensors", "weights_dtype=float32", "activations_dtype=float32",
            "precision=HIGHEST", "hardware=cpu"], check=True)
        found = load_file(folder / "out.safetensors")["sample"]
    distance = (found.double() - result.double()).norm() / result.double().norm()
    print(f"{arguments.folder}: relative L2 {distance:.2e}, largest value {result.abs().max():.3f}")


if __name__ == "__main__":
    main()
