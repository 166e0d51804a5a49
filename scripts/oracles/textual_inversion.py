"""Textual inversions in the file formats of web interfaces and diffusers, and the results of diffusers with them.

Usage: python textual_inversion.py (after pipeline.py, whose pipelines it uses)

Writes tests/golden/textual_inversion/: files for Stable Diffusion 1.x (my-style.safetensors of web interfaces, with two
vectors; cat.safetensors of diffusers, with three for <cat>; one.safetensors with a vector that is not a matrix, for <one>) and
SDXL (xl.safetensors, two vectors for each encoder, named xl-style); and io.safetensors with in/<case>_latents (unit normal)
and out/<case>_latents after the last step of the pipelines sd15 and sdxl. The metadata has prompts, steps and guidance. The
tokens are in the prompts and, for sd15, in the negative prompt.

SDXL's second encoder pools at the end token here, as it was trained. transformers pools at the highest id where
config.json has the old eos_token_id = 2, which with added tokens is one of theirs. Tokens are in lower case: of others diffusers uses the first
vector only.
"""

import diffusers
import numpy as np
import safetensors.torch
import torch
import transformers
from diffusers import (
    AutoencoderKL, EulerDiscreteScheduler, PNDMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from common import GOLDEN, normal, report, rng, write

FOLDER = GOLDEN / "textual_inversion"
STEPS = 6
GUIDANCE = 5.0
CASES = {
    "sd15": (["a red circle in my-style", "<cat> above a <one>, blue"], "blurry <cat>"),
    "sdxl": (["xl-style circle", "a blue square in xl-style"], ""),
}


def tokenizer(pad):
    return CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"), merges=str(GOLDEN / "tokenizer/merges.txt"),
                         pad_token=pad, model_max_length=77)


def pipeline(case):
    folder = GOLDEN / f"pipeline_{case}"
    part = lambda cls, name: cls.from_pretrained(folder / name, torch_dtype=torch.float32).eval()
    shared = dict(vae=part(AutoencoderKL, "vae"), unet=part(UNet2DConditionModel, "unet"),
                  text_encoder=part(CLIPTextModel, "text_encoder"), tokenizer=tokenizer("<|endoftext|>"))
    if case == "sd15":
        return StableDiffusionPipeline(**shared, scheduler=PNDMScheduler.from_pretrained(folder / "scheduler"),
                                       safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    pipe = StableDiffusionXLPipeline(
        **shared, scheduler=EulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        text_encoder_2=part(CLIPTextModelWithProjection, "text_encoder_2"), tokenizer_2=tokenizer("!"))
    end = pipe.tokenizer_2.convert_tokens_to_ids("<|endoftext|>")
    for module in pipe.text_encoder_2.modules():
        if hasattr(module, "eos_token_id"):
            module.eos_token_id = end
    return pipe


def save(name, **tensors):
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.safetensors"
    tensors = {k: torch.from_numpy(normal(rng("inversion", name, k), dims, scale=0.5)) for k, dims in tensors.items()}
    safetensors.torch.save_file(tensors, path)
    report(path)
    return tensors


def main():
    torch.set_num_threads(1)
    web = save("my-style", emb_params=(2, 16))["emb_params"]
    cat, one = save("cat", **{"<cat>": (3, 16)}), save("one", **{"<one>": (16,)})
    xl = save("xl", clip_l=(2, 16), clip_g=(2, 24))
    tensors = {}
    for case, (prompts, negative) in CASES.items():
        pipe = pipeline(case)
        pipe.set_progress_bar_config(disable=True)
        if case == "sd15":
            for state, token in ((cat, None), (one, None), ({"any": web}, "my-style")):
                pipe.load_textual_inversion(state, token=token)
        else:
            for key, tokenizer, encoder in (("clip_l", pipe.tokenizer, pipe.text_encoder),
                                            ("clip_g", pipe.tokenizer_2, pipe.text_encoder_2)):
                pipe.load_textual_inversion({"any": xl[key]}, token="xl-style", tokenizer=tokenizer, text_encoder=encoder)
        latents = normal(rng("inversion", case, "latents"), (len(prompts), 4, 8, 8))
        with torch.no_grad():
            out = pipe(prompt=prompts, negative_prompt=[negative] * len(prompts) if negative else None, height=16, width=16,
                       num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=torch.from_numpy(latents),
                       output_type="latent").images
        tensors |= {f"in/{case}_latents": latents, f"out/{case}_latents": out.numpy()}
    write(FOLDER / "io.safetensors", {k: np.asarray(v) for k, v in tensors.items()}, {
        "prompts": {case: prompts for case, (prompts, _) in CASES.items()},
        "negative": {case: negative for case, (_, negative) in CASES.items()}, "steps": STEPS, "guidance_scale": GUIDANCE,
        "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0],
                     "transformers": transformers.__version__}})


if __name__ == "__main__":
    main()
