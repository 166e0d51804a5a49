"""A full-size diffusion model with random weights, in diffusers' layout.

Usage: python random_model.py {sd1,sdxl,sd3,flux_dev,flux_schnell,pixart_sigma} FOLDER [--dtype bfloat16]

For machines where no weights can be downloaded: to measure speed and memory, and to run all of
`generate`. Weights are normal with the deviation 1 / sqrt(fan_in), norms are 1; they are cut out of one block of random
numbers, so that writing takes as long as the disk. Large parts are written in shards, so that memory holds one of them.
The tokenizers are those of tests/golden/tokenizer and tests/golden/t5_tokenizer.
"""

import argparse
import json
import pathlib
import shutil

import diffusers
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
BLOCK = 1 << 24
SHARD = 4 << 30

SCHEDULER = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000,
                 steps_offset=1, timestep_spacing="leading", prediction_type="epsilon")
TEXT = dict(vocab_size=49408, max_position_embeddings=77, eos_token_id=2, bos_token_id=0, pad_token_id=1)
CLIP_L = dict(TEXT, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
              hidden_act="quick_gelu", projection_dim=768)
BIG_G = dict(TEXT, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
             hidden_act="gelu", projection_dim=1280)
T5_XXL = dict(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
              feed_forward_proj="gated-gelu", tie_word_embeddings=False)
VAE = dict(block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
           up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4, norm_num_groups=32)


def configuration(path):
    """The values of a configuration of src/models, without the name of its class and the version."""
    return {k: v for k, v in json.loads((ROOT / "src/models" / path).read_text()).items() if not k.startswith("_")}


def unet(family):
    return lambda: diffusers.UNet2DConditionModel(**configuration(f"{family}/unet.json"))


def vae(**changes):
    return lambda: diffusers.AutoencoderKL(**dict(VAE, **changes))


def stored_vae(path):
    return lambda: diffusers.AutoencoderKL(**configuration(path))


def clip(config, projection=False):
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return lambda: kind(transformers.CLIPTextConfig(**config))


def t5():
    return transformers.T5EncoderModel(transformers.T5Config(**T5_XXL))


# For each family: the class of its pipeline, its parts, its tokenizers, its scheduler.
CLIP_TOKENIZER = "CLIPTokenizer"
T5_TOKENIZER = "T5Tokenizer"
FAMILIES = {
    "sd1": ("StableDiffusionPipeline",
            {"unet": unet("sd1"), "vae": vae(sample_size=512, scaling_factor=0.18215), "text_encoder": clip(CLIP_L)},
            {"tokenizer": CLIP_TOKENIZER}, ("DDIMScheduler", SCHEDULER)),
    "sdxl": ("StableDiffusionXLPipeline",
             {"unet": unet("sdxl"), "vae": vae(sample_size=1024, scaling_factor=0.13025, force_upcast=True),
              "text_encoder": clip(CLIP_L), "text_encoder_2": clip(BIG_G, projection=True)},
             {"tokenizer": CLIP_TOKENIZER, "tokenizer_2": CLIP_TOKENIZER}, ("EulerDiscreteScheduler", SCHEDULER)),
    "sd3": ("StableDiffusion3Pipeline",
            {"transformer": lambda: diffusers.SD3Transformer2DModel(**configuration("sd3/transformer_medium.json")),
             "vae": stored_vae("sd3/vae.json"), "text_encoder": clip(CLIP_L, projection=True),
             "text_encoder_2": clip(BIG_G, projection=True), "text_encoder_3": t5},
            {"tokenizer": CLIP_TOKENIZER, "tokenizer_2": CLIP_TOKENIZER, "tokenizer_3": T5_TOKENIZER},
            ("FlowMatchEulerDiscreteScheduler", configuration("sd3/scheduler.json"))),
    "pixart_sigma": ("PixArtSigmaPipeline",
                     {"transformer": lambda: diffusers.PixArtTransformer2DModel.from_config(
                         configuration("pixart/transformer_sigma.json")),
                      "vae": vae(sample_size=1024, scaling_factor=0.13025), "text_encoder": t5},
                     {"tokenizer": T5_TOKENIZER},
                     ("DPMSolverMultistepScheduler", configuration("pixart/scheduler.json"))),
}
for kind in ("dev", "schnell"):
    FAMILIES[f"flux_{kind}"] = (
        "FluxPipeline",
        {"transformer": lambda kind=kind: diffusers.FluxTransformer2DModel(
            **configuration(f"flux/transformer_{kind}.json")),
         "vae": stored_vae("flux/vae.json"), "text_encoder": clip(CLIP_L), "text_encoder_2": t5},
        {"tokenizer": CLIP_TOKENIZER, "tokenizer_2": T5_TOKENIZER},
        ("FlowMatchEulerDiscreteScheduler", configuration(f"flux/scheduler_{kind}.json")))


class Numbers:
    """Normal numbers, cut out of one block again and again."""

    def __init__(self):
        self.block = torch.from_numpy(np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32))
        self.at = 0

    def take(self, count):
        pieces = []
        while count > 0:
            piece = min(count, BLOCK - self.at)
            pieces.append(self.block[self.at:self.at + piece])
            self.at = (self.at + piece) % BLOCK
            count -= piece
        return torch.cat(pieces)

    def weight(self, key, shape):
        if len(shape) == 1:
            return torch.full(shape, 1.0 if key.endswith("weight") else 0.0)
        table = ("embedding" in key and "time" not in key) or "shared" in key
        scale = 0.02 if table else np.prod(shape[1:]) ** -0.5
        return (self.take(int(np.prod(shape))) * scale).reshape(shape)


def checkpoint_key(model, key):
    """transformers 5 drops the `text_model.` of CLIPTextModel in memory."""
    is_clip = type(model).__name__.startswith("CLIPTextModel")
    if is_clip and not key.startswith(("text_model.", "text_projection.")):
        return f"text_model.{key}"
    return key


def stored(model):
    """Parameters, each once, and the buffers that checkpoints have, such as the positions of Stable Diffusion 3."""
    yield from model.named_parameters()
    kept = model.state_dict()
    yield from ((key, buffer) for key, buffer in model.named_buffers() if key in kept)


def shards(model, width):
    """The names and shapes of what is stored, in groups of at most SHARD bytes."""
    group, size = [], 0
    for key, param in stored(model):
        taken = param.numel() * width
        if group and size + taken > SHARD:
            yield group
            group, size = [], 0
        group.append((key, tuple(param.shape)))
        size += taken
    yield group


def write_part(folder, model, dtype, numbers):
    folder.mkdir(parents=True, exist_ok=True)
    of_transformers = type(model).__module__.startswith("transformers")
    config = model.config.to_dict() if of_transformers else json.loads(model.to_json_string())
    if of_transformers:
        config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    name = "model" if of_transformers else "diffusion_pytorch_model"
    groups = list(shards(model, dtype.itemsize))
    places, total = {}, 0
    for number, group in enumerate(groups, 1):
        tensors = {checkpoint_key(model, key): numbers.weight(key, shape).to(dtype).contiguous() for key, shape in group}
        file = f"{name}.safetensors" if len(groups) == 1 else f"{name}-{number:05}-of-{len(groups):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update({key: file for key in tensors})
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    print(f"{folder.name}: {total:,} bytes")
    return ["transformers" if of_transformers else "diffusers", type(model).__name__]


def write_tokenizer(folder, kind):
    folder.mkdir(parents=True, exist_ok=True)
    if kind == T5_TOKENIZER:
        shutil.copy(GOLDEN / "t5_tokenizer/spiece.model", folder / "spiece.model")
        return
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "tokenizer" / file, folder / file)
    pad = "!" if folder.name == "tokenizer_2" else "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": kind, "model_max_length": 77, "pad_token": pad}) + "\n")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("family", choices=list(FAMILIES))
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = arguments.parse_args()
    pipeline, parts, tokenizers, (scheduler, values) = FAMILIES[arguments.family]
    numbers = Numbers()
    index = {"_class_name": pipeline}
    for part, make in parts.items():
        # No memory is taken for weights that are thrown away.
        with torch.device("meta"):
            model = make()
        index[part] = write_part(arguments.folder / part, model, getattr(torch, arguments.dtype), numbers)
    for name, kind in tokenizers.items():
        write_tokenizer(arguments.folder / name, kind)
        index[name] = ["transformers", kind]
    folder = arguments.folder / "scheduler"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scheduler_config.json").write_text(json.dumps(dict(values, _class_name=scheduler), indent=2) + "\n")
    index["scheduler"] = ["diffusers", scheduler]
    (arguments.folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
