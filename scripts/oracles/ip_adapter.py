"""Tiny IP-Adapters on the UNets of pipeline.py: files, an image encoder, and the results of diffusers.

Usage: python ip_adapter.py (after tokenizer.py, whose vocabulary it uses)

Writes tests/golden/ip_adapter/: image_encoder/, the adapters sd15.safetensors, sd15_plus.safetensors and sdxl.safetensors
(float16, in the original files' layout), and io.safetensors with in/image (bytes, rows first), in/pixel_values (by
transformers' CLIPImageProcessor), in/latents (unit normal) and out/<adapter>, the last latents. All in float32 on the CPU from the rounded weights. The metadata has the prompts, the steps, the guidance and the scale.
"""

import shutil

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, CLIPTokenizer, CLIPVisionConfig, CLIPVisionModelWithProjection

from common import GOLDEN, normal, report, rng, write
from pipeline import GUIDANCE, NEGATIVE, PROMPTS, cases, randomize

STEPS, SCALE, SIDE = 8, 0.6, 16
VISION = dict(hidden_size=16, intermediate_size=24, projection_dim=8, num_hidden_layers=3, num_attention_heads=2,
              image_size=SIDE, patch_size=4, hidden_act="gelu")


def values(name, key, shape):
    gen = rng("ip_adapter", name, key)
    if len(shape) == 1:
        value = (1.0 if key.endswith("weight") else 0.0) + normal(gen, shape, scale=0.1)
    else:
        value = normal(gen, shape, scale=0.9 / np.sqrt(shape[-1]))
    return torch.from_numpy(np.asarray(value, np.float16).astype(np.float32))


def layers(name, unet):
    """Keys and values of all cross-attentions, numbered with the self-attentions, which have none."""
    tensors = {}
    for number, (place, processor) in enumerate(unet.attn_processors.items()):
        if place.endswith("attn2.processor"):
            attention = unet.get_submodule(place.removesuffix(".processor"))
            for part in ("to_k", "to_v"):
                shape = getattr(attention, part).weight.shape
                tensors[f"{number}.{part}_ip.weight"] = values(name, f"{number}.{part}", shape)
    return tensors


def projection(name, features):
    if not name.endswith("plus"):
        sizes = {"proj.weight": (4 * features, 8), "proj.bias": (4 * features,), "norm.weight": (features,),
                 "norm.bias": (features,)}
        return {key: values(name, key, shape) for key, shape in sizes.items()}
    own, heads, tokens = 12, 1, 5
    sizes = {"latents": (1, tokens, own), "proj_in.weight": (own, VISION["hidden_size"]), "proj_in.bias": (own,),
             "proj_out.weight": (features, own), "proj_out.bias": (features,), "norm_out.weight": (features,),
             "norm_out.bias": (features,)}
    for layer in range(4):
        at = f"layers.{layer}"
        sizes |= {f"{at}.0.{norm}.{part}": (own,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        sizes |= {f"{at}.0.to_q.weight": (64 * heads, own), f"{at}.0.to_kv.weight": (128 * heads, own),
                  f"{at}.0.to_out.weight": (own, 64 * heads), f"{at}.1.0.weight": (own,), f"{at}.1.0.bias": (own,),
                  f"{at}.1.1.weight": (4 * own, own), f"{at}.1.3.weight": (own, 4 * own)}
    return {key: values(name, key, shape) for key, shape in sizes.items()}


def main():
    torch.set_num_threads(1)
    folder = GOLDEN / "ip_adapter"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer = CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"), merges=str(GOLDEN / "tokenizer/merges.txt"),
                              model_max_length=77)
    encoder = randomize(CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION)), "image_encoder")
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    waves = np.stack([np.sin(np.add.outer(np.arange(50) * a, np.arange(37) * b)) for a, b in
                      ((0.13, 0.2), (-0.3, 0.11), (0.07, -0.4))], axis=-1)
    noise = rng("ip_adapter", "image").integers(-20, 20, waves.shape)
    image = np.clip(128 + 90 * waves + noise, 0, 255).astype(np.uint8)
    picture = PIL.Image.fromarray(image)
    pixels = processor(picture, return_tensors="pt").pixel_values
    latents = normal(rng("ip_adapter", "latents"), (len(PROMPTS), 4, 8, 8))
    tensors = {"in/image": image, "in/pixel_values": pixels.numpy(), "in/latents": latents}
    for case, pipe in cases(tokenizer):
        names = {"sd15": ["sd15", "sd15_plus"], "sdxl": ["sdxl"]}.get(case, [])
        for name in names:
            pipe.set_progress_bar_config(disable=True)
            pipe.register_modules(image_encoder=encoder, feature_extractor=processor)
            features = pipe.unet.config.cross_attention_dim
            own = {"image_proj": projection(name, features), "ip_adapter": layers(name, pipe.unet)}
            flat = {f"{part}.{key}": value.half() for part, all in own.items() for key, value in all.items()}
            save_file(flat, folder / f"{name}.safetensors")
            pipe.load_ip_adapter(own, subfolder="", weight_name="")
            pipe.set_ip_adapter_scale(SCALE)
            outs = []
            for at, prompt in enumerate(PROMPTS):
                with torch.no_grad():
                    outs.append(pipe(prompt=prompt, negative_prompt=None if case == "sdxl" else NEGATIVE, height=16, width=16,
                                     num_inference_steps=STEPS, guidance_scale=GUIDANCE, ip_adapter_image=picture,
                                     latents=torch.from_numpy(latents[at : at + 1]), output_type="latent").images.numpy())
            tensors[f"out/{name}"] = np.concatenate(outs)
            encoder, processor = pipe.image_encoder, pipe.feature_extractor
            pipe.unload_ip_adapter()
    encoder.half().save_pretrained(folder / "image_encoder")
    write(folder / "io.safetensors", tensors, {
        "steps": STEPS, "scale": SCALE,
        "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0],
                     "transformers": transformers.__version__}})
    for file in sorted(folder.rglob("*.safetensors")):
        report(file)


if __name__ == "__main__":
    main()
