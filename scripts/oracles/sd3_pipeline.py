"""Whole tiny Stable Diffusion 3 pipelines: folders in diffusers' layout, and the results of its StableDiffusion3Pipeline.

Usage: python sd3_pipeline.py (after tokenizer.py and t5_tokenizer.py, whose vocabularies it uses)

Writes tests/golden/pipeline_sd3/ (without T5) and pipeline_sd35/ (with T5, skip-layer guidance and another prompt for the
second text encoder): the folder of a pipeline
(float16 weights; left out are the tokenizers, which are those of tests/golden/tokenizer and tests/golden/t5_tokenizer, T5,
which is that of pipeline_flux_dev, and what pipeline_sd3 has already) and io.safetensors with in/latents (unit normal),
out/latents after the last step and out/images (decoded, in [0, 1]). The metadata has the prompts, the negative prompt, the
steps, the guidance and the length of T5's sequences. All in float32 on the CPU, as diffusers computes it, from the weights
rounded to float16.
"""

import shutil
import tempfile

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel,
                       StableDiffusion3Pipeline)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Tokenizer

from common import GOLDEN, normal, report, rng, write
from flux_pipeline import tiny_t5

PROMPTS, NEGATIVE = ["a red castle above a blue river", "grün café, 绿色 lighthouse"], "fog"
LENGTH = 24
HEIGHT, WIDTH = 16, 24
TRANSFORMER = dict(sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8,
                   num_attention_heads=2, joint_attention_dim=20, caption_projection_dim=16, pooled_projection_dim=14,
                   pos_embed_max_size=7)
VAE = dict(block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2,
           up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4, norm_num_groups=2,
           sample_size=16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5305)
KINDS = {
    "sd3": dict(transformer={}, t5=False, call=dict(guidance_scale=7.0)),
    "sd35": dict(transformer=dict(qk_norm="rms_norm", dual_attention_layers=(0, 1)), t5=True,
                 call=dict(guidance_scale=5.0, skip_guidance_layers=[1], skip_layer_guidance_scale=2.5,
                           skip_layer_guidance_start=0.1, skip_layer_guidance_stop=0.4,
                           prompt_2="a green hill")),
}
STEPS = 20


def randomize(model, name):
    """Random weights of a trained model's size, rounded to float16."""
    for key, param in model.named_parameters():
        gen = rng("sd3_pipeline", name, key)
        if param.ndim == 1:
            value = (1.0 if key.endswith("weight") else 0.0) + normal(gen, param.shape, scale=0.1)
        elif "embedding" in key:
            value = normal(gen, param.shape, scale=0.5)
        else:
            value = normal(gen, param.shape, scale=0.7 / np.sqrt(np.prod(param.shape[1:])))
        param.data = torch.from_numpy(np.asarray(value, np.float16).astype(np.float32))
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.half().float()
    return model.eval()


def main():
    torch.set_num_threads(1)
    tokenizer = CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"),
                              merges=str(GOLDEN / "tokenizer/merges.txt"), model_max_length=77)
    with tempfile.TemporaryDirectory() as alone:
        shutil.copy(GOLDEN / "t5_tokenizer/spiece.model", alone)
        t5_tokenizer = T5Tokenizer.from_pretrained(alone)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    text = dict(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=16, num_hidden_layers=3,
                num_attention_heads=2, max_position_embeddings=77, bos_token_id=end - 1, eos_token_id=2, pad_token_id=1)
    clip_l = randomize(CLIPTextModelWithProjection(CLIPTextConfig(**text, hidden_act="quick_gelu", projection_dim=8)), "l")
    clip_g = randomize(CLIPTextModelWithProjection(CLIPTextConfig(**text, hidden_act="gelu", projection_dim=6)), "g")
    vae = randomize(AutoencoderKL(**VAE), "vae")
    for name, kind in KINDS.items():
        transformer = randomize(SD3Transformer2DModel(**TRANSFORMER, **kind["transformer"]), name)
        pipe = StableDiffusion3Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae, text_encoder=clip_l, tokenizer=tokenizer,
            text_encoder_2=clip_g, tokenizer_2=tokenizer, text_encoder_3=tiny_t5() if kind["t5"] else None,
            tokenizer_3=t5_tokenizer if kind["t5"] else None, transformer=transformer)
        pipe.set_progress_bar_config(disable=True)
        folder = GOLDEN / f"pipeline_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        latents = torch.from_numpy(normal(rng("sd3_pipeline", name, "latents"),
                                          (len(PROMPTS), 4, HEIGHT // 2, WIDTH // 2)))
        shared = dict(prompt=PROMPTS, negative_prompt=[NEGATIVE] * len(PROMPTS), height=HEIGHT, width=WIDTH,
                      num_inference_steps=STEPS, max_sequence_length=LENGTH, latents=latents, **kind["call"])
        if "prompt_2" in shared:
            shared["prompt_2"] = [shared["prompt_2"]] * len(PROMPTS)
        with torch.no_grad():
            made = pipe(**shared, output_type="latent").images
            images = pipe(**shared, output_type="pt").images
        tensors = {"in/latents": latents.numpy(), "out/latents": made.numpy(), "out/images": images.numpy()}
        pipe.to(torch.float16).save_pretrained(folder)
        pipe.to(torch.float32)
        left_out = ["tokenizer", "tokenizer_2", "tokenizer_3", "text_encoder_3"]
        left_out += [] if name == "sd3" else ["vae", "text_encoder", "text_encoder_2"]
        for part in left_out:
            shutil.rmtree(folder / part, ignore_errors=True)
        meta = {"prompts": PROMPTS, "negative_prompt": NEGATIVE, "steps": STEPS, "length": LENGTH,
                "image_size": [HEIGHT, WIDTH], "call": kind["call"],
                "versions": {"diffusers": diffusers.__version__, "transformers": transformers.__version__,
                             "torch": torch.__version__.split("+")[0]}}
        write(folder / "io.safetensors", tensors, meta)
        for path in sorted(folder.rglob("*.safetensors")):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
