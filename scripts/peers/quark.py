"""AMD Quark and this program's `quantize` in turns on the same safetensors of a UNet: seconds, memory, bytes, integers.

Usage: python quark.py [--size {small,sdxl}] [--folder FOLDER] [--work FOLDER] [--program target/release/maxdiff-rs] [--only CASE]

Writes a UNet with random weights in bfloat16 (random_model.py), sdxl of SDXL's size, or takes the one in FOLDER/unet. Cases: int8
with a scale a channel, convolutions too; int4 in groups of 64 and SVDQuant of rank 32 without calibration, both of linear layers
alone, because Quark has no groups for convolutions. Both leave in float what Quark's guide names for SDXL.

For each case Quark runs in a process of its own, then `quantize`, each from file to file. Seconds and peak memory are of whole
processes; of Quark's also its work without imports: reading, quantizing, writing. `copy` is the file copied and synchronized with the
disk. Prints a line of Markdown table for each as soon as it is known, and says in how many layers all integers are equal. Quark's
factors of SVDQuant are those of a whole decomposition, ours of a randomized one, so of this case the distance of the weights
is printed that each result stands for. Needs the packages of scripts/oracles/requirements-quark.txt, diffusers and transformers, g++.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time

import torch
from safetensors import safe_open

from measured import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = "diffusion_pytorch_model.safetensors"
# Patterns of Quark's guide for SDXL, and those of convolutions.
FLOAT = ["time_embedding", "add_time_proj", "conv_in", "conv_out"]
CONVOLUTIONS = ["conv1", "conv2", "conv_shortcut", "downsamplers", "upsamplers"]
RANK = 32
CASES = {
    "int8": (["quantization=int8_w8a16"], FLOAT),
    "int4": (["quantization=w4a16"], FLOAT + CONVOLUTIONS),
    "svdquant": (["quantization=svdquant_w4a16", f"svd_rank={RANK}"], FLOAT + CONVOLUTIONS),
}
SMALL = dict(block_out_channels=[128, 256], down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
             up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"], transformer_layers_per_block=[1, 2], attention_head_dim=[2, 4],
             cross_attention_dim=128, sample_size=16)


def write_unet(folder, size):
    """A folder in diffusers' layout with a UNet of random weights alone."""
    import diffusers

    import random_model

    config = random_model.configuration("sdxl/unet.json") | (SMALL if size == "small" else {})
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(**config)
    # One file, as this script reads it.
    random_model.SHARD = 1 << 62
    index = {"_class_name": "StableDiffusionXLPipeline"}
    index["unet"] = random_model.write_part(folder / "unet", model, torch.bfloat16, random_model.Numbers())
    index["scheduler"] = ["diffusers", "EulerDiscreteScheduler"]
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text(
        json.dumps(dict(random_model.SCHEDULER, _class_name="EulerDiscreteScheduler"), indent=2) + "\n")
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def quark(case, folder, out):
    """Quantizes with Quark; prints the seconds of its work."""
    # This file has the name of Quark's package.
    sys.path.remove(str(pathlib.Path(__file__).resolve().parent))
    import diffusers
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.algorithm.svdquant import build_quant_layer_config
    from quark.torch.quantization import Int8PerChannelSpec, QConfig, QLayerConfig
    from quark.torch.quantization.config.config import SVDQuantConfig

    start = time.perf_counter()
    model = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.bfloat16).eval()
    patterns = [f"*{pattern}*" for pattern in CASES[case][1]]
    if case == "int8":
        spec = Int8PerChannelSpec(symmetric=True, ch_axis=0, is_dynamic=False, round_method="half_even", scale_type="float")
        config = QConfig(global_quant_config=QLayerConfig(weight=spec.to_quantization_spec()), exclude=patterns)
    else:
        algorithms = [SVDQuantConfig(svd_rank=RANK, search_alpha=False, exclude_patterns=patterns, min_layer_size=RANK + 1)]
        config = QConfig(global_quant_config=build_quant_layer_config("w4a16"), exclude=[*patterns, "*correction*"],
                         algo_config=algorithms if case == "svdquant" else None)
    quantizer = ModelQuantizer(config)
    with torch.no_grad():
        model = quantizer.freeze(quantizer.quantize_model(model))
        export_safetensors(model, out, weight_format="real_quantized")
    print(json.dumps({"work": time.perf_counter() - start}))


def copy(source, target):
    """The seconds of copying a file to the disk."""
    start = time.perf_counter()
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - start


class Ours:
    """The weights of a checkpoint of `quantize`."""

    def __init__(self, folder):
        self.file = safe_open(folder / "unet" / FILE, "pt")
        self.names = set(self.file.keys())
        described = json.loads((folder / "unet/config.json").read_text())["quantization_config"]
        self.formats = {layer: group["weight"] for group in described["formats"] for layer in group["layers"]}

    def integers(self, layer):
        codes = self.file.get_tensor(f"{layer}.weight")
        if self.formats[layer]["element"] == "int8":
            return codes
        halves = torch.stack([codes & 0xF, codes >> 4], -1).reshape(codes.shape[0], -1).to(torch.int8)
        return torch.where(halves > 7, halves - 16, halves)

    def scale(self, layer):
        return self.file.get_tensor(f"{layer}.weight_scale").float()

    def factors(self, layer):
        names = [f"{layer}.svd_up.weight", f"{layer}.svd_down.weight"]
        return [self.file.get_tensor(name).float() for name in names] if set(names) <= self.names else None


class Quarks:
    """The weights of Quark's export. Of layers that it does not pack, convolutions, the floats that integers stand for."""

    ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

    def __init__(self, folder):
        self.file = safe_open(folder / FILE, "pt")
        self.names = set(self.file.keys())

    def at(self, layer):
        return f"{layer}.layer" if f"{layer}.layer.weight" in self.names else layer

    def integers(self, layer):
        weight = self.file.get_tensor(f"{self.at(layer)}.weight")
        if weight.dtype == torch.int8:
            return weight
        if weight.dtype == torch.int32:
            nibbles = torch.stack([weight >> (4 * at) & 0xF for at in range(8)], -1)
            integers = torch.empty_like(nibbles)
            integers[..., self.ORDER] = nibbles
            integers = integers.reshape(weight.shape[0], -1).T.to(torch.int8)
            return torch.where(integers > 7, integers - 16, integers)
        scale = self.scale(layer)
        return (weight.float() / scale.reshape(-1, *[1] * (weight.dim() - 1))).round().to(torch.int8)

    def scale(self, layer):
        packed, fake = (f"{self.at(layer)}.{name}.scale" for name in ["weight_quantizer", "_weight_quantizer"])
        scale = self.file.get_tensor(packed if packed in self.names else fake).float()
        return scale.T if scale.dim() == 2 else scale

    def factors(self, layer):
        names = [f"{layer}.correction.l2.weight", f"{layer}.correction.l1.weight"]
        return [self.file.get_tensor(name).float() for name in names] if set(names) <= self.names else None


def weight(side, layer):
    """What a layer's weight stands for, linear layers with their low-rank product."""
    integers, scale = side.integers(layer).float(), side.scale(layer)
    groups = scale.shape[1] if scale.dim() == 2 else 1
    found = (integers.reshape(integers.shape[0], groups, -1) * scale.reshape(-1, groups, 1)).reshape(integers.shape)
    factors = side.factors(layer)
    return found if factors is None else found + factors[0] @ factors[1]


def compared(case, folder, ours, quarks):
    """One sentence about the layers of both."""
    layers = sorted(ours.formats)
    if case != "svdquant":
        equal = sum(torch.equal(ours.integers(layer), quarks.integers(layer)) for layer in layers)
        same = sum(torch.equal(ours.scale(layer).flatten(), quarks.scale(layer).flatten()) for layer in layers)
        return f"integers equal in {equal} of {len(layers)} layers, scales in {same}"
    source = safe_open(folder / "unet" / FILE, "pt")
    errors = []
    for layer in layers:
        exact = source.get_tensor(f"{layer}.weight").float()
        errors.append([float((weight(side, layer) - exact).norm() / exact.norm()) for side in (quarks, ours)])
    mean = [sum(error[at] for error in errors) / len(errors) for at in (0, 1)]
    return f"mean error of {len(layers)} weights: Quark {mean[0]:.5f}, here {mean[1]:.5f}"


def row(case, program, seconds, work, peak, size, note=""):
    peak = f"{peak / 1e9:.2f}" if peak else ""
    work = f"{work:.1f}" if work else ""
    print(f"| {case} | {program} | {seconds:.1f} | {work} | {peak} | {size / 1e9:.3f} | {note} |", flush=True)


def ours(program, folder, case, out):
    settings, patterns = CASES[case]
    rules = ", ".join(f"{{path: '.*{re.escape(pattern)}.*', mode: none}}" for pattern in patterns if pattern not in FLOAT)
    command = [program, "quantize", ROOT / "configs/base_xl.yml", f"pretrained_model_name_or_path={folder}",
               "weights_dtype=bfloat16", "quantization_numerics=quark", "quantization_preset=quark", *settings, "--output", out]
    return run([*command, f"quant_rules=[{rules}]"] if rules else command)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--size", default="small", choices=["small", "sdxl"])
    arguments.add_argument("--folder", type=pathlib.Path)
    arguments.add_argument("--work", type=pathlib.Path)
    arguments.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--only", choices=list(CASES))
    arguments.add_argument("--quark", nargs=3, help=argparse.SUPPRESS)
    arguments = arguments.parse_args()
    if arguments.quark:
        case, folder, out = arguments.quark
        return quark(case, pathlib.Path(folder), out)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        work = pathlib.Path(work)
        folder = arguments.folder
        if folder is None:
            folder = work / "model"
            write_unet(folder, arguments.size)
        source = folder / "unet" / FILE
        print("| case | program | seconds | of which Quark's work | peak memory, GB | output, GB | |")
        print("|---|---|---|---|---|---|---|")
        row("", "copy", copy(source, work / "copy"), 0, 0, source.stat().st_size)
        (work / "copy").unlink()
        for case in CASES if arguments.only is None else [arguments.only]:
            theirs, mine = work / "quark", work / "ours"
            seconds, peak, printed = run([sys.executable, __file__, "--quark", case, folder, theirs])
            row(case, "Quark", seconds, json.loads(printed)["work"], peak, (theirs / FILE).stat().st_size)
            seconds, peak, _ = ours(arguments.program, folder, case, mine)
            note = compared(case, folder, Ours(mine), Quarks(theirs))
            row(case, "maxdiff-rs", seconds, 0, peak, (mine / "unet" / FILE).stat().st_size, note)
            shutil.rmtree(theirs)
            shutil.rmtree(mine)


if __name__ == "__main__":
    main()
