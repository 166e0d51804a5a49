"""What FLUX.1's and Stable Diffusion 3's pipelines of diffusers make of images, and FLUX.1's true guidance.

Usage: python transformer_images.py (after flux_pipeline.py and sd3_pipeline.py, whose folders it reads)

Writes images.safetensors in tests/golden/pipeline_flux_dev and tests/golden/pipeline_sd3: in/image and in/mask (bytes), and
the last latents, not packed, of
  out/image_<strength>, out/mask_<strength>: image to image and inpainting, 10 steps, each image with its own generator
    (0.65 of 10 steps cuts a step in two, which is taken);
and for FLUX.1
  out/latent_bicubic: text to image in 8 steps, samples enlarged by 1.5, and image to image in 10 steps of strength 0.55;
  out/true_cfg: from pipeline_flux_dev's in/latents, true_cfg_scale 2.5 and a negative prompt, 6 steps.
and writes pipeline_flux_fill and pipeline_flux_control: folders whose other parts are pipeline_flux_dev's, with the same of
  out/mask_<strength> of FLUX.1 Fill, and out/control of FLUX.1 with in/image as the image that steers.
All in float32 on the CPU from the float16 weights. diffusers 0.42.1 has the 16 channels of the published models in its
inpainting pipeline of Stable Diffusion 3, which are replaced by the tiny model's four.
"""

import inspect
import shutil
import tempfile
import textwrap

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import (FluxControlPipeline, FluxFillPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline, FluxPipeline, FluxTransformer2DModel, StableDiffusion3Img2ImgPipeline,
                       StableDiffusion3InpaintPipeline, StableDiffusion3Pipeline)
from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3_inpaint as sd3_inpaint
from safetensors.numpy import load_file
from transformers import CLIPTokenizer, T5Tokenizer

from common import GOLDEN, rng, write
from flux_pipeline import TRANSFORMER, randomize

PROMPTS, NEGATIVE = ["a red castle above a blue river", "grün café, 绿色 lighthouse"], "fog"
HEIGHT, WIDTH, LENGTH = 16, 24, 24


def tokenizers():
    clip = CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"), merges=str(GOLDEN / "tokenizer/merges.txt"),
                         model_max_length=77)
    with tempfile.TemporaryDirectory() as alone:
        shutil.copy(GOLDEN / "t5_tokenizer/spiece.model", alone)
        t5 = T5Tokenizer.from_pretrained(alone)
    return clip, t5


def generators():
    return [torch.Generator("cpu").manual_seed(i) for i in range(len(PROMPTS))]


def with_four_channels():
    source = textwrap.dedent(inspect.getsource(StableDiffusion3InpaintPipeline.__call__))
    source = source[source.index("def __call__"):]
    found = source.count("num_channels_transformer == 16") + source.count("num_channels_transformer != 16")
    assert found > 0, source
    source = source.replace("num_channels_transformer == 16", "num_channels_transformer == 4")
    source = source.replace("num_channels_transformer != 16", "num_channels_transformer != 4")
    exec(source, sd3_inpaint.__dict__)
    StableDiffusion3InpaintPipeline.__call__ = torch.no_grad()(sd3_inpaint.__dict__["__call__"])


def record(name, pipes, shared, unpack, more):
    text, drawn, painted = pipes
    image = rng("transformer_images", name, "image").integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[4:14, 2:16] = 255
    images = [PIL.Image.fromarray(image)] * len(PROMPTS)
    masks = [PIL.Image.fromarray(mask)] * len(PROMPTS)
    size = dict(height=HEIGHT, width=WIDTH)
    tensors = {"in/image": image, "in/mask": mask}
    for strength in (0.6, 0.65, 1.0):
        made = drawn(**shared, **size, image=images, strength=strength, num_inference_steps=10,
                     generator=generators()).images
        tensors[f"out/image_{strength}"] = unpack(made, HEIGHT, WIDTH)
    for strength in (0.6, 1.0):
        made = painted(**shared, **size, image=images, mask_image=masks, strength=strength, num_inference_steps=10,
                       generator=generators()).images
        tensors[f"out/mask_{strength}"] = unpack(made, HEIGHT, WIDTH)
    tensors |= more(pipes)
    tensors = {k: np.asarray(v) for k, v in tensors.items()}
    write(GOLDEN / f"pipeline_{name}" / "images.safetensors", tensors,
          {"versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})


def enlarged(pipes, shared, unpack):
    text, drawn, _ = pipes
    continued = generators()
    small = text(**shared, height=HEIGHT, width=WIDTH, num_inference_steps=8, generator=continued).images
    small = unpack(small, HEIGHT, WIDTH)
    rows, columns = small.shape[2] * 3 // 2, small.shape[3] * 3 // 2
    large = torch.nn.functional.interpolate(small, size=(rows, columns), mode="bicubic")
    scale = text.vae_scale_factor
    made = drawn(**shared, height=rows * scale, width=columns * scale, image=large, strength=0.55,
                 num_inference_steps=10, generator=continued).images
    return unpack(made, rows * scale, columns * scale)


def seeing(parts, shared, unpack):
    """FLUX.1 Fill, and FLUX.1 with a control image, with the other parts of pipeline_flux_dev."""
    for name, kind, in_channels in (("fill", FluxFillPipeline, 48), ("control", FluxControlPipeline, 32)):
        folder = GOLDEN / f"pipeline_flux_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        transformer = FluxTransformer2DModel(**TRANSFORMER | dict(in_channels=in_channels, out_channels=16),
                                             guidance_embeds=True)
        pipe = kind(**parts | {"transformer": randomize(transformer, name)})
        pipe.set_progress_bar_config(disable=True)
        image = rng("transformer_images", name, "image").integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        mask = rng("transformer_images", name, "mask").integers(118, 138, (HEIGHT, WIDTH), dtype=np.uint8)
        images = [PIL.Image.fromarray(image)] * len(PROMPTS)
        size = dict(height=HEIGHT, width=WIDTH, num_inference_steps=10)
        tensors = {"in/image": image, "in/mask": mask}
        if name == "fill":
            for strength in (0.6, 1.0):
                made = pipe(**shared, **size, image=images, mask_image=[PIL.Image.fromarray(mask)] * len(PROMPTS),
                            strength=strength, generator=generators()).images
                tensors[f"out/mask_{strength}"] = unpack(made, HEIGHT, WIDTH)
        else:
            made = pipe(**shared, **size, control_image=images, generator=generators()).images
            tensors["out/control"] = unpack(made, HEIGHT, WIDTH)
        pipe.to(torch.float16).save_pretrained(folder)
        pipe.to(torch.float32)
        for part in ("tokenizer", "tokenizer_2", "vae", "text_encoder", "text_encoder_2"):
            shutil.rmtree(folder / part)
        write(folder / "images.safetensors", {k: np.asarray(v) for k, v in tensors.items()},
              {"versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})


def parts_of(folder, kind, **given):
    pipe = kind.from_pretrained(GOLDEN / folder, torch_dtype=torch.float32, **given)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main():
    torch.set_num_threads(1)
    clip, t5 = tokenizers()

    text = parts_of("pipeline_flux_dev", FluxPipeline, tokenizer=clip, tokenizer_2=t5)
    keys = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    parts = {k: text.components[k] for k in keys}
    pipes = [text, FluxImg2ImgPipeline(**parts), FluxInpaintPipeline(**parts)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    shared = dict(prompt=PROMPTS, guidance_scale=3.5, max_sequence_length=LENGTH, output_type="latent")
    unpack = lambda made, height, width: text._unpack_latents(made, height, width, text.vae_scale_factor)

    def more(pipes):
        latents = torch.from_numpy(load_file(GOLDEN / "pipeline_flux_dev/io.safetensors")["in/latents"])
        packed = text._pack_latents(latents, *latents.shape)
        made = text(**shared, height=HEIGHT, width=WIDTH, num_inference_steps=6, latents=packed,
                    negative_prompt=[NEGATIVE] * len(PROMPTS), true_cfg_scale=2.5).images
        return {"out/true_cfg": unpack(made, HEIGHT, WIDTH), "out/latent_bicubic": enlarged(pipes, shared, unpack)}

    record("flux_dev", pipes, shared, unpack, more)

    seeing(parts, shared, unpack)

    with_four_channels()
    text = parts_of("pipeline_sd3", StableDiffusion3Pipeline, tokenizer=clip, tokenizer_2=clip, text_encoder_3=None,
                    tokenizer_3=None)
    keys = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3",
            "tokenizer_3", "transformer")
    parts = {k: text.components[k] for k in keys}
    pipes = [text, StableDiffusion3Img2ImgPipeline(**parts), StableDiffusion3InpaintPipeline(**parts)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    shared = dict(prompt=PROMPTS, negative_prompt=[NEGATIVE] * len(PROMPTS), guidance_scale=7.0,
                  max_sequence_length=LENGTH, output_type="latent")
    record("sd3", pipes, shared, lambda made, height, width: made, lambda pipes: {})


if __name__ == "__main__":
    with torch.no_grad():
        main()
