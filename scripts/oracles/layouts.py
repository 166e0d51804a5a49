"""Layouts of Stable Diffusion, FLUX and PixArt checkpoints: which tensors of a single file are which of diffusers' and transformers'.

Usage: python layouts.py

Writes tests/golden/layouts/{sd1,sd2,sdxl,sdxl_refiner,flux,sd35,pixart}.json, each of one tiny model:

    file    [name, dtype, dims] of every tensor of the single file, in the original names, with what published files
            carry besides (averaged weights, noise schedule, positions)
    parts   for each part its class, the attributes it was made with, and [name, dims, sha256] of every tensor by
            diffusers' and transformers' names; the hash is cut to 12 digits

No values are stored: tensor number i of `file` holds the bytes of the 16-bit numbers that `pattern` makes of i, so a
test writes the same file. Expected tensors are what diffusers' own conversion makes of that file
(`convert_ldm_unet_checkpoint` and its siblings; for PixArt it is a script outside of the package, whose names are here); that they are exactly the parameters of the models is asserted here,
as is that the names made here for the file are those that diffusers reads.

Widths that tell the families apart are the real ones (768, 1024, 2048, 1280); everything else is tiny.
"""

import hashlib
import inspect
import json
import re

import numpy as np
import torch
from diffusers import (AutoencoderKL, FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel,
                       UNet2DConditionModel)
from diffusers.loaders import single_file_utils as single
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from common import GOLDEN, report

TEXT = dict(vocab_size=10, max_position_embeddings=5, hidden_size=16, intermediate_size=24, num_attention_heads=1,
            num_hidden_layers=2)
VAE = dict(block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
           up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=4, latent_channels=4)
XL = dict(addition_embed_type="text_time", addition_time_embed_dim=256, use_linear_projection=True,
          attention_head_dim=1, norm_num_groups=4)
DOWN, CROSS_DOWN, UP, CROSS_UP = "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"
MODELS = {
    "sd1": {
        "unet": dict(cross_attention_dim=768, block_out_channels=(8, 16), layers_per_block=2, attention_head_dim=8,
                     norm_num_groups=4, down_block_types=(CROSS_DOWN, DOWN), up_block_types=(UP, CROSS_UP)),
        "vae": dict(VAE, block_out_channels=(8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 3,
                    up_block_types=("UpDecoderBlock2D",) * 3),
        "text_encoder": dict(TEXT, hidden_act="quick_gelu"),
    },
    "sd2": {
        "unet": dict(cross_attention_dim=1024, block_out_channels=(8, 16), layers_per_block=1, attention_head_dim=1,
                     norm_num_groups=4, use_linear_projection=True, down_block_types=(CROSS_DOWN, DOWN),
                     up_block_types=(UP, CROSS_UP)),
        "vae": VAE,
        # diffusers leaves layer 23 out by its name, so there must be 24.
        "text_encoder": dict(TEXT, hidden_act="gelu", num_hidden_layers=23),
    },
    "sdxl": {
        "unet": dict(XL, cross_attention_dim=2048, block_out_channels=(8, 16, 24), layers_per_block=1,
                     transformer_layers_per_block=(1, 2, 3), projection_class_embeddings_input_dim=2816,
                     down_block_types=(DOWN, CROSS_DOWN, CROSS_DOWN), up_block_types=(CROSS_UP, CROSS_UP, UP)),
        "vae": VAE,
        "text_encoder": dict(TEXT, hidden_act="quick_gelu"),
        "text_encoder_2": dict(TEXT, hidden_act="gelu", hidden_size=20, projection_dim=12),
    },
    "sdxl_refiner": {
        "unet": dict(XL, cross_attention_dim=1280, block_out_channels=(8, 16, 24), layers_per_block=1,
                     transformer_layers_per_block=2, projection_class_embeddings_input_dim=2560,
                     down_block_types=(DOWN, CROSS_DOWN, DOWN), up_block_types=(UP, CROSS_UP, UP)),
        "vae": VAE,
        "text_encoder_2": dict(TEXT, hidden_act="gelu", projection_dim=12),
    },
    # Every level of this autoencoder has attention nowhere but in the middle, and no convolutions beside the latents.
    "flux": {
        "transformer": dict(in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=8,
                            num_attention_heads=3, joint_attention_dim=20, pooled_projection_dim=12,
                            guidance_embeds=True, axes_dims_rope=(2, 2, 4)),
        "vae": dict(VAE, use_quant_conv=False, use_post_quant_conv=False),
        "text_encoder": dict(TEXT, hidden_act="quick_gelu"),
        "text_encoder_2": dict(vocab_size=10, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3,
                               relative_attention_num_buckets=8, feed_forward_proj="gated-gelu"),
    },
    "sd35": {
        "transformer": dict(in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
                            joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=28,
                            pos_embed_max_size=3, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
        "vae": dict(VAE, use_quant_conv=False, use_post_quant_conv=False),
        "text_encoder": dict(TEXT, hidden_act="quick_gelu", projection_dim=16),
        "text_encoder_2": dict(TEXT, hidden_act="gelu", hidden_size=20, projection_dim=12),
        "text_encoder_3": dict(vocab_size=10, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3,
                               relative_attention_num_buckets=8, feed_forward_proj="gated-gelu"),
    },
    "pixart": {
        # The real size of a head, which no tensor tells.
        "transformer": dict(in_channels=4, out_channels=8, num_layers=2, attention_head_dim=72, num_attention_heads=1,
                            cross_attention_dim=72, caption_channels=6, sample_size=8, interpolation_scale=0.125,
                            use_additional_conditions=False),
    },
}
# The prefixes of text encoders in files that keep the names of transformers.
TEXT_PREFIXES = {
    "flux": {"text_encoder": "clip_l", "text_encoder_2": "t5xxl"},
    "sd35": {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"},
}


def pattern(index: int, count: int) -> np.ndarray:
    """`count` 16-bit numbers: finite as float16 and as bfloat16, and other ones in each row and each tensor."""
    n = (np.arange(count, dtype=np.uint64) + np.uint64(index * 65537)) * np.uint64(2654435761)
    return ((n & np.uint64(0xFFFFFFFF)) >> np.uint64(16)).astype(np.uint16) & np.uint16(0xBFFF)


def ldm_resnet(key: str) -> str:
    for new, old in (("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("norm2", "out_layers.0"),
                     ("conv2", "out_layers.3"), ("time_emb_proj", "emb_layers.1"),
                     ("conv_shortcut", "skip_connection")):
        key = key.replace(new, old)
    return key


def ldm_unet(key: str, config: dict) -> str:
    """The name in `openaimodel.UNetModel`."""
    layers = config["layers_per_block"]
    head, _, rest = key.partition(".")
    fixed = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
             "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
             "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
    for new, old in fixed.items():
        if key.startswith(new + "."):
            return old + key[len(new):]
    if head == "mid_block":
        kind, place, leaf = rest.split(".", 2)
        return f"middle_block.{2 * int(place)}.{ldm_resnet(leaf)}" if kind == "resnets" else f"middle_block.1.{leaf}"
    block, kind, place, leaf = rest.split(".", 3)
    block, place = int(block), int(place)
    if head == "down_blocks":
        first = 1 + block * (layers + 1)
        if kind == "downsamplers":
            return f"input_blocks.{first + layers}.0.op.{leaf.removeprefix('conv.')}"
        return f"input_blocks.{first + place}.{'0.' + ldm_resnet(leaf) if kind == 'resnets' else '1.' + leaf}"
    first = block * (layers + 1)
    if kind == "upsamplers":
        second = 2 if config["up_block_types"][block] == CROSS_UP else 1
        return f"output_blocks.{first + layers}.{second}.{leaf}"
    return f"output_blocks.{first + place}.{'0.' + ldm_resnet(leaf) if kind == 'resnets' else '1.' + leaf}"


def ldm_vae(key: str, config: dict) -> str:
    """The name in LDM's `AutoencoderKL`."""
    side, _, rest = key.partition(".")
    if side not in ("encoder", "decoder"):
        return key
    for new, old in (("mid_block.resnets.0", "mid.block_1"), ("mid_block.resnets.1", "mid.block_2"),
                     ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"), ("conv_norm_out", "norm_out"),
                     ("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out"),
                     ("mid_block.attentions.0.to_", "mid.attn_1."), ("conv_shortcut", "nin_shortcut"),
                     (".downsamplers.0.", ".downsample."), (".upsamplers.0.", ".upsample."), (".resnets.", ".block.")):
        rest = rest.replace(new, old)
    for new, old in (("down_blocks.", "down."), ("up_blocks.", "up.")):
        if rest.startswith(new):
            level, _, leaf = rest.removeprefix(new).partition(".")
            level = int(level) if old == "down." else len(config["block_out_channels"]) - 1 - int(level)
            rest = f"{old}{level}.{leaf}"
    return f"{side}.{rest}"


def open_clip(shapes: dict) -> dict:
    """Names and shapes of OpenCLIP's text tower for a text encoder of transformers."""
    out = {}
    for key, dims in shapes.items():
        key = key.removeprefix("text_model.")
        for new, old in (("encoder.layers.", "transformer.resblocks."), ("layer_norm1", "ln_1"),
                         ("layer_norm2", "ln_2"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"),
                         ("self_attn.out_proj", "attn.out_proj"),
                         ("final_layer_norm", "ln_final"), ("embeddings.token_embedding", "token_embedding"),
                         ("embeddings.position_embedding.weight", "positional_embedding"),
                         ("self_attn.q_proj.", "attn.in_proj_")):
            key = key.replace(new, old)
        if "k_proj" in key or "v_proj" in key:
            continue
        if "in_proj_" in key:
            dims = (3 * dims[0], *dims[1:])
        if key == "text_projection.weight":
            key, dims = "text_projection", dims[::-1]
        out[key] = dims
    width = shapes["text_model.final_layer_norm.weight"][0]
    return out | {"text_projection": out.get("text_projection", (width, width)), "logit_scale": ()}


def bfl(shapes: dict) -> dict:
    """Names and shapes of Black Forest Labs' `Flux` for a transformer of diffusers."""
    out = {}
    for name, dims in shapes.items():
        key = re.sub(r"^transformer_blocks\.", "double_blocks.", name)
        key = re.sub(r"^single_transformer_blocks\.", "single_blocks.", key)
        double = key.startswith("double_blocks.")
        for new, old in (("x_embedder.", "img_in."), ("context_embedder.", "txt_in."),
                         ("time_text_embed.timestep_embedder.", "time_in."),
                         ("time_text_embed.guidance_embedder.", "guidance_in."),
                         ("time_text_embed.text_embedder.", "vector_in."),
                         ("norm_out.linear.", "final_layer.adaLN_modulation.1."),
                         ("norm1.linear.", "img_mod.lin."), ("norm1_context.linear.", "txt_mod.lin."),
                         ("norm.linear.", "modulation.lin."),
                         ("attn.norm_added_q.weight", "txt_attn.norm.query_norm.scale"),
                         ("attn.norm_added_k.weight", "txt_attn.norm.key_norm.scale"),
                         ("attn.norm_q.weight", ("img_attn." if double else "") + "norm.query_norm.scale"),
                         ("attn.norm_k.weight", ("img_attn." if double else "") + "norm.key_norm.scale"),
                         ("attn.to_out.0.", "img_attn.proj."), ("attn.to_add_out.", "txt_attn.proj."),
                         ("ff.net.0.proj.", "img_mlp.0."), ("ff.net.2.", "img_mlp.2."),
                         ("ff_context.net.0.proj.", "txt_mlp.0."), ("ff_context.net.2.", "txt_mlp.2."),
                         ("attn.to_q.", "img_attn.qkv." if double else "linear1."),
                         ("attn.add_q_proj.", "txt_attn.qkv."), ("proj_mlp.", "linear1."),
                         ("proj_out.", "linear2." if key.startswith("single_blocks.") else "final_layer.linear.")):
            key = key.replace(new, old)
        if key.startswith(("time_in.", "guidance_in.", "vector_in.")):
            key = key.replace("linear_1.", "in_layer.").replace("linear_2.", "out_layer.")
        if "_proj." in key or "attn.to_" in key:
            continue
        rows = dims[0] * 3 if (".to_q." in name or ".add_q_proj." in name) else dims[0]
        # Queries, keys, values and the entry of the feed-forward layer.
        out[key] = (rows + out.get(key, (0,))[0], *dims[1:])
    return out


def mmdit(shapes: dict) -> dict:
    """Names and shapes of Stability AI's `MMDiT` for a transformer of diffusers."""
    out = {}
    for name, dims in shapes.items():
        key = re.sub(r"^transformer_blocks\.", "joint_blocks.", name)
        of_text = any(part in key for part in ("_context.", ".add_", "_added_", ".to_add_out."))
        side = "context_block." if of_text else "x_block."
        for new, old in (("pos_embed.proj.", "x_embedder.proj."), ("pos_embed.pos_embed", "pos_embed"),
                         ("time_text_embed.timestep_embedder.linear_1.", "t_embedder.mlp.0."),
                         ("time_text_embed.timestep_embedder.linear_2.", "t_embedder.mlp.2."),
                         ("time_text_embed.text_embedder.linear_1.", "y_embedder.mlp.0."),
                         ("time_text_embed.text_embedder.linear_2.", "y_embedder.mlp.2."),
                         ("norm_out.linear.", "final_layer.adaLN_modulation.1."),
                         ("norm1.linear.", side + "adaLN_modulation.1."),
                         ("norm1_context.linear.", side + "adaLN_modulation.1."),
                         ("attn.norm_added_q.", side + "attn.ln_q."), ("attn.norm_added_k.", side + "attn.ln_k."),
                         ("attn.norm_q.", side + "attn.ln_q."), ("attn.norm_k.", side + "attn.ln_k."),
                         ("attn2.norm_q.", side + "attn2.ln_q."), ("attn2.norm_k.", side + "attn2.ln_k."),
                         ("attn.to_out.0.", side + "attn.proj."), ("attn2.to_out.0.", side + "attn2.proj."),
                         ("attn.to_add_out.", side + "attn.proj."), ("attn.to_q.", side + "attn.qkv."),
                         ("attn2.to_q.", side + "attn2.qkv."), ("attn.add_q_proj.", side + "attn.qkv."),
                         ("ff.net.0.proj.", side + "mlp.fc1."), ("ff.net.2.", side + "mlp.fc2."),
                         ("ff_context.net.0.proj.", side + "mlp.fc1."), ("ff_context.net.2.", side + "mlp.fc2."),
                         ("proj_out.", "final_layer.linear.")):
            if new in key:
                key = key.replace(new, old)
                break
        if re.search(r"\.(to_[kv]|add_[kv]_proj)\.", key):
            continue
        out[key] = (dims[0] * 3, *dims[1:]) if ".qkv." in key else dims
    return out


PIXART = (("pos_embed.proj.", "x_embedder.proj."), ("caption_projection.linear_1.", "y_embedder.y_proj.fc1."),
          ("caption_projection.linear_2.", "y_embedder.y_proj.fc2."),
          ("adaln_single.emb.timestep_embedder.linear_1.", "t_embedder.mlp.0."),
          ("adaln_single.emb.timestep_embedder.linear_2.", "t_embedder.mlp.2."),
          ("adaln_single.linear.", "t_block.1."), ("attn1.to_out.0.", "attn.proj."), ("attn2.to_q.", "cross_attn.q_linear."),
          ("attn2.to_out.0.", "cross_attn.proj."), ("ff.net.0.proj.", "mlp.fc1."), ("ff.net.2.", "mlp.fc2."),
          ("attn1.to_", "attn.qkv."), ("attn2.to_", "cross_attn.kv_linear."), ("proj_out.", "final_layer.linear."))


def pixart(name: str) -> tuple[str, int, int]:
    """The name in `PixArtMS`, and which of how many equal parts of that tensor it is."""
    if name == "scale_shift_table":
        return "final_layer.scale_shift_table", 0, 1
    key = name.replace("transformer_blocks.", "blocks.")
    for new, old in PIXART:
        if new in key:
            letter = key.split(new)[1][0]
            key = re.sub(r"\.(qkv|kv_linear)\.[qkv]\.", r".\1.", key.replace(new, old))
            fused = {"attn1.to_": "qkv", "attn2.to_": "kv"}.get(new)
            return (key, fused.index(letter), len(fused)) if fused else (key, 0, 1)
    return key, 0, 1


def convert_flux(file: dict, config: dict) -> dict:
    """diffusers' conversion, which knows one width only."""
    source = inspect.getsource(single.convert_flux_transformer_checkpoint_to_diffusers)
    assert source.count("inner_dim = 3072") == 1
    width = config["attention_head_dim"] * config["num_attention_heads"]
    space = dict(vars(single))
    exec(source.replace("inner_dim = 3072", f"inner_dim = {width}"), space)
    prefix = "model.diffusion_model."
    return space["convert_flux_transformer_checkpoint_to_diffusers"](
        {key: value for key, value in file.items() if key.startswith(prefix)})


def shapes_of(model: torch.nn.Module, part: str) -> dict:
    """The parameters by the names of published checkpoints; transformers 5 leaves `text_model.` out in memory."""
    prefix = "text_model." if type(model) is CLIPTextModel else ""
    tensors = model.state_dict() if type(model) is SD3Transformer2DModel else dict(model.named_parameters())
    return {prefix + k: tuple(v.shape) for k, v in tensors.items()}


def build(part: str, config: dict) -> torch.nn.Module:
    with torch.device("meta"):
        if part == "unet":
            return UNet2DConditionModel(**config)
        if part == "transformer":
            kinds = {"pos_embed_max_size": SD3Transformer2DModel, "caption_channels": PixArtTransformer2DModel}
            return next((kinds[key] for key in kinds if key in config), FluxTransformer2DModel)(**config)
        if part == "vae":
            return AutoencoderKL(**config)
        if "d_ff" in config:
            return T5EncoderModel(T5Config(**config))
        kind = CLIPTextModelWithProjection if "projection_dim" in config else CLIPTextModel
        return kind(CLIPTextConfig(**config))


def single_file(name: str, shapes: dict) -> dict:
    """Names, element types and shapes of the single file."""
    file = {}
    if name == "pixart":
        for key, dims in shapes["transformer"].items():
            old, _, parts = pixart(key)
            file[old] = (dims[0] * parts, *dims[1:])
        file |= {"pos_embed": (1, 16, 72), "y_embedder.y_embedding": (300, 6)}
        return {key: ("F16", dims) for key, dims in sorted(file.items())}
    for key, dims in shapes.get("unet", {}).items():
        file["model.diffusion_model." + ldm_unet(key, MODELS[name]["unet"])] = dims
    for key, dims in (mmdit if name == "sd35" else bfl)(shapes.get("transformer", {})).items():
        file["model.diffusion_model." + key] = dims
    first_stage = "vae." if name == "flux" else "first_stage_model."
    for key, dims in shapes["vae"].items():
        linear = ".mid_block.attentions.0.to_" in key and key.endswith(".weight")
        file[first_stage + ldm_vae(key, MODELS[name]["vae"])] = (*dims, 1, 1) if linear else dims
    for part, prefix in TEXT_PREFIXES.get(name, {}).items():
        file |= {f"text_encoders.{prefix}.transformer.{key}": dims for key, dims in shapes[part].items()}
    if name == "sd35":
        # Its pooled output is used as it is.
        del file["text_encoders.clip_l.transformer.text_projection.weight"]
    if name in ("sd1", "sdxl"):
        prefix = "cond_stage_model.transformer." if name == "sd1" else "conditioner.embedders.0.transformer."
        file |= {prefix + key: dims for key, dims in shapes["text_encoder"].items()}
    if name == "sd2":
        tower = open_clip(shapes["text_encoder"])
        tower |= {k.replace(".22.", ".23."): dims for k, dims in tower.items() if ".22." in k}
        file |= {"cond_stage_model.model." + key: dims for key, dims in tower.items()}
    if name in ("sdxl", "sdxl_refiner"):
        prefix = f"conditioner.embedders.{int(name == 'sdxl')}.model."
        file |= {prefix + key: dims for key, dims in open_clip(shapes["text_encoder_2"]).items()}
    file = {key: ("F16", dims) for key, dims in file.items()}
    # What published files carry besides.
    if name in ("sd1", "sd2"):
        file |= {key: ("F32", (10,)) for key in ("alphas_cumprod", "betas", "sqrt_one_minus_alphas_cumprod")}
        file |= {"model_ema.decay": ("F32", ()), "model_ema.num_updates": ("I32", ())}
        file |= {"model_ema.diffusion_modeltime_embed0bias": ("F32", (32,))}
    elif name not in TEXT_PREFIXES:
        file |= {"denoiser.sigmas": ("F32", (10,))}
    if name == "sd1":
        file["cond_stage_model.transformer.text_model.embeddings.position_ids"] = ("I64", (1, 5))
    return dict(sorted(file.items()))


def fill(file: dict) -> dict:
    """The tensors of the single file."""
    types = {"F16": (torch.float16, 1), "F32": (torch.float32, 2), "I32": (torch.int32, 2), "I64": (torch.int64, 4)}
    tensors = {}
    for index, (key, (dtype, dims)) in enumerate(file.items()):
        kind, words = types[dtype]
        count = int(np.prod(dims, dtype=np.int64)) * words
        tensors[key] = torch.from_numpy(pattern(index, count).copy()).view(kind).reshape(dims)
    return tensors


def converted(name: str, file: dict, models: dict) -> dict:
    """The parts' tensors, as diffusers converts them."""
    if name == "pixart":
        placed = {key: pixart(key) for key in shapes_of(models["transformer"], "transformer")}
        return {"transformer": {key: file[old].chunk(parts)[which] for key, (old, which, parts) in placed.items()}}
    config = {part: dict(model.config) if part in ("unet", "vae") else None for part, model in models.items()}
    if name in TEXT_PREFIXES:
        under = {part: f"text_encoders.{prefix}.transformer." for part, prefix in TEXT_PREFIXES[name].items()}
        parts = {part: {key.removeprefix(prefix): value for key, value in file.items() if key.startswith(prefix)}
                 for part, prefix in under.items()}
        # diffusers leaves these to transformers, whose names they have.
        if name == "sd35":
            for part in ("text_encoder", "text_encoder_2"):
                parts[part] = single.convert_ldm_clip_checkpoint(dict(file), under[part])
            # As `create_diffusers_clip_model_from_ldm` does.
            parts["text_encoder"]["text_projection.weight"] = torch.eye(TEXT["hidden_size"], dtype=torch.float16)
            prefix = "model.diffusion_model."
            transformer = single.convert_sd3_transformer_checkpoint_to_diffusers(
                {key: value for key, value in file.items() if key.startswith(prefix)})
        else:
            transformer = convert_flux(file, MODELS[name]["transformer"])
        return parts | {"transformer": transformer,
                        "vae": single.convert_ldm_vae_checkpoint(dict(file), config["vae"])}
    parts = {"unet": single.convert_ldm_unet_checkpoint(dict(file), config["unet"]),
             "vae": single.convert_ldm_vae_checkpoint(dict(file), config["vae"])}
    if name in ("sd1", "sdxl"):
        parts["text_encoder"] = single.convert_ldm_clip_checkpoint(dict(file))
    if name == "sd2":
        parts["text_encoder"] = single.convert_open_clip_checkpoint(models["text_encoder"], dict(file))
    if name in ("sdxl", "sdxl_refiner"):
        prefix = f"conditioner.embedders.{int(name == 'sdxl')}.model."
        model = models["text_encoder_2"]
        parts["text_encoder_2"] = single.convert_open_clip_checkpoint(model, dict(file), prefix=prefix)
    for tensors in parts.values():
        for key in [k for k in tensors if k.endswith("position_ids")]:
            del tensors[key]
    return parts


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def main():
    for name, configs in MODELS.items():
        models = {part: build(part, config) for part, config in configs.items()}
        shapes = {part: shapes_of(model, part) for part, model in models.items()}
        file = single_file(name, shapes)
        parts = converted(name, fill(file), models)
        for part, tensors in parts.items():
            found = {k: tuple(v.shape) for k, v in tensors.items()}
            assert found == shapes[part], (name, part, sorted(found.items() ^ shapes[part].items())[:10])
        golden = {
            "file": [[key, dtype, list(dims)] for key, (dtype, dims) in file.items()],
            "parts": {part: {"class": type(models[part]).__name__, "config": configs[part],
                             "tensors": [[k, list(v.shape), sha256(v)] for k, v in sorted(tensors.items())]}
                      for part, tensors in parts.items()},
        }
        path = GOLDEN / "layouts" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # One tensor a line.
        text = json.dumps(golden, separators=(",", ":")).replace("],[\"", "],\n[\"")
        path.write_text(text + "\n")
        report(path)


if __name__ == "__main__":
    main()
