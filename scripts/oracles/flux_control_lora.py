"""A control LoRA for the transformer of pipeline_flux_dev by the names of Black Forest Labs, and what diffusers makes of it.

Usage: python flux_control_lora.py (after flux_pipeline.py, whose folder it reads)

Writes tests/golden/flux_control_lora/lora.safetensors, which has for every layer factors and a bias, for the layer of the
sample's tokens factors of twice its width, and norms of queries and keys that replace the model's; and images.safetensors
with in/image (bytes) and the last latents, not packed, of FluxControlPipeline with it in 6 steps, each image with its own
generator: out/control, out/control_half with half its scale. All in float32.

diffusers 0.42.1 converts such files for FLUX.1's own sizes, which are replaced by the tiny model's. It also swaps the halves
of the first factor of the last norm's modulation, where those of the second alone are swapped in the model: the halves of
this file's are the same.
"""

import inspect
import shutil

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import FluxControlPipeline, FluxPipeline
from diffusers.loaders import lora_conversion_utils, lora_pipeline
from safetensors.numpy import save_file

from common import GOLDEN, normal, report, rng, write
from flux_pipeline import TRANSFORMER
from transformer_images import HEIGHT, LENGTH, PROMPTS, WIDTH, generators, parts_of, tokenizers

FOLDER = GOLDEN / "flux_control_lora"
RANK = 2
INNER = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]


def layers():
    """The layers of Black Forest Labs' code, each with its output and input features."""
    text, pooled, tokens = (TRANSFORMER[k] for k in ("joint_attention_dim", "pooled_projection_dim", "in_channels"))
    sizes = {"img_in": (INNER, 2 * tokens), "txt_in": (INNER, text), "final_layer.linear": (tokens, INNER),
             "final_layer.adaLN_modulation.1": (2 * INNER, INNER), "vector_in.in_layer": (INNER, pooled),
             "vector_in.out_layer": (INNER, INNER)}
    for name in ("time_in", "guidance_in"):
        sizes |= {f"{name}.in_layer": (INNER, 256), f"{name}.out_layer": (INNER, INNER)}
    for i in range(TRANSFORMER["num_layers"]):
        for side in ("img", "txt"):
            block = f"double_blocks.{i}.{side}"
            sizes |= {f"{block}_mod.lin": (6 * INNER, INNER), f"{block}_attn.qkv": (3 * INNER, INNER),
                      f"{block}_attn.proj": (INNER, INNER), f"{block}_mlp.0": (4 * INNER, INNER),
                      f"{block}_mlp.2": (INNER, 4 * INNER)}
    for i in range(TRANSFORMER["num_single_layers"]):
        block = f"single_blocks.{i}"
        sizes |= {f"{block}.modulation.lin": (3 * INNER, INNER), f"{block}.linear1": (7 * INNER, INNER),
                  f"{block}.linear2": (INNER, 5 * INNER)}
    return sizes


def file():
    tensors = {}
    for name, (out, into) in layers().items():
        gen = rng("flux_control_lora", name)
        tensors[f"{name}.lora_A.weight"] = normal(gen, (RANK, into), scale=1 / np.sqrt(into))
        tensors[f"{name}.lora_B.weight"] = normal(gen, (out, RANK), scale=0.3)
        tensors[f"{name}.lora_B.bias"] = normal(gen, (out,), scale=0.1)
    down = tensors["final_layer.adaLN_modulation.1.lora_A.weight"]
    down[RANK // 2:] = down[:RANK // 2]
    norms = [f"double_blocks.{i}.{side}_attn.norm" for i in range(TRANSFORMER["num_layers"]) for side in ("img", "txt")]
    norms += [f"single_blocks.{i}.norm" for i in range(TRANSFORMER["num_single_layers"])]
    for name in norms:
        for kind in ("query_norm", "key_norm"):
            gen = rng("flux_control_lora", name, kind)
            tensors[f"{name}.{kind}.scale"] = 1.0 + normal(gen, (TRANSFORMER["attention_head_dim"],), scale=0.2)
    return {k: np.asarray(v, np.float16) for k, v in tensors.items()}


def with_tiny_sizes():
    convert = lora_conversion_utils._convert_bfl_flux_control_lora_to_diffusers
    source = inspect.getsource(convert)
    for found, size in (("num_layers = 19", f"num_layers = {TRANSFORMER['num_layers']}"),
                        ("num_single_layers = 38", f"num_single_layers = {TRANSFORMER['num_single_layers']}"),
                        ("inner_dim = 3072", f"inner_dim = {INNER}")):
        assert source.count(found) == 1, source
        source = source.replace(found, size)
    exec(source, lora_conversion_utils.__dict__)
    lora_pipeline._convert_bfl_flux_control_lora_to_diffusers = lora_conversion_utils.__dict__[convert.__name__]


def main():
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with_tiny_sizes()
    clip, t5 = tokenizers()
    text = parts_of("pipeline_flux_dev", FluxPipeline, tokenizer=clip, tokenizer_2=t5)
    keys = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    pipe = FluxControlPipeline(**{k: text.components[k] for k in keys})
    pipe.set_progress_bar_config(disable=True)
    tensors = file()
    pipe.load_lora_weights({k: torch.from_numpy(v.astype(np.float32)) for k, v in tensors.items()})
    assert pipe.transformer.config.in_channels == 2 * TRANSFORMER["in_channels"]
    pixels = rng("flux_control_lora", "image").integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    recorded = {"in/image": pixels, "in/mask": np.zeros((HEIGHT, WIDTH), np.uint8)}
    for name, scale in (("control", 1.0), ("control_half", 0.5)):
        pipe.set_adapters(pipe.get_active_adapters(), scale)
        made = pipe(prompt=PROMPTS, height=HEIGHT, width=WIDTH, num_inference_steps=6, guidance_scale=3.5,
                    max_sequence_length=LENGTH, output_type="latent", generator=generators(),
                    control_image=[PIL.Image.fromarray(pixels)] * len(PROMPTS)).images
        recorded[f"out/{name}"] = pipe._unpack_latents(made, HEIGHT, WIDTH, pipe.vae_scale_factor).numpy()
    versions = {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}
    FOLDER.mkdir()
    save_file(tensors, FOLDER / "lora.safetensors")
    write(FOLDER / "images.safetensors", recorded, {"versions": versions})
    for path in sorted(FOLDER.iterdir()):
        report(path)


if __name__ == "__main__":
    with torch.no_grad():
        main()
