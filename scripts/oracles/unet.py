"""Tiny `UNet2DConditionModel`s of the Stable Diffusion 1.5, 2.1 and XL kinds, and one with scale and shift by the time
embedding: weights, inputs, outputs, gradients.

Usage: python unet.py [sd15|sd21|sdxl|scale_shift]...

Writes tests/golden/unet_{sd15,sd21,sdxl,scale_shift}/ in diffusers' layout (XL sharded) and beside it `io.safetensors`:
  in/sample, in/timestep, in/encoder_hidden_states, and for XL in/text_embeds and in/time_ids;
  in/cotangent: the loss is mean(out/sample * in/cotangent);
  out/sample, and out/<module path> of the time embedding, `conv_in` and each block (NCHW);
  grad/in/<input> and grad/param/<key of the checkpoint>.
Values are computed in float64 from the float32 weights and rounded once; the metadata says how far PyTorch's own
float32 run is from them.
"""

import math
import shutil
import sys

import numpy as np
import torch
from diffusers import UNet2DConditionModel

from common import GOLDEN, normal, record_denoiser, report, rng, write

# Every key in which the released configurations of the three kinds differ from the defaults, made small.
SHARED = dict(in_channels=4, out_channels=4, sample_size=8, layers_per_block=2, block_out_channels=(8, 16, 16),
              norm_num_groups=4, act_fn="silu", flip_sin_to_cos=True, freq_shift=0, downsample_padding=1,
              mid_block_scale_factor=1, center_input_sample=False, norm_eps=1e-5)
CONFIGS = {
    "sd15": dict(SHARED, cross_attention_dim=12, attention_head_dim=2,
                 down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                 up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")),
    "sd21": dict(SHARED, cross_attention_dim=20, attention_head_dim=(1, 2, 4), use_linear_projection=True,
                 upcast_attention=True,
                 down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                 up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")),
    "sdxl": dict(SHARED, cross_attention_dim=24, attention_head_dim=(1, 2, 4), use_linear_projection=True,
                 transformer_layers_per_block=(1, 1, 2), addition_embed_type="text_time", addition_time_embed_dim=8,
                 projection_class_embeddings_input_dim=6 * 8 + 10,
                 down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                 up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")),
    "scale_shift": dict(SHARED, layers_per_block=1, block_out_channels=(8, 16), cross_attention_dim=12,
                        attention_head_dim=2, resnet_time_scale_shift="scale_shift",
                        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
}
# Not square: a swap of height and width shows. Batch of two with different timesteps.
BATCH, HEIGHT, WIDTH, TOKENS = 2, 8, 12, 5


def randomize(model: torch.nn.Module, name: str) -> None:
    """Replaces every weight; nothing stays zero or one, and activations stay of order one."""
    for key, param in model.named_parameters():
        gen = rng("unet", name, key)
        if param.ndim == 1:
            offset = 1.0 if key.endswith("weight") else 0.0  # the scale of a norm
            value = offset + normal(gen, param.shape, scale=0.2)
        else:
            value = normal(gen, param.shape, scale=1.0 / math.sqrt(param[0].numel()))
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def inputs(name: str) -> dict:
    config, gen = CONFIGS[name], rng("unet_inputs", name)
    out = {
        "sample": normal(gen, (BATCH, 4, HEIGHT, WIDTH)),
        "timestep": np.array([17, 981], np.int64),
        "encoder_hidden_states": normal(gen, (BATCH, TOKENS, config["cross_attention_dim"])),
    }
    if name == "sdxl":
        out["text_embeds"] = normal(gen, (BATCH, 10))
        out["time_ids"] = np.array([[1024, 1024, 0, 0, 1024, 1024], [768, 512, 16, 32, 1024, 960]], np.float32)
    out["cotangent"] = normal(gen, (BATCH, 4, HEIGHT, WIDTH))
    return out


def run(model: UNet2DConditionModel, ins: dict, dtype: torch.dtype):
    """Output, the outputs of the blocks, and all gradients, in `dtype`."""
    model = model.to(dtype).eval()
    model.zero_grad(set_to_none=True)
    t = {k: torch.from_numpy(v).to(dtype) if v.dtype == np.float32 else torch.from_numpy(v) for k, v in ins.items()}
    wanted = [k for k in ("sample", "encoder_hidden_states", "text_embeds") if k in t]
    for k in wanted:
        t[k].requires_grad_(True)
    blocks = {"time_embedding": model.time_embedding, "conv_in": model.conv_in, "mid_block": model.mid_block}
    blocks |= {f"down_blocks.{i}": b for i, b in enumerate(model.down_blocks)}
    blocks |= {f"up_blocks.{i}": b for i, b in enumerate(model.up_blocks)}
    seen, hooks = {}, []
    for path, block in blocks.items():
        def hook(_m, _i, o, path=path):
            seen[path] = (o[0] if isinstance(o, tuple) else o).detach()
        hooks.append(block.register_forward_hook(hook))
    added = {k: t[k] for k in ("text_embeds", "time_ids") if k in t}
    out = model(t["sample"], t["timestep"], t["encoder_hidden_states"], added_cond_kwargs=added or None).sample
    for h in hooks:
        h.remove()
    (out * t["cotangent"]).mean().backward()
    tensors = {"out/sample": out.detach()} | {f"out/{k}": v for k, v in seen.items()}
    tensors |= {f"grad/in/{k}": t[k].grad for k in wanted}
    tensors |= {f"grad/param/{k}": p.grad for k, p in model.named_parameters()}
    return {k: v.double().numpy() for k, v in tensors.items()}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CONFIGS:
        config = CONFIGS[name]
        folder = GOLDEN / f"unet_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        model = UNet2DConditionModel(**config)
        randomize(model, name)
        model.save_pretrained(folder, max_shard_size="250KB" if name == "sdxl" else "5GB")
        ins = inputs(name)
        single, double = run(model, ins, torch.float32), run(model, ins, torch.float64)
        record_denoiser(folder, model, ins, single, double)
        if name == "sd15":
            # Sides that no halving keeps whole: 9 -> 5 -> 3 and 7 -> 4 -> 2.
            ins = {k: v for k, v in inputs(name).items() if k != "cotangent"}
            ins["sample"] = normal(rng("unet_inputs", name, "odd"), (BATCH, 4, 9, 7))
            with torch.no_grad():
                out = model.double()(*(torch.from_numpy(v).double() if v.dtype == np.float32 else torch.from_numpy(v)
                                       for v in ins.values())).sample
            write(folder / "odd.safetensors", {f"in/{k}": v for k, v in ins.items()}
                  | {"out/sample": out.numpy().astype(np.float32)}, {})
        for path in sorted(folder.iterdir()):
            if path.name not in ("io.safetensors", "odd.safetensors"):
                report(path)


if __name__ == "__main__":
    main()
