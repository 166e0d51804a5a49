"""Writes an InceptionV3 with random weights for `evaluate --inception`, where the learned ones are not at hand.

Usage: python random_inception.py FILE.safetensors DIR

Weights are random signs of He's size, from seed 0; the norms' means and variances are those of the pictures in DIR (at most 128 of
them, spread evenly, on white), so that every feature varies. No feature is learned: a Fréchet distance of them compares the runs
of one table and nothing else. Needs torch, torch-fidelity, safetensors and Pillow.
"""

import pathlib
import sys
import tempfile

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3


class Unloaded(FeatureExtractorInceptionV3):
    """Without the weights that the constructor loads."""

    def load_state_dict(self, state):
        pass


def network():
    with tempfile.NamedTemporaryFile() as empty:
        torch.save({}, empty.name)
        return Unloaded("inception", ["2048"], feature_extractor_weights_path=empty.name)


def signs(shape, source):
    return torch.randint(0, 2, shape, generator=source) * 2.0 - 1.0


def fill(model):
    """Random weights, and norms that take over the statistics of the next batch."""
    source = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.weight.data = signs(module.weight.shape, source) * (2 / module.weight[0].numel()) ** 0.5
        elif isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = 1.0
        elif isinstance(module, torch.nn.Linear):
            module.weight.data = signs(module.weight.shape, source) * module.in_features ** -0.5


def on_white(image):
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def pictures(folder):
    files = sorted(file for file in folder.rglob("*") if file.suffix in {".png", ".jpg", ".jpeg", ".webp"})
    few = [files[at * len(files) // 128] for at in range(128)] if len(files) > 128 else files
    sides = [on_white(Image.open(file).convert("RGBA")).resize((299, 299)) for file in few]
    return torch.from_numpy(np.stack([np.asarray(side) for side in sides])).permute(0, 3, 1, 2)


def main():
    file, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    model = network()
    fill(model)
    # Its own norms are always in the mode of use; each takes over the statistics of what it sees once.
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.training = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        model.to(device)(pictures(folder).to(device))
    save_file({name: value.cpu().contiguous() for name, value in model.state_dict().items()}, file)


if __name__ == "__main__":
    main()
