"""LoRA files in every dialect, and the results of diffusers and PEFT with them.

Usage: python lora.py        (after unet.py and clip.py, whose tiny models it changes)

Writes tests/golden/lora/. The models are unet_sd15 with clip_quick_gelu, and unet_sdxl with clip_quick_gelu and
clip_gelu. One set of factors for each, written as
  sd15_kohya, sd15_diffusers (alpha multiplied into the factors), sd15_saved (by diffusers' `save_lora_weights`, with
  its metadata), sd15_attention (the attention layers only, as the first diffusers wrote them);
  sdxl_kohya, sdxl_sgm (kohya's names for SDXL, with the original code's blocks), sdxl_saved;
and two of their own: sd15_second (kohya), and peft/ (a folder that PEFT saved, with rank-stabilized scaling).
`io.safetensors`: out/<case>/sample, out/<case>/<text encoder> and some merged weights out/<case>/weight/<path>, for the
inputs of the models' own folders. Cases, with the scale each file counts by:
  sd15: 0.7; sdxl: 0.7; attention: sd15_attention 0.7; peft: 0.7;
  two: sd15_kohya 0.7 and sd15_second -0.4 in the UNet and 0.5 in the text encoder.
The files of one set give the same values, which this asserts; values are computed in float64 and rounded once. Alphas
are such that alpha / rank is a power of two, so that it can be multiplied into a factor exactly. They differ only
between layers outside attention: of kohya's files, diffusers 0.42.1 loses the alpha of an attention layer or of a layer
of a text encoder that is not the one most layers have (it looks for it under a name that PEFT does not match).
"""

import json
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from diffusers import UNet2DConditionModel
from diffusers.loaders import StableDiffusionLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from common import GOLDEN, normal, record_loras, rel_l2, report, rng

FOLDER = GOLDEN / "lora"
SCALE = 0.7
BLOCK = "down_blocks.{}.attentions.{}.transformer_blocks.0."
# Every kind of layer, in every kind of block: (rank, alpha).
UNET = {
    "conv_in": (2, 1.0),
    "time_embedding.linear_1": (2, 4.0),
    "mid_block.resnets.1.conv2": (2, 2.0),
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0": (4, 1.0),
    "conv_out": (2, 1.0),
}
for _key in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_k", "attn2.to_v"):
    UNET[BLOCK.format(1, 0) + _key] = (2, 1.0)
UNETS = {
    "sd15": UNET | {
        "down_blocks.0.attentions.0.proj_in": (2, 1.0),  # a 1x1 convolution
        BLOCK.format(0, 0) + "ff.net.0.proj": (4, 1.0),
        BLOCK.format(0, 1) + "ff.net.2": (2, 1.0),
        "down_blocks.0.resnets.1.conv1": (2, 1.0),
        "down_blocks.0.downsamplers.0.conv": (2, 1.0),
        "down_blocks.1.resnets.0.conv_shortcut": (2, 1.0),
        "down_blocks.1.resnets.0.time_emb_proj": (2, 1.0),
        "up_blocks.0.upsamplers.0.conv": (2, 1.0),
        "up_blocks.1.attentions.2.transformer_blocks.0.attn2.to_q": (2, 1.0),
        "up_blocks.2.resnets.1.conv_shortcut": (2, 1.0),
    },
    "sdxl": UNET | {
        "add_embedding.linear_2": (2, 1.0),
        "down_blocks.1.attentions.1.proj_in": (2, 1.0),  # linear
        "down_blocks.1.downsamplers.0.conv": (2, 1.0),
        "down_blocks.2.resnets.0.time_emb_proj": (2, 1.0),
        "down_blocks.2.attentions.1.transformer_blocks.1.ff.net.0.proj": (2, 1.0),
        "up_blocks.0.attentions.2.transformer_blocks.1.attn2.to_v": (2, 1.0),
        "up_blocks.1.upsamplers.0.conv": (2, 1.0),
        "up_blocks.2.resnets.2.conv1": (2, 1.0),
        "up_blocks.2.resnets.2.conv_shortcut": (2, 1.0),
    },
}
SECOND = {
    "conv_in": (2, 2.0),
    BLOCK.format(1, 0) + "attn1.to_q": (4, 1.0),
    BLOCK.format(1, 0) + "attn1.to_out.0": (2, 1.0),
}
TEXT = {f"text_model.encoder.layers.{layer}.{name}": (2, 1.0) for layer, name in [
    (0, "self_attn.q_proj"), (0, "self_attn.v_proj"), (1, "self_attn.out_proj"), (1, "mlp.fc1"), (2, "mlp.fc2")]}
# With an `out_proj`: without one, diffusers 0.42.1 leaves the attention layers of a kohya file's text encoder out.
TEXT_SECOND = {f"text_model.encoder.layers.{name}": (2, 1.0) for name in ("0.self_attn.k_proj", "0.self_attn.out_proj")}
TEXT_SECOND["text_model.encoder.layers.1.mlp.fc1"] = (4, 1.0)
# Merged weights to record.
RECORDED = {
    "sd15": ["conv_in", "down_blocks.0.attentions.0.proj_in", BLOCK.format(0, 0) + "ff.net.0.proj",
             "down_blocks.0.downsamplers.0.conv", "text_model.encoder.layers.1.mlp.fc1"],
    "sdxl": ["down_blocks.1.attentions.1.proj_in", "up_blocks.2.resnets.2.conv_shortcut"],
}


class Models:
    """Fresh copies of the base models, by the root of their paths."""

    def __init__(self, name: str):
        self.name = name
        self.parts = {
            "unet": UNet2DConditionModel.from_pretrained(GOLDEN / f"unet_{name}"),
            "text_encoder": CLIPTextModel.from_pretrained(GOLDEN / "clip_quick_gelu"),
        }
        if name == "sdxl":
            self.parts["text_encoder_2"] = CLIPTextModelWithProjection.from_pretrained(GOLDEN / "clip_gelu")
        self.mixin = StableDiffusionXLLoraLoaderMixin if name == "sdxl" else StableDiffusionLoraLoaderMixin

    def load(self, file, adapter="default_0"):
        """As the pipeline's `load_lora_weights`."""
        unet = self.parts["unet"]
        config = {"unet_config": unet.config} if self.name == "sdxl" else {}
        state, alphas, metadata = self.mixin.lora_state_dict(str(file), return_lora_metadata=True, **config)
        for root, model in self.parts.items():
            if not any(k.startswith(f"{root}.") for k in state):
                continue
            kwargs = {"network_alphas": alphas, "adapter_name": adapter, "metadata": metadata}
            if root == "unet":
                self.mixin.load_lora_into_unet(state, unet=model, **kwargs)
            else:
                self.mixin.load_lora_into_text_encoder(state, text_encoder=model, prefix=root, **kwargs)
            # diffusers warns only of what it does not find.
            modules = [k for k in state if k.startswith(f"{root}.") and k.endswith(("down.weight", "lora_A.weight"))]
            taken = [layer for layer in self.layers(root).values() if adapter in layer.scaling]
            assert len(taken) == len(modules), (file, root, len(taken), len(modules))

    def layers(self, root):
        found = {n: m for n, m in self.parts[root].named_modules() if isinstance(m, LoraLayer)}
        return {n if root == "unet" or n.startswith("text_") else f"text_model.{n}": m for n, m in found.items()}

    def scale(self, scales):
        """`scales` by adapter and root."""
        for root in self.parts:
            for layer in self.layers(root).values():
                layer.set_adapter([a for a in scales if a in layer.scaling])
                for adapter in scales:
                    if adapter in layer.scaling:
                        layer.set_scale(adapter, scales[adapter]["unet" if root == "unet" else "text_encoder"])

    def results(self, recorded=()):
        """Outputs and merged weights in float64."""
        out = {}
        io = load_file(GOLDEN / f"unet_{self.name}" / "io.safetensors")
        with torch.no_grad():
            unet = self.parts["unet"].double().eval()
            added = {k: io[f"in/{k}"].double() for k in ("text_embeds", "time_ids") if f"in/{k}" in io}
            out["sample"] = unet(io["in/sample"].double(), io["in/timestep"], io["in/encoder_hidden_states"].double(),
                                 added_cond_kwargs=added or None).sample
            for root, model in self.parts.items():
                if root != "unet":
                    folder = "clip_gelu" if root.endswith("_2") else "clip_quick_gelu"
                    ids = load_file(GOLDEN / folder / "io.safetensors")["in/input_ids"]
                    encoded = model.double().eval()(ids)
                    out[root] = encoded.text_embeds if root.endswith("_2") else encoded.last_hidden_state
                for path, layer in self.layers(root).items():
                    if path in recorded:
                        delta = sum(layer.get_delta_weight(a) for a in layer.active_adapters)
                        out[f"weight/{root}/{path}.weight"] = layer.get_base_layer().weight + delta
        return {k: v.double().numpy() for k, v in out.items()}


def factors(models: Models, modules: dict, name: str) -> dict:
    """(down, up, alpha) of each module, by root and path. Updates are about as large as the weights."""
    result = {}
    for root, paths in modules.items():
        weights = {k if root == "unet" or k.startswith("text_") else f"text_model.{k}": v
                   for k, v in models.parts[root].state_dict().items()}
        for path, (rank, alpha) in paths.items():
            weight = weights[f"{path}.weight"]
            out, fan_in, *kernel = weight.shape
            gen = rng("lora", name, root, path)
            down = normal(gen, (rank, fan_in, *kernel), scale=1.0 / math.sqrt(fan_in * math.prod(kernel)))
            up = normal(gen, (out, rank, *(1 for _ in kernel)), scale=0.5 * math.sqrt(rank) / alpha)
            result[root, path] = (torch.from_numpy(down), torch.from_numpy(up), alpha)
    return result


def kohya(factors: dict, prefixes: dict, rename=lambda path: path) -> dict:
    state = {}
    for (root, path), (down, up, alpha) in factors.items():
        path = rename(path) if root == "unet" else path
        name = prefixes[root] + path.replace(".", "_")
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(alpha)}
    return state


def with_alpha(down, up, alpha):
    return down, up * (alpha / down.shape[0])


def new_diffusers(factors: dict) -> dict:
    state = {}
    for (root, path), values in factors.items():
        down, up = with_alpha(*values)
        middle = "lora" if root == "unet" else "lora_linear_layer"
        state |= {f"{root}.{path}.{middle}.down.weight": down, f"{root}.{path}.{middle}.up.weight": up}
    return state


def old_diffusers(factors: dict) -> dict:
    state = {}
    for (root, path), values in factors.items():
        down, up = with_alpha(*values)
        names = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}
        parent, _, last = path.removesuffix(".0").rpartition(".")
        module = f"{parent}.processor.{last}" if root == "unet" else f"{parent}.{names[last]}"
        state |= {f"{root}.{module}_lora.down.weight": down, f"{root}.{module}_lora.up.weight": up}
    return state


def sgm(path: str) -> str:
    """The name in the original code of SDXL's UNet, of those in `UNETS` only, written out by hand."""
    for ours, theirs in [
        ("conv_in", "input_blocks.0.0"), ("conv_out", "out.2"), ("time_embedding.linear_1", "time_embed.0"),
        ("add_embedding.linear_2", "label_emb.0.2"), ("mid_block.resnets.1.conv2", "middle_block.2.out_layers.3"),
        ("mid_block.attentions.0.", "middle_block.1."), ("down_blocks.1.attentions.0.", "input_blocks.4.1."),
        ("down_blocks.1.attentions.1.", "input_blocks.5.1."),
        ("down_blocks.1.downsamplers.0.conv", "input_blocks.6.0.op"),
        ("down_blocks.2.resnets.0.time_emb_proj", "input_blocks.7.0.emb_layers.1"),
        ("down_blocks.2.attentions.1.", "input_blocks.8.1."), ("up_blocks.0.attentions.2.", "output_blocks.2.1."),
        ("up_blocks.1.upsamplers.0.conv", "output_blocks.5.2.conv"),
        ("up_blocks.2.resnets.2.conv1", "output_blocks.8.0.in_layers.2"),
        ("up_blocks.2.resnets.2.conv_shortcut", "output_blocks.8.0.skip_connection"),
    ]:
        if path.startswith(ours) and (ours.endswith(".") or path == ours):
            return theirs + path[len(ours):]
    raise ValueError(path)


def save(name: str, state: dict) -> None:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.safetensors"
    save_file({k: v.contiguous() for k, v in sorted(state.items())}, path)
    report(path)


def save_with_diffusers(name: str, models: Models) -> None:
    """What a training script writes: the state that PEFT gives, and PEFT's configuration as metadata."""
    states, metadata = {}, {}
    for root, model in models.parts.items():
        states[f"{root}_lora_layers"] = get_peft_model_state_dict(model, adapter_name="default_0")
        config = model.peft_config["default_0"].to_dict()  # `target_modules` is a set, which has no order
        metadata[f"{root}_lora_adapter_metadata"] = config | {"target_modules": sorted(config["target_modules"])}
    models.mixin.save_lora_weights(str(FOLDER), weight_name=f"{name}.safetensors", **states, **metadata)
    # Without the metadata's other key, `format`: the library keeps no order among several.
    path = FOLDER / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        kept = {LORA_ADAPTER_METADATA_KEY: file.metadata()[LORA_ADAPTER_METADATA_KEY]}
    save_file(load_file(path), path, metadata=kept)
    report(path)


def at(scale):
    return {"default_0": {"unet": scale, "text_encoder": scale}}


def same(case: str, dialect: str, found: dict, expected: dict) -> None:
    for key, value in expected.items():
        error = rel_l2(found[key], value)
        assert error < 1e-12, (case, dialect, key, error)


def peft_folder() -> dict:
    """A folder that PEFT itself saved: attention layers of the UNet, rank-stabilized."""
    unet = Models("sd15").parts["unet"]
    block = BLOCK.format(0, 1)
    layers = [block + "attn1.to_q", block + "attn2.to_v", "conv_in"]
    config = peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=layers, alpha_pattern={"attn2.to_v": 5})
    model = peft.get_peft_model(unet, config)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = torch.from_numpy(normal(rng("lora", "peft", name), tuple(param.shape), scale=0.3))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shutil.rmtree(FOLDER / "peft", ignore_errors=True)
        (FOLDER / "peft").mkdir(parents=True)
        shutil.copy(f"{folder}/adapter_model.safetensors", FOLDER / "peft")
        saved = json.loads(Path(folder, "adapter_config.json").read_text())
    # A set has no order; the file is to be the same on every run.
    saved["target_modules"].sort()
    (FOLDER / "peft" / "adapter_config.json").write_text(json.dumps(saved, indent=2) + "\n")
    for path in sorted((FOLDER / "peft").iterdir()):
        report(path)
    models = Models("sd15")
    models.parts["unet"] = peft.PeftModel.from_pretrained(models.parts["unet"], FOLDER / "peft").base_model.model
    for layer in models.layers("unet").values():
        layer.set_scale("default", SCALE)
    return {"sample": models.results()["sample"]}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    shutil.rmtree(FOLDER, ignore_errors=True)
    cases = {}

    first = factors(Models("sd15"), {"unet": UNETS["sd15"], "text_encoder": TEXT}, "sd15")
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te_"}
    save("sd15_kohya", kohya(first, prefixes))
    save("sd15_diffusers", new_diffusers(first))
    attention = {k: v for k, v in first.items() if "attn" in k[1]}
    save("sd15_attention", old_diffusers(attention))
    second = factors(Models("sd15"), {"unet": SECOND, "text_encoder": TEXT_SECOND}, "second")
    save("sd15_second", kohya(second, prefixes))

    def run(model: str, file: str, recorded=(), keep=None) -> dict:
        models = Models(model)
        models.load(FOLDER / f"{file}.safetensors")
        if keep:
            save_with_diffusers(keep, models)
        models.scale(at(SCALE))
        return models.results(recorded)

    cases["sd15"] = run("sd15", "sd15_kohya", RECORDED["sd15"], keep="sd15_saved")
    for dialect in ("sd15_diffusers", "sd15_saved"):
        same("sd15", dialect, run("sd15", dialect, RECORDED["sd15"]), cases["sd15"])
    cases["attention"] = run("sd15", "sd15_attention")

    models = Models("sd15")
    models.load(FOLDER / "sd15_kohya.safetensors", "default_0")
    models.load(FOLDER / "sd15_second.safetensors", "default_1")
    models.scale(at(SCALE) | {"default_1": {"unet": -0.4, "text_encoder": 0.5}})
    cases["two"] = models.results()

    xl = factors(Models("sdxl"), {
        "unet": UNETS["sdxl"], "text_encoder": TEXT, "text_encoder_2": TEXT | {"text_projection": (2, 1.0)}}, "sdxl")
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    # diffusers knows kohya's name of this layer in the original code only.
    save("sdxl_kohya", kohya(xl, prefixes, lambda path: path.replace("add_embedding.linear_2", "label_emb.0.2")))
    save("sdxl_sgm", kohya(xl, prefixes, sgm))
    cases["sdxl"] = run("sdxl", "sdxl_kohya", RECORDED["sdxl"], keep="sdxl_saved")
    for dialect in ("sdxl_sgm", "sdxl_saved"):
        same("sdxl", dialect, run("sdxl", dialect, RECORDED["sdxl"]), cases["sdxl"])
    cases["peft"] = peft_folder()

    # The formula itself, on every recorded weight.
    for case, all_factors in (("sd15", first), ("sdxl", xl)):
        models = Models(case)
        for key in (k for k in cases[case] if k.startswith("weight/")):
            _, root, path = key.removesuffix(".weight").split("/")
            down, up, alpha = (v.double() if torch.is_tensor(v) else v for v in all_factors[root, path])
            base = models.parts[root].get_submodule(path if root == "unet" else path.removeprefix("text_model.")).weight
            update = (up.flatten(1) @ down.flatten(1)).reshape(base.shape) * (SCALE * alpha / down.shape[0])
            assert rel_l2((base.double() + update).detach().numpy(), cases[case][key]) < 1e-12, key

    base = {name: Models(name).results() for name in ("sd15", "sdxl")}
    record_loras(FOLDER, cases, lambda case: base["sdxl" if case == "sdxl" else "sd15"])


if __name__ == "__main__":
    main()
