"""Weights as nunchaku's files of SVDQuant have them, packed in the order of its GPU kernels.

Nothing here is random but the layers in float: codes, scales, factors and vectors are numbers of their layer's name, row and
column, which tests/foreign/nunchaku.rs computes too (`Numbers` there, `Layer` here).

tests/golden/pipeline_nunchaku/: the transformer of a FLUX.1 schnell of 128 channels in int4, by the names of older files, with
modulations in AWQ's packing. tests/golden/nunchaku/fp4.safetensors: layers in fp4 by the names of newer files; sdxl.safetensors: a
block of a UNet in int4.

The packing is written from `NunchakuWeightPacker` (nunchaku 1.1, `nunchaku/lora/flux/packer.py`) and `pack_w4` (deepcompressor,
`deepcompressor/backend/tinychat/utils.py`). `python nunchaku_files.py --check NUNCHAKU DEEPCOMPRESSOR` compares it with that code
in clones of both, on random numbers.
"""

import importlib.util
import json
import shutil
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from common import GOLDEN, normal, report, rng

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
HIDDEN, MLP, RANK = 128, 512, 16
CONFIG = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 64, "axes_dims_rope": [16, 24, 24], "guidance_embeds": False,
    "in_channels": 16, "joint_attention_dim": 20, "num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1,
    "out_channels": None, "patch_size": 1, "pooled_projection_dim": 16,
}


def tiled(matrix: np.ndarray, split: list[int], order: list[int]) -> np.ndarray:
    """The elements of a matrix whose dimensions are split, in another order of the parts."""
    return np.ascontiguousarray(matrix.reshape(split).transpose(order))


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """int8 [out, in / 2] of codes [out, in]: eight input features make a word, the first in its lowest bits."""
    out, inputs = codes.shape
    # A tile has 128 rows, of which 8 x (2 x 8), and 64 columns: 2 x 4 x 8.
    split = [out // 128, 8, 2, 8, inputs // 64, 2, 4, 8]
    nibbles = tiled(codes & 0xF, split, [0, 4, 1, 3, 6, 2, 5, 7]).astype(np.uint8).reshape(-1, 2)
    return (nibbles[:, 0] | nibbles[:, 1] << 4).view(np.int8).reshape(out, inputs // 2)


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """[groups, out] of 16-bit scales [out, groups]."""
    out, groups = scales.shape
    return tiled(scales, [out // 128, 8, 2, 4, 2, groups], [0, 5, 1, 3, 2, 4]).reshape(groups, out)


def pack_vector(vector: np.ndarray) -> np.ndarray:
    return pack_scales(vector[:, None]).reshape(-1)


def pack_small_scales(scales: np.ndarray) -> np.ndarray:
    """[groups, out] of 8-bit scales [out, groups]."""
    out, groups = scales.shape
    return tiled(scales, [out // 128, 4, 4, 8, groups // 4, 4], [0, 4, 3, 2, 1, 5]).reshape(groups, out)


def pack_factor(factor: np.ndarray, down: bool) -> np.ndarray:
    """[in, rank] of down [rank, in], [out, rank] of up [out, rank], in blocks of 16 x 16."""
    rows, columns = factor.shape
    split = [rows // 16, 2, 8, columns // 16, 2, 4, 2]
    order = [3, 0] if down else [0, 3]
    packed = tiled(factor, split, [*order, 2, 5, 1, 4, 6])
    return packed.reshape(columns, rows) if down else packed.reshape(rows, columns)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """int32 [out / 4, in / 2] of codes [out, in]: features that are 8 apart share 16 bits, four rows lie in turn."""
    out, inputs = codes.shape
    four = codes.reshape(out, inputs // 32, 4, 8).astype(np.uint16)
    words = four[:, :, 0] | four[:, :, 1] << 4 | four[:, :, 2] << 8 | four[:, :, 3] << 12
    words = tiled(words, [out // 4, 4, inputs // 64, 16], [0, 2, 1, 3])
    return words.reshape(out // 4, inputs).view(np.int32)


def in_turn(rows: np.ndarray, vectors: int) -> np.ndarray:
    """Rows of so many vectors, the first of each before the second."""
    return np.ascontiguousarray(rows.reshape(vectors, -1, *rows.shape[1:]).swapaxes(0, 1)).reshape(rows.shape)


class Layer:
    """The numbers of a layer."""

    def __init__(self, name: str, out: int, inputs: int):
        self.name, self.out, self.inputs, self.salt = name, out, inputs, sum(name.encode())

    def code(self, count: int) -> np.ndarray:
        o, i = np.indices((self.out, self.inputs))
        return (o * 7 + i * 13 + o * i % 11 + self.salt) % count

    def scale(self, group: int) -> np.ndarray:
        o, g = np.indices((self.out, self.inputs // group))
        return (8 + (o * 5 + g * 3 + self.salt) % 8) / 512

    def smooth(self) -> np.ndarray:
        return (4 + (np.arange(self.inputs) * 3 + self.salt) % 8) / 8

    def down(self) -> np.ndarray:
        r, i = np.indices((RANK, self.inputs))
        return ((r * 5 + i * 11 + self.salt) % 17 - 8) / 64

    def up(self) -> np.ndarray:
        o, r = np.indices((self.out, RANK))
        return ((o * 3 + r * 7 + self.salt) % 13 - 6) / 64

    def bias(self) -> np.ndarray:
        return ((np.arange(self.out) * 3 + self.salt) % 9 - 4) / 32

    def beside(self, names: list[str]) -> dict:
        """What stands beside codes and scales, by older or newer names."""
        smooth, original, down, up = names
        vector = lambda v: pack_vector(v.astype(BF16))
        return {f"{self.name}.{leaf}": tensor for leaf, tensor in {
            "bias": vector(self.bias()), smooth: vector(self.smooth()), original: vector(np.ones(self.inputs)),
            down: pack_factor(self.down().astype(BF16), True), up: pack_factor(self.up().astype(BF16), False),
        }.items()}

    def int4(self, names: list[str]) -> dict:
        codes, scales = self.code(15) - 7, self.scale(64).astype(BF16)
        return {f"{self.name}.qweight": pack_codes(codes), f"{self.name}.wscales": pack_scales(scales), **self.beside(names)}

    def fp4(self, names: list[str], channels: bool) -> dict:
        tensors = {f"{self.name}.qweight": pack_codes(self.code(16)),
                   f"{self.name}.wscales": pack_small_scales((self.scale(16) * 64).astype(E4M3)), **self.beside(names)}
        if channels:
            factors = (1 + np.arange(self.out) % 4) / 64
            return tensors | {f"{self.name}.wcscales": pack_vector(factors.astype(BF16))}
        return tensors | {f"{self.name}.wtscale": np.array([(1 + self.salt % 4) / 64], BF16)}

    def awq(self, vectors: int) -> dict:
        scale = self.scale(64)
        groups = np.zeros((16, self.out))
        shown = lambda m: np.concatenate([in_turn(m, vectors).T, groups[m.shape[1]:]]).astype(BF16)
        raised = self.bias().reshape(vectors, -1)
        for scales in {1, vectors - 2}:
            raised[scales] += 1
        return {f"{self.name}.qweight": pack_awq(in_turn(self.code(16), vectors)), f"{self.name}.wscales": shown(scale),
                f"{self.name}.wzeros": shown(-7 * scale), f"{self.name}.bias": in_turn(raised.reshape(-1), vectors).astype(BF16)}


OLDER = ["smooth", "smooth_orig", "lora_down", "lora_up"]
NEWER = ["smooth_factor", "smooth_factor_orig", "proj_down", "proj_up"]


def floats(shapes: dict) -> dict:
    def values(name, shape):
        gen = rng("nunchaku", name)
        if len(shape) == 1:
            return normal(gen, shape, BF16, scale=0.1) if name.endswith("bias") else (1 + normal(gen, shape, scale=0.1)).astype(BF16)
        return normal(gen, shape, BF16, scale=1 / np.sqrt(shape[1]))
    return {name: values(name, shape) for name, shape in shapes.items()}


def flux() -> dict:
    double, single = "transformer_blocks.0", "single_transformer_blocks.0"
    layers = {f"{double}.{kind}{context}": dims for context in ["", "_context"] for kind, dims in [
        ("qkv_proj", (3 * HIDDEN, HIDDEN)), ("out_proj", (HIDDEN, HIDDEN))]}
    layers |= {f"{double}.mlp{context}_fc{n}": dims for context in ["", "_context"] for n, dims in [
        (1, (MLP, HIDDEN)), (2, (HIDDEN, MLP))]}
    layers |= {f"{single}.{name}": dims for name, dims in {
        "qkv_proj": (3 * HIDDEN, HIDDEN), "out_proj": (HIDDEN, HIDDEN), "mlp_fc1": (MLP, HIDDEN), "mlp_fc2": (HIDDEN, MLP)}.items()}
    tensors = {}
    for name, dims in layers.items():
        tensors |= Layer(name, *dims).int4(OLDER)
    for name in ["norm1.linear", "norm1_context.linear"]:
        tensors |= Layer(f"{double}.{name}", 6 * HIDDEN, HIDDEN).awq(6)
    tensors |= Layer(f"{single}.norm.linear", 3 * HIDDEN, HIDDEN).awq(3)
    shapes = {f"{block}.{norm}.weight": (64,) for block, norms in [
        (double, ["norm_q", "norm_k", "norm_added_q", "norm_added_k"]), (single, ["norm_q", "norm_k"])] for norm in norms}
    linear = {"x_embedder": (HIDDEN, 16), "context_embedder": (HIDDEN, 20), "norm_out.linear": (2 * HIDDEN, HIDDEN),
              "proj_out": (16, HIDDEN)}
    embedders = [("timestep_embedder", 256), ("text_embedder", 16)]
    linear |= {f"time_text_embed.{name}.linear_{n}": (HIDDEN, dim) for name, inputs in embedders
               for n, dim in [(1, inputs), (2, HIDDEN)]}
    for name, dims in linear.items():
        shapes |= {f"{name}.weight": dims, f"{name}.bias": dims[:1]}
    return tensors | floats(shapes)


def save(path: Path, tensors: dict, dtype: str, group: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"method": "svdquant", "weight": {"dtype": dtype, "group_size": group}, "rank": RANK}
    # nunchaku's files have more keys; with one alone the file has the same bytes on every run.
    save_file(dict(sorted(tensors.items())), str(path), metadata={"quantization_config": json.dumps(described)})
    report(path)


def main() -> None:
    pipeline = GOLDEN / "pipeline_nunchaku"
    for name in ["model_index.json", "scheduler/scheduler_config.json"]:
        (pipeline / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(GOLDEN / "pipeline_flux_schnell" / name, pipeline / name)
    transformer = pipeline / "transformer"
    save(transformer / "diffusion_pytorch_model.safetensors", flux(), "int4", 64)
    (transformer / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")

    block = "single_transformer_blocks.3"
    fp4 = Layer(f"{block}.attn.to_qkv", 3 * HIDDEN, HIDDEN).fp4(NEWER, True)
    fp4 |= Layer(f"{block}.attn.to_out", HIDDEN, HIDDEN).fp4(NEWER, False) | Layer(f"{block}.mlp_fc2", HIDDEN, 2 * HIDDEN).fp4(NEWER, False)
    save(GOLDEN / "nunchaku" / "fp4.safetensors", fp4, "fp4_e2m1_all", 16)
    block = "down_blocks.1.attentions.0.transformer_blocks.0"
    unet = Layer(f"{block}.attn1.to_qkv", 3 * HIDDEN, HIDDEN).int4(NEWER) | Layer(f"{block}.ff.net.2", HIDDEN, 2 * HIDDEN).int4(NEWER)
    save(GOLDEN / "nunchaku" / "sdxl.safetensors", unet, "int4", 64)


def loaded(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check(nunchaku: Path, deepcompressor: Path) -> None:
    """Compares the packing with the original code's."""
    import torch

    for package in ["peer", "peer.lora", "peer.lora.flux"]:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    divide, pad = lambda x, d: -(-x // d), lambda t, **_: t
    sys.modules["peer.utils"] = types.SimpleNamespace(ceil_divide=divide)
    sys.modules["peer.lora.flux.utils"] = types.SimpleNamespace(pad=pad)
    packer = loaded(nunchaku / "nunchaku/lora/flux/packer.py", "peer.lora.flux.packer").NunchakuWeightPacker(bits=4)
    sys.modules["peer.tinychat"] = types.ModuleType("peer.tinychat")
    pack_w4 = loaded(deepcompressor / "deepcompressor/backend/tinychat/utils.py", "peer.tinychat.utils").pack_w4
    gen = rng("nunchaku", "check")
    bits = lambda array: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    same = lambda ours, theirs: np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(torch.uint8).numpy())
    for out, inputs in [(384, 256), (128, 640)]:
        codes = gen.integers(-8, 8, (out, inputs)).astype(np.int32)
        same(pack_codes(codes), packer.pack_weight(torch.from_numpy(codes.copy())))
        halves = lambda *dims: normal(gen, dims, BF16)
        scales, bias = halves(out, inputs // 64), halves(out)
        same(pack_scales(scales), packer.pack_scale(bits(scales).reshape(out, 1, -1, 1), group_size=64))
        same(pack_vector(bias), packer.pack_scale(bits(bias).reshape(out, 1), group_size=-1))
        small = np.abs(normal(gen, (out, inputs // 16), E4M3)).astype(BF16)
        same(pack_small_scales(small.astype(E4M3)), packer.pack_scale(bits(small).reshape(out, 1, -1, 1), group_size=16))
        for factor, down in [(halves(48, inputs), True), (halves(out, 48), False)]:
            same(pack_factor(factor, down), packer.pack_lowrank_weight(bits(factor), down=down))
        awq = gen.integers(0, 16, (out, inputs)).astype(np.int32)
        same(pack_awq(awq).reshape(out // 4, -1), pack_w4(torch.from_numpy(awq.copy())))
    print("equal to nunchaku's and deepcompressor's packing")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
