"""Tiny `FluxControlNetModel`s for the transformer of pipeline_flux_dev, alone and in diffusers' FluxControlNetPipeline.

Usage: python flux_controlnet.py (after flux_pipeline.py, whose folder it reads)

Writes tests/golden/flux_controlnet/{canny,union}/ in diffusers' layout (float16), of which `union` knows three kinds of
images and has no single blocks, and beside them
  io.safetensors: in/<each parameter of the transformer's forward>, in/<name>.{controlnet_cond,scale} and in/union.mode;
    out/<name>.{double,single}.<i>, the residuals; out/<name>, the transformer's result with them; out/both with their sums,
    out/alone without any. Values are computed in float64 from the float16 weights and rounded once;
  images.safetensors: in/image and in/image_1 (bytes) and the last latents, not packed, of out/{canny,union,both} in 20 steps,
    each image with its own generator, in float32. The metadata has scales, kinds and parts of the steps.
Weights that start as zeros in training are random too.
"""

import shutil

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import FluxControlNetModel, FluxControlNetPipeline, FluxMultiControlNetModel, FluxPipeline

from common import GOLDEN, normal, rel_l2, report, rng, write
from flux_pipeline import TRANSFORMER, randomize
from transformer_images import HEIGHT, LENGTH, PROMPTS, WIDTH, generators, parts_of, tokenizers

FOLDER = GOLDEN / "flux_controlnet"
CONFIGS = {
    "canny": TRANSFORMER | dict(num_layers=1, num_single_layers=1, guidance_embeds=True),
    "union": TRANSFORMER | dict(num_layers=1, num_single_layers=0, guidance_embeds=True, num_mode=3),
}
SCALES = {"canny": 0.7, "union": 0.45}
RANGES = {"canny": [0.0, 0.8], "union": [0.2, 1.0]}
MODE = 2
# Not square, so that a swap of rows and columns shows.
BATCH, ROWS, COLUMNS, TEXT = 2, 3, 5, 4


def inputs():
    gen, image = rng("flux_controlnet", "inputs"), ROWS * COLUMNS
    ids = np.zeros((ROWS, COLUMNS, 3), np.float32)
    ids[..., 1] += np.arange(ROWS)[:, None]
    ids[..., 2] += np.arange(COLUMNS)[None, :]
    tokens = lambda: normal(gen, (BATCH, image, TRANSFORMER["in_channels"]))
    return {
        "hidden_states": tokens(),
        "encoder_hidden_states": normal(gen, (BATCH, TEXT, TRANSFORMER["joint_attention_dim"])),
        "pooled_projections": normal(gen, (BATCH, TRANSFORMER["pooled_projection_dim"])),
        "timestep": np.array([0.8125, 0.25], np.float32),
        "guidance": np.array([3.5, 1.25], np.float32),
        "img_ids": ids.reshape(image, 3),
        # Not of a pipeline: the kind of the image has the position of the text's first token.
        "txt_ids": normal(gen, (TEXT, 3), scale=2.0),
        "canny.controlnet_cond": tokens(),
        "canny.scale": np.float32(SCALES["canny"]),
        "union.controlnet_cond": tokens(),
        "union.scale": np.float32(SCALES["union"]),
        "union.mode": np.int32(MODE),
    }


def run(transformer, nets, ins, dtype):
    t = {k: torch.from_numpy(np.asarray(v)) for k, v in ins.items()}
    t = {k: v.to(dtype) if v.is_floating_point() else v for k, v in t.items()}
    shared = {k: v for k, v in t.items() if "." not in k}
    transformer = transformer.to(dtype)
    out = {"out/alone": transformer(**shared).sample}
    residuals = {}
    for name, net in nets.items():
        mode = t[f"{name}.mode"].long().expand(BATCH, 1) if f"{name}.mode" in t else None
        double, single = net.to(dtype)(**shared, controlnet_cond=t[f"{name}.controlnet_cond"], controlnet_mode=mode,
                                       conditioning_scale=t[f"{name}.scale"], return_dict=False)
        residuals[name] = (double, single)
        out |= {f"out/{name}.double.{i}": x for i, x in enumerate(double)}
        out |= {f"out/{name}.single.{i}": x for i, x in enumerate(single or ())}
    canny, union = residuals["canny"], residuals["union"]
    residuals["both"] = ([a + b for a, b in zip(canny[0], union[0])], canny[1])
    for name, (double, single) in residuals.items():
        out[f"out/{name}"] = transformer(**shared, controlnet_block_samples=double,
                                         controlnet_single_block_samples=single).sample
    return {k: v.double().numpy() for k, v in out.items()}


def drawn(parts, nets):
    pixels = {name: rng("flux_controlnet", name, "image").integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
              for name in nets}
    images = {name: [PIL.Image.fromarray(x)] * len(PROMPTS) for name, x in pixels.items()}
    both = FluxMultiControlNetModel(list(nets.values()))
    tensors = {"in/image": pixels["canny"], "in/image_1": pixels["union"]}
    for name in (*nets, "both"):
        pipe = FluxControlNetPipeline(**parts, controlnet=nets.get(name, both))
        pipe.set_progress_bar_config(disable=True)
        pick = lambda of: list(of.values()) if name == "both" else of[name]
        start, end = (pick({k: r[i] for k, r in RANGES.items()}) for i in (0, 1))
        made = pipe(prompt=PROMPTS, height=HEIGHT, width=WIDTH, num_inference_steps=20, guidance_scale=3.5,
                    max_sequence_length=LENGTH, output_type="latent", generator=generators(),
                    control_image=pick(images), controlnet_conditioning_scale=pick(SCALES),
                    control_mode=pick({"canny": None, "union": MODE}), control_guidance_start=start,
                    control_guidance_end=end).images
        tensors[f"out/{name}"] = pipe._unpack_latents(made, HEIGHT, WIDTH, pipe.vae_scale_factor).numpy()
    return tensors


def main():
    torch.set_num_threads(1)
    versions = {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}
    shutil.rmtree(FOLDER, ignore_errors=True)
    clip, t5 = tokenizers()
    text = parts_of("pipeline_flux_dev", FluxPipeline, tokenizer=clip, tokenizer_2=t5)
    keys = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    parts = {k: text.components[k] for k in keys}
    nets = {}
    for name, config in CONFIGS.items():
        nets[name] = randomize(FluxControlNetModel(**config), f"controlnet_{name}")
        nets[name].to(torch.float16).save_pretrained(FOLDER / name)
        nets[name].to(torch.float32)
    tensors = drawn(parts, nets)
    meta = {"scales": SCALES, "ranges": RANGES, "mode": MODE, "versions": versions}
    write(FOLDER / "images.safetensors", tensors, meta)
    ins = inputs()
    single, double = (run(parts["transformer"], nets, ins, dtype) for dtype in (torch.float32, torch.float64))
    for name in (*nets, "both"):
        assert rel_l2(double[f"out/{name}"], double["out/alone"]) > 0.05, "the ControlNet hardly matters"
    worst = max(rel_l2(single[k], double[k]) for k in double)
    tensors = {f"in/{k}": v for k, v in ins.items()} | {k: v.astype(np.float32) for k, v in double.items()}
    write(FOLDER / "io.safetensors", tensors, {"pytorch_float32_worst_rel_l2": worst, "versions": versions})
    for path in sorted(FOLDER.rglob("*.safetensors")):
        report(path)


if __name__ == "__main__":
    with torch.no_grad():
        main()
