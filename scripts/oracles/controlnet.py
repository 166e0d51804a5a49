"""Tiny `ControlNetModel`s of the Stable Diffusion 1.5 and XL kinds and the UNets they control: weights, inputs and
outputs.

Usage: python controlnet.py

Writes tests/golden/controlnet_{sd15,sdxl}/{unet,controlnet}/ in diffusers' layout and beside them `io.safetensors`:
  in/sample, in/timestep, in/encoder_hidden_states, and for XL in/text_embeds and in/time_ids;
  in/image, in/scale, in/image_2, in/scale_2: two conditions of one ControlNet;
  out/down_block_res_samples.<i>, out/mid_block_res_sample: of the first condition (NCHW, as all images);
  out/sample: the UNet's with them; out/sample_2: with their sums with those of the second condition;
  out/alone: the UNet's without any.
Weights that start as zeros in training are random too. Values are computed in float64 from the float32 weights and
rounded once; the metadata says how far PyTorch's own float32 run is from them.
"""

import json
import math
import shutil

import numpy as np
import torch
from diffusers import ControlNetModel, UNet2DConditionModel

from common import GOLDEN, normal, rel_l2, report, rng, write

SHARED = dict(in_channels=4, layers_per_block=1, block_out_channels=(4, 8), norm_num_groups=2)
# What a ControlNet and its UNet have in common; what only the UNet has; what only the ControlNet has.
CONFIGS = {
    "sd15": (dict(SHARED, cross_attention_dim=6, attention_head_dim=2,
                  down_block_types=("CrossAttnDownBlock2D", "DownBlock2D")),
             dict(up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), sample_size=8),
             dict(conditioning_embedding_out_channels=(4, 6, 8))),
    "sdxl": (dict(SHARED, cross_attention_dim=6, attention_head_dim=(1, 2), use_linear_projection=True,
                  transformer_layers_per_block=(1, 2), addition_embed_type="text_time", addition_time_embed_dim=4,
                  projection_class_embeddings_input_dim=6 * 4 + 5,
                  down_block_types=("DownBlock2D", "CrossAttnDownBlock2D")),
             dict(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), sample_size=8),
             dict(conditioning_embedding_out_channels=(4, 6), controlnet_conditioning_channel_order="bgr")),
}
BATCH, HEIGHT, WIDTH, TOKENS = 2, 4, 6, 5


def randomize(model: torch.nn.Module, name: str) -> None:
    """Replaces every weight; nothing stays zero or one, and activations stay of order one."""
    for key, param in model.named_parameters():
        gen = rng("controlnet", name, key)
        if param.ndim == 1:
            value = (1.0 if "norm" in key and key.endswith("weight") else 0.0) + normal(gen, param.shape, scale=0.2)
        else:
            value = normal(gen, param.shape, scale=1.0 / math.sqrt(param[0].numel()))
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def inputs(name: str, multiple: int) -> dict:
    gen, config = rng("controlnet_inputs", name), CONFIGS[name][0]
    out = {
        "sample": normal(gen, (BATCH, 4, HEIGHT, WIDTH)),
        "timestep": np.array([31, 904], np.int64),
        "encoder_hidden_states": normal(gen, (BATCH, TOKENS, config["cross_attention_dim"])),
        "scale": np.float32(0.8),
        "scale_2": np.float32(0.35),
    }
    for key in ("image", "image_2"):
        out[key] = gen.random((BATCH, 3, HEIGHT * multiple, WIDTH * multiple)).astype(np.float32)
    if name == "sdxl":
        out["text_embeds"] = normal(gen, (BATCH, 5))
        out["time_ids"] = np.array([[1024, 1024, 0, 0, 1024, 1024], [768, 512, 16, 32, 1024, 960]], np.float32)
    return out


def run(unet, controlnet, ins: dict, dtype: torch.dtype) -> dict:
    unet, controlnet = unet.to(dtype).eval(), controlnet.to(dtype).eval()
    t = {k: torch.from_numpy(np.asarray(v)) for k, v in ins.items()}
    t = {k: v.to(dtype) if v.is_floating_point() else v for k, v in t.items()}
    added = {k: t[k] for k in ("text_embeds", "time_ids") if k in t} or None
    given = (t["sample"], t["timestep"], t["encoder_hidden_states"])

    def control(suffix):
        return controlnet(*given, controlnet_cond=t[f"image{suffix}"], conditioning_scale=t[f"scale{suffix}"],
                          added_cond_kwargs=added, return_dict=False)

    def controlled(down, mid):
        return unet(*given, added_cond_kwargs=added, down_block_additional_residuals=down,
                    mid_block_additional_residual=mid).sample

    with torch.no_grad():
        down, mid = control("")
        down_2, mid_2 = control("_2")
        out = {"alone": controlled(None, None), "sample": controlled(down, mid),
               "sample_2": controlled([a + b for a, b in zip(down, down_2)], mid + mid_2),
               "mid_block_res_sample": mid} | {f"down_block_res_samples.{i}": d for i, d in enumerate(down)}
    return {f"out/{k}": v.double().numpy() for k, v in out.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, (shared, unet_only, controlnet_only) in CONFIGS.items():
        folder = GOLDEN / f"controlnet_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        unet, controlnet = UNet2DConditionModel(**shared, **unet_only), ControlNetModel(**shared, **controlnet_only)
        for part, model in (("unet", unet), ("controlnet", controlnet)):
            randomize(model, f"{name}_{part}")
            model.save_pretrained(folder / part)
        ins = inputs(name, 2 ** (len(controlnet_only["conditioning_embedding_out_channels"]) - 1))
        single, double = (run(unet, controlnet, ins, dtype) for dtype in (torch.float32, torch.float64))
        assert rel_l2(double["out/sample"], double["out/alone"]) > 0.1, "the ControlNet hardly matters"
        meta = {
            "parameters": {"unet": sum(p.numel() for p in unet.parameters()),
                           "controlnet": sum(p.numel() for p in controlnet.parameters())},
            "pytorch_float32_worst_rel_l2": max(rel_l2(single[k], double[k]) for k in double),
            "versions": {"diffusers": json.load(open(folder / "unet/config.json"))["_diffusers_version"],
                         "torch": torch.__version__.split("+")[0]},
        }
        print(name, meta)
        tensors = {f"in/{k}": v for k, v in ins.items()} | {k: v.astype(np.float32) for k, v in double.items()}
        write(folder / "io.safetensors", tensors, meta)
        for path in sorted(folder.glob("*/*")):
            report(path)


if __name__ == "__main__":
    main()
