"""A full-size Stable Diffusion with random weights, in diffusers' layout.

Usage: python random_model.py {sd1,sdxl} FOLDER [--dtype bfloat16]

For machines where no weights can be downloaded: to measure speed and memory, and to run all of
`generate`. Weights are normal with the deviation 1 / sqrt(fan_in), norms are 1; they are cut out of one block of random
numbers, so that writing takes as long as the disk. The tokenizers are those of tests/golden/tokenizer.
"""

import argparse
import json
import pathlib
import shutil

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests/golden/tokenizer"
BLOCK = 1 << 24
SCHEDULER = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000,
                 steps_offset=1, timestep_spacing="leading", prediction_type="epsilon")
TEXT = dict(vocab_size=49408, max_position_embeddings=77, eos_token_id=2, bos_token_id=0, pad_token_id=1)
CLIP_L = dict(TEXT, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
              hidden_act="quick_gelu", projection_dim=768)
BIG_G = dict(TEXT, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
             hidden_act="gelu", projection_dim=1280)
VAE = dict(block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
           up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4, norm_num_groups=32)


def parts(family):
    config = json.loads((ROOT / f"src/models/{family}/unet.json").read_text())
    makers = {
        "unet": lambda: UNet2DConditionModel(**{k: v for k, v in config.items() if not k.startswith("_")}),
        "vae": lambda: AutoencoderKL(**VAE, sample_size=512 if family == "sd1" else 1024,
                                     scaling_factor=0.18215 if family == "sd1" else 0.13025,
                                     force_upcast=family == "sdxl"),
        "text_encoder": lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L)),
    }
    if family == "sdxl":
        makers["text_encoder_2"] = lambda: CLIPTextModelWithProjection(CLIPTextConfig(**BIG_G))
    for part, make in makers.items():
        # No memory is taken for weights that are thrown away.
        with torch.device("meta"):
            model = make()
        yield part, model


def checkpoint_key(part, key):
    """transformers 5 drops the `text_model.` of CLIPTextModel in memory."""
    if part.startswith("text_encoder") and not key.startswith(("text_model.", "text_projection.")):
        return f"text_model.{key}"
    return key


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("family", choices=["sd1", "sdxl"])
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = arguments.parse_args()
    dtype = getattr(torch, arguments.dtype)
    block = torch.from_numpy(np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32))
    index = {"_class_name": "StableDiffusionXLPipeline" if arguments.family == "sdxl" else "StableDiffusionPipeline"}
    for part, model in parts(arguments.family):
        folder = arguments.folder / part
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads(model.to_json_string()) if hasattr(model, "to_json_string") else model.config.to_dict()
        if part.startswith("text_encoder"):
            config["architectures"] = [type(model).__name__]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors, at = {}, 0
        for key, param in model.named_parameters():
            if param.ndim == 1:
                value = torch.full(param.shape, 1.0 if key.endswith("weight") else 0.0)
            else:
                count = param.numel()
                pieces = []
                while count > 0:
                    take = min(count, BLOCK - at)
                    pieces.append(block[at:at + take])
                    at = (at + take) % BLOCK
                    count -= take
                scale = 0.02 if "embedding" in key and "time" not in key else param[0].numel() ** -0.5
                value = (torch.cat(pieces) * scale).reshape(param.shape)
            tensors[checkpoint_key(part, key)] = value.to(dtype).contiguous()
        name = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        library = "transformers" if part.startswith("text_encoder") else "diffusers"
        index[part] = [library, type(model).__name__]
        print(f"{part}: {sum(t.numel() for t in tensors.values()):,} parameters")
    for name in ("tokenizer", "tokenizer_2") if arguments.family == "sdxl" else ("tokenizer",):
        folder = arguments.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("vocab.json", "merges.txt"):
            shutil.copy(TOKENIZER / file, folder / file)
        pad = "!" if name == "tokenizer_2" else "<|endoftext|>"
        (folder / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": pad}) + "\n")
        index[name] = ["transformers", "CLIPTokenizer"]
    kind = "EulerDiscreteScheduler" if arguments.family == "sdxl" else "DDIMScheduler"
    folder = arguments.folder / "scheduler"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scheduler_config.json").write_text(json.dumps(dict(SCHEDULER, _class_name=kind), indent=2) + "\n")
    index["scheduler"] = ["diffusers", kind]
    (arguments.folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
