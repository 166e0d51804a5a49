"""Whole tiny text-to-image pipelines: folders in diffusers' layout, and the results of diffusers.

Usage: python pipeline.py (after tokenizer.py, whose vocabulary it uses)

Writes tests/golden/pipeline_<case>/: the folder of a pipeline (float16 weights, tokenizers left out: they are those of
tests/golden/tokenizer) and io.safetensors with in/latents (unit normal), in/prompt_ids.<encoder> and
in/negative_ids.<encoder> (one row for each image), out/latents after the last step and out/images (decoded, in
[0, 1]). The metadata has the prompts, the steps and the guidance. All in float32 on the CPU, as diffusers computes it,
from the weights rounded to float16. pipeline_sd21/from_image.safetensors has in/image and in/mask (bytes, rows first) and the
last latents of ten steps from them at two strengths: out/image_<strength>, out/mask_<strength>; and with fresh noise in each
step: out/mask_ancestral. pipeline_sd15/ also has two ControlNets, and controlled.safetensors the results with the first
(out/latents) and with both (out/both). pipeline_sd15/ and pipeline_sdxl/ have a UNet of nine channels in unet_inpainting/,
for use with the other parts, and its results in inpainted.safetensors. pipeline_refiner/ has the UNet of a refiner, for use
with text_encoder_2/ and vae/ of pipeline_sdxl/, and refined.safetensors its results from that model's samples
(out/<sampler>, from in/latents) and from an image (out/alone). pipeline_sd21/ and pipeline_sdxl/ have hires.safetensors: samples
drawn small, enlarged and drawn again (out/<upscaler>).
"""

import json
import shutil

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from diffusers import (
    AutoencoderKL, ControlNetModel, DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler, PNDMScheduler, StableDiffusionControlNetPipeline, StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline, StableDiffusionPipeline, StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline, StableDiffusionXLPipeline, UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from common import GOLDEN, normal, report, rng, write

STEPS = 20
GUIDANCE = 7.5
PROMPTS = ["a red circle above a blue square", "ein grünes Dreieck, 绿色"]
NEGATIVE = "blurry"
SD = dict(num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
UNET = dict(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
            norm_num_groups=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=2)
VAE = dict(block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
           up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4, norm_num_groups=4,
           sample_size=16)


def text_config(tokenizer, hidden, act, projection=None):
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    return CLIPTextConfig(vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden,
                          num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=77, hidden_act=act,
                          projection_dim=projection or hidden, bos_token_id=end - 1, eos_token_id=2, pad_token_id=1)


def randomize(model, name):
    """Random weights of a trained model's size, rounded to float16."""
    for key, param in model.named_parameters():
        gen = rng("pipeline", name, key)
        if param.ndim == 1:
            base = 1.0 if key.endswith("weight") else 0.0
            value = base + normal(gen, param.shape, scale=0.1)
        elif "embedding" in key:
            value = normal(gen, param.shape, scale=0.5)
        else:
            value = normal(gen, param.shape, scale=0.7 / np.sqrt(np.prod(param.shape[1:])))
        param.data = torch.from_numpy(np.asarray(value, np.float16).astype(np.float32))
    return model.eval()


def cases(tokenizer):
    tokenizer_2 = CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"), merges=str(GOLDEN / "tokenizer/merges.txt"),
                                pad_token="!", model_max_length=77)
    eps = dict(SD, prediction_type="epsilon", clip_sample=False, set_alpha_to_one=False)
    one = randomize(CLIPTextModel(text_config(tokenizer, 16, "quick_gelu")), "text_16")
    unet = randomize(UNet2DConditionModel(**UNET, cross_attention_dim=16), "unet_sd")
    vae = randomize(AutoencoderKL(**VAE, scaling_factor=0.18215), "vae")
    plain = dict(vae=vae, text_encoder=one, tokenizer=tokenizer, unet=unet, safety_checker=None,
                 feature_extractor=None, requires_safety_checker=False)
    yield "sd15", StableDiffusionPipeline(**plain, scheduler=PNDMScheduler(
        **dict(SD, prediction_type="epsilon", skip_prk_steps=True, set_alpha_to_one=False)))
    yield "sd21", StableDiffusionPipeline(**dict(plain, text_encoder=randomize(
        CLIPTextModel(text_config(tokenizer, 16, "gelu")), "text_16b")), scheduler=DDIMScheduler(
        **dict(eps, prediction_type="v_prediction")))
    two = randomize(CLIPTextModelWithProjection(text_config(tokenizer, 24, "gelu", 12)), "text_24")
    xl = randomize(UNet2DConditionModel(**dict(UNET, transformer_layers_per_block=(2, 1)), cross_attention_dim=40,
                                        use_linear_projection=True, addition_embed_type="text_time",
                                        addition_time_embed_dim=8, projection_class_embeddings_input_dim=60), "unet_xl")
    vae_xl = randomize(AutoencoderKL(**VAE, scaling_factor=0.13025), "vae")
    yield "sdxl", StableDiffusionXLPipeline(vae=vae_xl, text_encoder=one, text_encoder_2=two, tokenizer=tokenizer,
                                            tokenizer_2=tokenizer_2, unet=xl,
                                            scheduler=EulerDiscreteScheduler(**dict(SD, timestep_spacing="leading")))


def from_image(case, pipe, folder):
    """Image to image, and inpainting with a mask, each image with its own generator."""
    image = rng("pipeline", case, "image").integers(0, 256, (16, 16, 3), dtype=np.uint8)
    mask = np.zeros((16, 16), np.uint8)
    mask[4:14, 2:10] = 255
    parts = {k: v for k, v in pipe.components.items() if k != "image_encoder"}
    shared = dict(prompt=PROMPTS, negative_prompt=[NEGATIVE] * len(PROMPTS), num_inference_steps=10,
                  guidance_scale=GUIDANCE, output_type="latent")
    generators = lambda: [torch.Generator("cpu").manual_seed(i) for i in range(len(PROMPTS))]
    tensors = {"in/image": image, "in/mask": mask}
    drawn = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
    painted = StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
    images = [PIL.Image.fromarray(image)] * len(PROMPTS)
    with torch.no_grad():
        for kind, strength in (("image_0.6", 0.6), ("image_1", 1.0)):
            tensors[f"out/{kind}"] = drawn(**shared, image=images, strength=strength, generator=generators()).images
        for kind, strength in (("mask_0.6", 0.6), ("mask_1", 1.0)):
            tensors[f"out/{kind}"] = painted(
                **shared, image=images, mask_image=[PIL.Image.fromarray(mask)] * len(PROMPTS), strength=strength,
                generator=generators(), height=16, width=16).images
        painted.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
        tensors["out/mask_ancestral"] = painted(
            **shared, image=images, mask_image=[PIL.Image.fromarray(mask)] * len(PROMPTS), strength=0.6,
            generator=generators(), height=16, width=16).images
    write(folder / "from_image.safetensors", {k: np.asarray(v) for k, v in tensors.items()}, {"steps": 10})


def enlarged(case, pipe, folder):
    """A hi-res fix: text to image, samples or images enlarged, and image to image with the same generators."""
    kind = StableDiffusionXLImg2ImgPipeline if case == "sdxl" else StableDiffusionImg2ImgPipeline
    parts = {k: v for k, v in pipe.components.items() if k not in ("image_encoder", "watermark")}
    redraw = kind(**parts) if case == "sdxl" else kind(**parts, requires_safety_checker=False)
    redraw.set_progress_bar_config(disable=True)
    shared = dict(prompt=PROMPTS, negative_prompt=None if case == "sdxl" else [NEGATIVE] * len(PROMPTS),
                  guidance_scale=GUIDANCE, output_type="latent")
    tensors = {}
    for name, mode in (("latent", "bilinear"), ("latent_bicubic", "bicubic"), ("lanczos", None)):
        if (case == "sdxl") != (mode == "bilinear"):
            continue
        generators = [torch.Generator("cpu").manual_seed(i) for i in range(len(PROMPTS))]
        with torch.no_grad():
            small = pipe(**shared, height=16, width=16, num_inference_steps=8, generator=generators).images
            if mode is None:
                images = (pipe.vae.decode(small / pipe.vae.config.scaling_factor).sample / 2 + 0.5).clamp(0, 1)
                images = [PIL.Image.fromarray(i) for i in (images.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)]
                large = [image.resize((20, 24), PIL.Image.LANCZOS) for image in images]
            else:
                large = torch.nn.functional.interpolate(small, size=(12, 10), mode=mode)
            tensors[f"out/{name}"] = redraw(**shared, image=large, num_inference_steps=10, strength=0.55,
                                            generator=generators).images.numpy()
    write(folder / "hires.safetensors", tensors, {"steps": 8, "hires_steps": 10, "strength": 0.55})


def inpainted(case, pipe, folder):
    """An inpainting UNet, which sees a mask and a masked image, at two strengths and with fresh noise in each step."""
    nine = randomize(UNet2DConditionModel.from_config(dict(pipe.unet.config, in_channels=9)), f"unet_nine_{case}")
    image = rng("pipeline", case, "inpainted image").integers(0, 256, (16, 16, 3), dtype=np.uint8)
    # Greys on both sides of the middle, which are rounded.
    mask = rng("pipeline", case, "inpainted mask").integers(118, 138, (16, 16), dtype=np.uint8)
    parts = {k: v for k, v in pipe.components.items() if k != "image_encoder"}
    if case == "sdxl":
        painted = StableDiffusionXLInpaintPipeline(**dict(parts, unet=nine))
    else:
        painted = StableDiffusionInpaintPipeline(**dict(parts, unet=nine), requires_safety_checker=False)
    painted.set_progress_bar_config(disable=True)
    tensors = {"in/image": image, "in/mask": mask}
    euler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
    for kind, strength, scheduler in (("0.6", 0.6, pipe.scheduler), ("1", 1.0, pipe.scheduler), ("ancestral", 0.6, euler),
                                      ("ancestral_1", 1.0, euler)):
        painted.scheduler = scheduler
        with torch.no_grad():
            tensors[f"out/{kind}"] = painted(
                prompt=PROMPTS, negative_prompt=None if case == "sdxl" else [NEGATIVE] * len(PROMPTS),
                num_inference_steps=12, guidance_scale=GUIDANCE, image=[PIL.Image.fromarray(image)] * len(PROMPTS),
                mask_image=[PIL.Image.fromarray(mask)] * len(PROMPTS), strength=strength, height=16, width=16,
                generator=[torch.Generator("cpu").manual_seed(i) for i in range(len(PROMPTS))],
                output_type="latent").images.numpy()
    write(folder / "inpainted.safetensors", tensors, {"steps": 12})
    nine.half().save_pretrained(folder / "unet_inpainting")
    nine.float()


def refined(pipe):
    """A refiner that continues with the samples of `pipe`, and alone from an image."""
    folder = GOLDEN / "pipeline_refiner"
    shutil.rmtree(folder, ignore_errors=True)
    config = dict(pipe.unet.config, cross_attention_dim=24, projection_class_embeddings_input_dim=12 + 5 * 8,
                  transformer_layers_per_block=1)
    unet = randomize(UNet2DConditionModel.from_config(config), "unet_refiner")
    refiner = StableDiffusionXLImg2ImgPipeline(
        vae=pipe.vae, text_encoder=None, text_encoder_2=pipe.text_encoder_2, tokenizer=None, tokenizer_2=pipe.tokenizer_2,
        unet=unet, scheduler=EulerDiscreteScheduler(**dict(SD, timestep_spacing="leading")),
        requires_aesthetics_score=True, force_zeros_for_empty_prompt=False)
    refiner.set_progress_bar_config(disable=True)
    latents = normal(rng("pipeline", "refiner", "latents"), (len(PROMPTS), 4, 8, 8))
    image = rng("pipeline", "refiner", "image").integers(0, 256, (16, 16, 3), dtype=np.uint8)
    scores = dict(aesthetic_score=7.0, negative_aesthetic_score=3.0)
    shared = dict(prompt=PROMPTS, num_inference_steps=15, guidance_scale=GUIDANCE, output_type="latent")
    tensors = {"in/latents": latents, "in/image": image}
    own = pipe.scheduler, refiner.scheduler
    with torch.no_grad():
        for kind in ("euler", "multistep"):
            if kind == "multistep":
                pipe.scheduler, refiner.scheduler = (DPMSolverMultistepScheduler.from_config(s.config) for s in own)
            half = pipe(**shared, denoising_end=0.7, latents=torch.from_numpy(latents), height=16, width=16).images
            tensors[f"out/{kind}"] = refiner(**shared, **scores, image=half, denoising_start=0.7).images.numpy()
        pipe.scheduler, refiner.scheduler = own
        tensors["out/alone"] = refiner(
            **shared, **scores, image=[PIL.Image.fromarray(image)] * len(PROMPTS), strength=0.7,
            generator=[torch.Generator("cpu").manual_seed(i) for i in range(len(PROMPTS))]).images.numpy()
    write(folder / "refined.safetensors", tensors, {"steps": 15, "share": 0.7, "strength": 0.7, **scores})
    unet.half().save_pretrained(folder / "unet")
    refiner.scheduler.save_pretrained(folder / "scheduler")
    write_index(refiner, folder)
    for file in sorted(folder.rglob("*.safetensors")):
        report(file)


def write_index(pipe, folder):
    index = {k: v for k, v in pipe.config.items() if not k.startswith("_")}
    index = {"_class_name": type(pipe).__name__} | {k: list(v) if isinstance(v, tuple) else v for k, v in index.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def controlled(case, pipe, folder):
    """A ControlNet that steers the first six tenths of the steps, and with it one that steers the last seven."""
    unet = {k: v for k, v in UNET.items() if k not in ("sample_size", "out_channels", "up_block_types")}
    net = randomize(ControlNetModel(**unet, cross_attention_dim=16, conditioning_embedding_out_channels=(4, 8)),
                    f"control_{case}")
    other = randomize(ControlNetModel(**unet, cross_attention_dim=16, conditioning_embedding_out_channels=(4, 8)),
                      f"control_other_{case}")
    image = rng("pipeline", case, "control").integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image_1 = rng("pipeline", case, "other control").integers(0, 256, (16, 16, 3), dtype=np.uint8)
    latents = normal(rng("pipeline", case, "latents"), (len(PROMPTS), 4, 8, 8))
    parts = {k: v for k, v in pipe.components.items() if k != "image_encoder"}
    shared = dict(prompt=PROMPTS, negative_prompt=[NEGATIVE] * len(PROMPTS), num_inference_steps=10, guidance_scale=GUIDANCE,
                  height=16, width=16, output_type="latent")
    images, images_1 = ([PIL.Image.fromarray(i)] * len(PROMPTS) for i in (image, image_1))
    outs = []
    for nets, settings in (
            (net, dict(image=images, controlnet_conditioning_scale=0.7, control_guidance_end=0.6)),
            ([net, other], dict(image=[list(pair) for pair in zip(images, images_1)],
                                controlnet_conditioning_scale=[0.7, 0.4], control_guidance_start=[0.0, 0.3],
                                control_guidance_end=[0.6, 1.0]))):
        steered = StableDiffusionControlNetPipeline(**parts, controlnet=nets, requires_safety_checker=False)
        steered.set_progress_bar_config(disable=True)
        with torch.no_grad():
            outs.append(steered(**shared, **settings, latents=torch.from_numpy(latents)).images.numpy())
    write(folder / "controlled.safetensors",
          {"in/image": image, "in/image_1": image_1, "in/latents": latents, "out/latents": outs[0], "out/both": outs[1]},
          {"steps": 10, "scale": 0.7, "end": 0.6, "scale_1": 0.4, "start_1": 0.3})
    for name, each in (("controlnet", net), ("controlnet_1", other)):
        each.half().save_pretrained(folder / name)
        each.float()


def main():
    torch.set_num_threads(1)
    tokenizer = CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"), merges=str(GOLDEN / "tokenizer/merges.txt"),
                              model_max_length=77)
    for case, pipe in cases(tokenizer):
        folder = GOLDEN / f"pipeline_{case}"
        shutil.rmtree(folder, ignore_errors=True)
        pipe.set_progress_bar_config(disable=True)
        negative = "" if case == "sdxl" else NEGATIVE
        latents = normal(rng("pipeline", case, "latents"), (len(PROMPTS), 4, 8, 8))
        with torch.no_grad():
            out = pipe(prompt=PROMPTS, negative_prompt=[negative] * len(PROMPTS) if negative else None, height=16,
                       width=16, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
                       latents=torch.from_numpy(latents), output_type="latent").images
            images = pipe.vae.decode(out / pipe.vae.config.scaling_factor).sample
            images = (images / 2 + 0.5).clamp(0, 1)
        tensors = {"in/latents": latents, "out/latents": out.numpy(), "out/images": images.numpy()}
        for name in ("tokenizer", "tokenizer_2"):
            part = getattr(pipe, name, None)
            if part is None:
                continue
            encoder = name.replace("tokenizer", "text_encoder")
            for kind, texts in (("prompt", PROMPTS), ("negative", [negative] * len(PROMPTS))):
                ids = part(texts, padding="max_length", truncation=True, max_length=77, return_tensors="np").input_ids
                tensors[f"in/{kind}_ids.{encoder}"] = ids.astype(np.int32)
        for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
            part = getattr(pipe, name, None)
            if part is not None:
                part.half().save_pretrained(folder / name)
                part.float()
        pipe.scheduler.save_pretrained(folder / "scheduler")
        write_index(pipe, folder)
        if case == "sd15":
            controlled(case, pipe, folder)
        if case in ("sd15", "sdxl"):
            inpainted(case, pipe, folder)
        if case == "sdxl":
            refined(pipe)
        if case == "sd21":
            from_image(case, pipe, folder)
        if case in ("sd21", "sdxl"):
            enlarged(case, pipe, folder)
        write(folder / "io.safetensors", tensors, {
            "prompts": PROMPTS, "negative": negative, "steps": STEPS, "guidance_scale": GUIDANCE,
            "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0],
                         "transformers": transformers.__version__}})
        for file in sorted(folder.rglob("*.safetensors")):
            report(file)


if __name__ == "__main__":
    main()
