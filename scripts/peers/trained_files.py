"""Whether diffusers draws with what `train` writes: low-rank updates with the names of diffusers and of kohya, and a new token.

Usage: python trained_files.py PROGRAM [OUT_DIR]     (packages of scripts/oracles/requirements.txt)

PROGRAM is maxdiff-rs with an installed CPU plugin. A small Stable Diffusion 1.5 of tests/golden is fine-tuned on six pictures: updates
of the UNet and of the text encoder together with a token, some steps. Then the program and diffusers draw from the same noise, both
without the files and with them. Prints the relative L2 error of the last latents for each file, which must be below 1e-4, and how far the
files move the latents. Exit code 1 where one is not.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
PROMPT = "a picture of <sks> above a blue square"
STEPS, GUIDANCE, LIMIT = 5, 4.0, 1e-4


def prepare(out):
    """The model as a folder, with its tokenizer, and captioned pictures."""
    model, data = out / "model", out / "data"
    shutil.copytree(GOLDEN / "pipeline_sd15", model, dirs_exist_ok=True)
    shutil.copytree(GOLDEN / "tokenizer", model / "tokenizer", dirs_exist_ok=True)
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": "<|endoftext|>"}
    (model / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    data.mkdir(exist_ok=True)
    rows, columns = np.mgrid[0:16, 0:20]
    for at in range(6):
        picture = np.stack([columns * 12, rows * 15, np.full_like(rows, at * 40)], axis=-1)
        Image.fromarray(picture.astype(np.uint8)).save(data / f"{at}.png")
        (data / f"{at}.txt").write_text(f"a picture of <sks> {at}")
    noise = np.random.default_rng(3).standard_normal((1, 4, 8, 8)).astype(np.float32)
    safetensors.numpy.save_file({"latents": noise}, out / "noise.safetensors")
    return model, data, noise


def run(program, verb, out, *words):
    shared = ["hardware=cpu", "resolution=16", "jax_cache_dir=", "activations_dtype=float32", f"output_dir={out}"]
    command = [program, verb, str(ROOT / "configs" / "base15.yml"), *shared, *words]
    print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout


def drawn(program, out, name, *words):
    """The last latents that the program draws."""
    told = run(program, "generate", out / name, f"pretrained_model_name_or_path={out / 'model'}", f"prompt={PROMPT}", "negative_prompt=",
               f"latents={out / 'noise.safetensors'}", f"num_inference_steps={STEPS}", f"guidance_scale={GUIDANCE}",
               "save_latents=True", "scheduler=pndm", "prompt_syntax=plain", *words)
    picture = pathlib.Path(told.strip().splitlines()[-1])
    samples = safetensors.numpy.load_file(picture.with_suffix(".latents.safetensors"))["latents"]
    return samples[-1]


def pipeline(model):
    part = lambda cls, name: cls.from_pretrained(model / name, torch_dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer(vocab=str(model / "tokenizer/vocab.json"), merges=str(model / "tokenizer/merges.txt"),
                              pad_token="<|endoftext|>", model_max_length=77)
    encoder = part(CLIPTextModel, "text_encoder")
    for module in encoder.modules():
        if hasattr(module, "eos_token_id"):
            module.eos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    return StableDiffusionPipeline(
        vae=part(AutoencoderKL, "vae"), unet=part(UNet2DConditionModel, "unet"), text_encoder=encoder,
        tokenizer=tokenizer, scheduler=PNDMScheduler.from_pretrained(model / "scheduler"),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def expected(model, noise, lora=None, token=None):
    """The last latents that diffusers draws."""
    pipe = pipeline(model)
    pipe.set_progress_bar_config(disable=True)
    if token is not None:
        pipe.load_textual_inversion(str(token))
    if lora is not None:
        pipe.load_lora_weights(str(lora.parent), weight_name=lora.name)
    with torch.no_grad():
        return pipe(PROMPT, height=16, width=16, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
                    latents=torch.from_numpy(noise), output_type="latent").images.numpy()[0]


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as place:
        out = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else place).resolve()
        out.mkdir(parents=True, exist_ok=True)
        model, data, noise = prepare(out)
        run(program, "train", out / "run", f"pretrained_model_name_or_path={model}", "dataset_type=folder",
            f"train_data_dir={data}", "per_device_batch_size=2", "lora_rank=2", "lora_kohya=True", "train_text_encoder=True",
            "placeholder_token=<sks>", "initializer_token=red", "learning_rate=2e-2", "text_encoder_learning_rate=2e-2",
            "token_learning_rate=5e-2", "max_train_steps=12")
        checkpoint = out / "run" / "checkpoints" / "step-00000012"
        lora, kohya, token = (checkpoint / name for name in
                              ("pytorch_lora_weights.safetensors", "kohya_lora.safetensors", "learned_embeds.safetensors"))
        plain = expected(model, noise)
        cases = {
            "neither": ([], {}),
            "updates": ([f"lora_config={{lora_model_name_or_path: ['{lora}']}}"], {"lora": lora}),
            "updates with kohya's names": ([f"lora_config={{lora_model_name_or_path: ['{kohya}']}}"], {"lora": kohya}),
            "token": ([f"textual_inversions={token}"], {"token": token}),
            "both": ([f"lora_config={{lora_model_name_or_path: ['{lora}']}}", f"textual_inversions={token}"],
                     {"lora": lora, "token": token}),
        }
        failed = False
        print("| files | error | moved |\n|---|---|---|")
        for at, (name, (words, files)) in enumerate(cases.items()):
            wanted = expected(model, noise, **files)
            found = drawn(program, out, f"drawn{at}", *words)
            error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            moved = np.linalg.norm(wanted - plain) / np.linalg.norm(plain)
            print(f"| {name} | {error:.2e} | {moved:.2e} |", flush=True)
            failed |= not error < LIMIT or (name != "neither" and moved < 1e-2)
        sys.exit(failed)


main()
