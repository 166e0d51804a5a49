"""LoRA files for transformers in every dialect, and the results of diffusers and PEFT with them.

Usage: python lora_transformers.py     (after flux.py, sd3.py, pixart.py and clip.py, whose tiny models it changes)

Writes tests/golden/lora_transformers/. Files, each the same factors where the names before the underscore are the same:
  flux_kohya (the original code's layers, alphas, and CLIP), flux_saved (by diffusers' `save_lora_weights`, with its
  metadata), flux_ai_toolkit (diffusers' names, alphas multiplied in), flux_comfy (`diffusion_model.` and PEFT's roles);
  fluxattention_xlabs and fluxattention_onetrainer (`lora_transformer_`): layers of attention only;
  fluxouter_kohya: layers outside the blocks;
  sd3_kohya (fused, the original code's names), sd3_saved (by diffusers); pixart_peft (a folder that PEFT saved).
`io.safetensors`: out/<case>/sample and out/flux/text_encoder for the inputs of the models' own folders, with the scale 0.7.
Cases are flux, fluxattention, fluxouter, sd3, pixart, and two: flux_kohya at 0.7 and fluxattention_xlabs at -0.4.

The files of one case give the same values, which this asserts; values are computed in float64 and rounded once. diffusers
0.42.1 has the sizes of FLUX.1 in its converter of kohya's files, which are replaced by the tiny model's; it gives
kohya's layers outside the blocks names that it then drops; it does not read kohya's names for Stable Diffusion 3. There
the values are those of the same factors by its own names.
"""

import inspect
import json
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin, SD3LoraLoaderMixin, lora_conversion_utils, lora_pipeline
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from common import GOLDEN, normal, record_loras, rel_l2, report, rng

FOLDER = GOLDEN / "lora_transformers"
SCALE = 0.7
CLASSES = {"flux_dev": FluxTransformer2DModel, "sd3_dual": SD3Transformer2DModel, "pixart_sigma": PixArtTransformer2DModel}
MIXINS = {"flux_dev": FluxLoraLoaderMixin, "sd3_dual": SD3LoraLoaderMixin}
QKV, ADDED = ["to_q", "to_k", "to_v"], ["add_q_proj", "add_k_proj", "add_v_proj"]
DOUBLE, SINGLE = "transformer_blocks.0.", "single_transformer_blocks.1."
# The original code's layer: (rank, alpha, diffusers' layers of its rows).
FLUX_ATTENTION = {
    "double_blocks.0.img_attn.qkv": (4, 4.0, [f"{DOUBLE}attn.{n}" for n in QKV]),
    "double_blocks.0.img_attn.proj": (2, 2.0, [f"{DOUBLE}attn.to_out.0"]),
    "double_blocks.0.txt_attn.qkv": (2, 2.0, [f"{DOUBLE}attn.{n}" for n in ADDED]),
    "double_blocks.0.txt_attn.proj": (2, 2.0, [f"{DOUBLE}attn.to_add_out"]),
}
FLUX = {
    "double_blocks.0.img_attn.qkv": (4, 2.0, [f"{DOUBLE}attn.{n}" for n in QKV]),
    "double_blocks.0.txt_attn.proj": (2, 1.0, [f"{DOUBLE}attn.to_add_out"]),
    "double_blocks.0.img_mlp.0": (2, 4.0, [f"{DOUBLE}ff.net.0.proj"]),
    "double_blocks.0.txt_mlp.2": (2, 1.0, [f"{DOUBLE}ff_context.net.2"]),
    "double_blocks.0.img_mod.lin": (2, 1.0, [f"{DOUBLE}norm1.linear"]),
    "single_blocks.1.linear1": (4, 1.0, [f"{SINGLE}attn.{n}" for n in QKV] + [f"{SINGLE}proj_mlp"]),
    "single_blocks.1.linear2": (2, 1.0, [f"{SINGLE}proj_out"]),
    "single_blocks.1.modulation.lin": (2, 1.0, [f"{SINGLE}norm.linear"]),
}
# None: the halves of the rows are swapped.
FLUX_OUTER = {
    "img_in": (2, 1.0, ["x_embedder"]),
    "txt_in": (2, 2.0, ["context_embedder"]),
    "time_in.in_layer": (2, 1.0, ["time_text_embed.timestep_embedder.linear_1"]),
    "vector_in.out_layer": (2, 1.0, ["time_text_embed.text_embedder.linear_2"]),
    "guidance_in.in_layer": (2, 1.0, ["time_text_embed.guidance_embedder.linear_1"]),
    "final_layer.adaLN_modulation.1": (2, 2.0, None),
    "final_layer.linear": (2, 2.0, ["proj_out"]),
}
JOINT = "transformer_blocks.{}."
SD3 = {
    "joint_blocks.0.x_block.attn.qkv": (4, 2.0, [f"transformer_blocks.0.attn.{n}" for n in QKV]),
    "joint_blocks.0.x_block.attn2.qkv": (2, 1.0, [f"transformer_blocks.0.attn2.{n}" for n in QKV]),
    "joint_blocks.1.context_block.attn.qkv": (2, 2.0, [f"transformer_blocks.1.attn.{n}" for n in ADDED]),
    "joint_blocks.1.context_block.mlp.fc1": (2, 1.0, ["transformer_blocks.1.ff_context.net.0.proj"]),
    "joint_blocks.2.x_block.mlp.fc2": (2, 1.0, ["transformer_blocks.2.ff.net.2"]),
    "joint_blocks.2.x_block.adaLN_modulation.1": (2, 1.0, ["transformer_blocks.2.norm1.linear"]),
    # The last one has two parts, in the other order.
    "joint_blocks.2.context_block.adaLN_modulation.1": (2, 1.0, None),
    "x_embedder.proj": (2, 1.0, ["pos_embed.proj"]),
    "y_embedder.mlp.0": (2, 1.0, ["time_text_embed.text_embedder.linear_1"]),
}
SWAPPED = {"final_layer.adaLN_modulation.1": "norm_out.linear",
           "joint_blocks.2.context_block.adaLN_modulation.1": "transformer_blocks.2.norm1_context.linear"}
TEXT = {f"text_model.encoder.layers.{layer}": (2, 1.0) for layer in ("0.self_attn.q_proj", "1.self_attn.out_proj", "1.mlp.fc1")}


def base(model):
    return CLASSES[model].from_pretrained(GOLDEN / model)


def factors(model, layers, name):
    """(down, up, alpha, parts) of the original code's layers. Updates are about as large as the weights."""
    weights, result = base(model).state_dict(), {}
    for layer, (rank, alpha, parts) in layers.items():
        parts = parts or [SWAPPED[layer]]
        shapes = [weights[f"{part}.weight"].shape for part in parts]
        out, (fan_in, *kernel) = sum(s[0] for s in shapes), shapes[0][1:]
        gen = rng("lora_transformers", name, layer)
        down = normal(gen, (rank, fan_in, *kernel), scale=1.0 / math.sqrt(fan_in * math.prod(kernel)))
        up = normal(gen, (out, rank, *(1 for _ in kernel)), scale=0.5 * math.sqrt(rank) / alpha)
        result[layer] = (torch.from_numpy(down), torch.from_numpy(up), alpha, [(p, s[0]) for p, s in zip(parts, shapes)])
    return result


def text_factors():
    weights, result = CLIPTextModel.from_pretrained(GOLDEN / "clip_quick_gelu").state_dict(), {}
    for layer, (rank, alpha) in TEXT.items():
        key = f"{layer}.weight"
        out, fan_in = weights[key if key in weights else key.removeprefix("text_model.")].shape
        gen = rng("lora_transformers", "text", layer)
        result[layer] = (torch.from_numpy(normal(gen, (rank, fan_in), scale=1.0 / math.sqrt(fan_in))),
                         torch.from_numpy(normal(gen, (out, rank), scale=0.5 * math.sqrt(rank) / alpha)), alpha)
    return result


def kohya(layers, text=None):
    state = {}
    named = [("lora_unet_", k, v[:3]) for k, v in layers.items()] + [("lora_te1_", k, v) for k, v in (text or {}).items()]
    for prefix, layer, (down, up, alpha) in named:
        name = prefix + layer.replace(".", "_")
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(alpha)}
    return state


def split(layers):
    """diffusers' layers, each with (down, up), alphas multiplied into the second factor."""
    state = {}
    for layer, (down, up, alpha, parts) in layers.items():
        up = up * (alpha / down.shape[0])
        if layer in SWAPPED:
            swapped = torch.cat([up[up.shape[0] // 2:], up[:up.shape[0] // 2]])
            assert torch.equal(swapped, lora_conversion_utils.swap_scale_shift(up))
            up = swapped
        for (part, _), rows in zip(parts, torch.split(up, [rows for _, rows in parts])):
            state[part] = (down, rows)
    return state


def by_diffusers_names(layers, text=None):
    state = {}
    for part, (down, up) in split(layers).items():
        state |= {f"transformer.{part}.lora_A.weight": down, f"transformer.{part}.lora_B.weight": up}
    for layer, (down, up, alpha) in (text or {}).items():
        state |= {f"text_encoder.{layer}.lora_A.weight": down,
                  f"text_encoder.{layer}.lora_B.weight": up * (alpha / down.shape[0])}
    return state


def comfy(layers, text):
    state = {}
    for layer, (down, up, alpha, _) in layers.items():
        state |= {f"diffusion_model.{layer}.lora_A.weight": down,
                  f"diffusion_model.{layer}.lora_B.weight": up * (alpha / down.shape[0])}
    for layer, (down, up, alpha) in text.items():
        state |= {f"text_encoders.clip_l.transformer.{layer}.lora_A.weight": down,
                  f"text_encoders.clip_l.transformer.{layer}.lora_B.weight": up * (alpha / down.shape[0])}
    return state


def xlabs(layers):
    names = {"img_attn.qkv": "qkv_lora1", "img_attn.proj": "proj_lora1", "txt_attn.qkv": "qkv_lora2",
             "txt_attn.proj": "proj_lora2"}
    state = {}
    for layer, (down, up, alpha, _) in layers.items():
        assert alpha == down.shape[0]
        kind, block, rest = layer.split(".", 2)
        name = f"{kind}.{block}.processor." + names[rest]
        state |= {f"{name}.down.weight": down, f"{name}.up.weight": up}
    return state


def onetrainer(layers):
    state = {}
    for part, (down, up) in split(layers).items():
        name = "lora_transformer_" + part.replace(".", "_")
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up,
                  f"{name}.alpha": torch.tensor(float(down.shape[0]))}
    return state


def save(name, state):
    FOLDER.mkdir(exist_ok=True)
    save_file({k: v.clone().contiguous() for k, v in sorted(state.items())}, FOLDER / f"{name}.safetensors")
    report(FOLDER / f"{name}.safetensors")


class Models:
    def __init__(self, model):
        self.name, self.transformer = model, base(model)
        self.text_encoder = CLIPTextModel.from_pretrained(GOLDEN / "clip_quick_gelu") if model == "flux_dev" else None

    def load(self, file, adapter="default_0"):
        """As the pipeline's `load_lora_weights`."""
        mixin = MIXINS[self.name]
        alphas = None
        if self.name == "flux_dev":
            state, alphas, metadata = mixin.lora_state_dict(str(file), return_alphas=True, return_lora_metadata=True)
        else:
            state, metadata = mixin.lora_state_dict(str(file), return_lora_metadata=True)
        kwargs = {"network_alphas": alphas} if self.name == "flux_dev" else {}
        mixin.load_lora_into_transformer(state, transformer=self.transformer, adapter_name=adapter, metadata=metadata,
                                         **kwargs)
        if self.text_encoder is not None and any(k.startswith("text_encoder.") for k in state):
            mixin.load_lora_into_text_encoder(state, network_alphas=alphas, text_encoder=self.text_encoder,
                                              prefix="text_encoder", adapter_name=adapter, metadata=metadata)
        # diffusers warns only of what it does not find.
        modules = [k for k in state if k.endswith(("down.weight", "lora_A.weight"))]
        assert len(self.layers(adapter)) == len(modules), (file, len(self.layers(adapter)), modules)

    def layers(self, adapter):
        models = [m for m in (self.transformer, self.text_encoder) if m is not None]
        return [m for model in models for m in model.modules() if isinstance(m, LoraLayer) and adapter in m.scaling]

    def scale(self, scales):
        for adapter in scales:
            for layer in self.layers(adapter):
                layer.set_adapter([a for a in scales if a in layer.scaling])
        for adapter, scale in scales.items():
            for layer in self.layers(adapter):
                layer.set_scale(adapter, scale)

    def results(self):
        io = load_file(GOLDEN / self.name / "io.safetensors")
        ins = {k.removeprefix("in/"): v for k, v in io.items() if k.startswith("in/") and k != "in/cotangent"}
        ins = {k: v.double() if v.is_floating_point() else v for k, v in ins.items()}
        if self.name == "pixart_sigma":
            ins["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
        out = {}
        with torch.no_grad():
            out["sample"] = self.transformer.double().eval()(**ins).sample
            if self.text_encoder is not None:
                ids = load_file(GOLDEN / "clip_quick_gelu" / "io.safetensors")["in/input_ids"]
                out["text_encoder"] = self.text_encoder.double().eval()(ids).last_hidden_state
        return {k: v.numpy() for k, v in out.items()}


def save_with_diffusers(name, models):
    parts = {"transformer": models.transformer}
    if models.text_encoder is not None and getattr(models.text_encoder, "peft_config", None):
        parts["text_encoder"] = models.text_encoder
    states, metadata = {}, {}
    for root, model in parts.items():
        states[f"{root}_lora_layers"] = get_peft_model_state_dict(model, adapter_name="default_0")
        config = model.peft_config["default_0"].to_dict()
        metadata[f"{root}_lora_adapter_metadata"] = config | {"target_modules": sorted(config["target_modules"])}
    MIXINS[models.name].save_lora_weights(str(FOLDER), weight_name=f"{name}.safetensors", **states, **metadata)
    path = FOLDER / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        kept = {LORA_ADAPTER_METADATA_KEY: file.metadata()[LORA_ADAPTER_METADATA_KEY]}
    save_file(load_file(path), path, metadata=kept)
    report(path)


def run(model, file, scale=SCALE, keep=None):
    models = Models(model)
    models.load(FOLDER / f"{file}.safetensors")
    if keep:
        save_with_diffusers(keep, models)
    models.scale({"default_0": scale})
    return models.results()


def same(file, found, expected):
    for key, value in expected.items():
        error = rel_l2(found[key], value)
        assert error < 1e-12, (file, key, error)


def with_tiny_sizes():
    """diffusers' converter of kohya's files, with the sizes of the tiny model."""
    config = base("flux_dev").config
    inner = config.num_attention_heads * config.attention_head_dim
    source = inspect.getsource(lora_conversion_utils._convert_kohya_flux_lora_to_diffusers)
    assert source.count("dims=[3072, 3072, 3072, 12288]") == 1
    source = source.replace("dims=[3072, 3072, 3072, 12288]", f"dims={[inner] * 3 + [4 * inner]}")
    exec(source, lora_conversion_utils.__dict__)
    lora_pipeline._convert_kohya_flux_lora_to_diffusers = lora_conversion_utils._convert_kohya_flux_lora_to_diffusers


def pixart_folder():
    """A folder that PEFT saved, as the LoRAs of PixArt that people publish are."""
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["attn1.to_q", "attn2.to_v", "ff.net.2", "proj_out"])
    model = peft.get_peft_model(base("pixart_sigma"), config)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = torch.from_numpy(normal(rng("lora_transformers", "pixart", name), tuple(param.shape), scale=0.3))
    target = FOLDER / "pixart_peft"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        target.mkdir(parents=True)
        shutil.copy(f"{folder}/adapter_model.safetensors", target)
        saved = json.loads(Path(folder, "adapter_config.json").read_text())
    saved["target_modules"].sort()
    (target / "adapter_config.json").write_text(json.dumps(saved, indent=2) + "\n")
    for path in sorted(target.iterdir()):
        report(path)
    models = Models("pixart_sigma")
    models.transformer = peft.PeftModel.from_pretrained(models.transformer, target).base_model.model
    models.scale({"default": SCALE})
    return models.results()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    shutil.rmtree(FOLDER, ignore_errors=True)
    with_tiny_sizes()
    cases = {}

    flux, text = factors("flux_dev", FLUX, "flux"), text_factors()
    save("flux_kohya", kohya(flux, text))
    save("flux_ai_toolkit", by_diffusers_names(flux, text))
    save("flux_comfy", comfy(flux, text))
    cases["flux"] = run("flux_dev", "flux_kohya", keep="flux_saved")
    for file in ("flux_ai_toolkit", "flux_saved"):
        same(file, run("flux_dev", file), cases["flux"])

    attention = factors("flux_dev", FLUX_ATTENTION, "attention")
    save("fluxattention_xlabs", xlabs(attention))
    save("fluxattention_onetrainer", onetrainer(attention))
    cases["fluxattention"] = run("flux_dev", "fluxattention_xlabs")
    same("onetrainer", run("flux_dev", "fluxattention_onetrainer"), cases["fluxattention"])

    models = Models("flux_dev")
    models.load(FOLDER / "flux_kohya.safetensors", "default_0")
    models.load(FOLDER / "fluxattention_xlabs.safetensors", "default_1")
    models.scale({"default_0": SCALE, "default_1": -0.4})
    cases["two"] = models.results()

    def by_own_names(model, layers):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "own.safetensors"
            save_file({k: v.clone().contiguous() for k, v in by_diffusers_names(layers).items()}, path)
            models = Models(model)
            models.load(path)
            kept = models
        return kept

    outer = factors("flux_dev", FLUX_OUTER, "outer")
    save("fluxouter_kohya", kohya(outer))
    models = by_own_names("flux_dev", outer)
    models.scale({"default_0": SCALE})
    cases["fluxouter"] = models.results()
    sd3 = factors("sd3_dual", SD3, "sd3")
    save("sd3_kohya", kohya(sd3))
    models = by_own_names("sd3_dual", sd3)
    save_with_diffusers("sd3_saved", models)
    models.scale({"default_0": SCALE})
    cases["sd3"] = models.results()
    same("sd3_saved", run("sd3_dual", "sd3_saved"), cases["sd3"])
    cases["pixart"] = pixart_folder()

    names = {"sd3": "sd3_dual", "pixart": "pixart_sigma"}
    plain = {model: Models(model).results() for model in CLASSES}
    record_loras(FOLDER, cases, lambda case: plain[names.get(case, "flux_dev")])


if __name__ == "__main__":
    main()
