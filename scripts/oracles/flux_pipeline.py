"""Whole tiny FLUX.1 pipelines: folders in diffusers' layout, and the results of diffusers' FluxPipeline.

Usage: python flux_pipeline.py (after tokenizer.py and t5_tokenizer.py, whose vocabularies it uses)

Writes tests/golden/pipeline_flux_{dev,schnell}/: the folder of a pipeline (float16 weights, tokenizers left out: they are
those of tests/golden/tokenizer and tests/golden/t5_tokenizer; schnell's other parts but the transformer are dev's) and
io.safetensors with in/latents (unit normal, not packed),
in/prompt_ids.<encoder>, out/latents after the last step (not packed) and out/images (decoded, in [0, 1]). The metadata has
the prompts, the steps, the guidance and the length of T5's sequences. All in float32 on the CPU, as diffusers computes it,
from the weights rounded to float16.
"""

import json
import shutil
import tempfile

import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from common import GOLDEN, normal, report, rng, write

PROMPTS = ["a red castle above a blue river", "grün café, 绿色 lighthouse"]
LENGTH = 24
HEIGHT, WIDTH = 16, 24
TRANSFORMER = dict(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
                   joint_attention_dim=20, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4))
VAE = dict(block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2,
           up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4, norm_num_groups=2,
           sample_size=16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611)
KINDS = {
    "dev": dict(guidance_embeds=True, scheduler=dict(shift=3.0, use_dynamic_shifting=True, base_image_seq_len=4,
                                                     max_image_seq_len=64), steps=20, guidance=3.5),
    "schnell": dict(guidance_embeds=False, scheduler=dict(shift=1.0), steps=4, guidance=0.0),
}


def randomize(model, name):
    """Random weights of a trained model's size, rounded to float16."""
    for key, param in model.named_parameters():
        gen = rng("flux_pipeline", name, key)
        if param.ndim == 1:
            base = 1.0 if key.endswith("weight") else 0.0
            value = base + normal(gen, param.shape, scale=0.1)
        elif "embedding" in key or "shared" in key or "attention_bias" in key:
            value = normal(gen, param.shape, scale=0.5)
        else:
            value = normal(gen, param.shape, scale=0.7 / np.sqrt(np.prod(param.shape[1:])))
        param.data = torch.from_numpy(np.asarray(value, np.float16).astype(np.float32))
    return model.eval()


def tiny_t5():
    return randomize(T5EncoderModel(T5Config(
        vocab_size=448, d_model=20, d_kv=6, d_ff=28, num_layers=2, num_heads=3, feed_forward_proj="gated-gelu",
        dropout_rate=0.0, tie_word_embeddings=False)), "t5")


def main():
    torch.set_num_threads(1)
    clip_tokenizer = CLIPTokenizer(vocab=str(GOLDEN / "tokenizer/vocab.json"),
                                   merges=str(GOLDEN / "tokenizer/merges.txt"), model_max_length=77)
    with tempfile.TemporaryDirectory() as alone:
        shutil.copy(GOLDEN / "t5_tokenizer/spiece.model", alone)
        t5_tokenizer = T5Tokenizer.from_pretrained(alone)
    end = clip_tokenizer.convert_tokens_to_ids("<|endoftext|>")
    clip = randomize(CLIPTextModel(CLIPTextConfig(
        vocab_size=len(clip_tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, hidden_act="quick_gelu", projection_dim=16, bos_token_id=end - 1, eos_token_id=2,
        pad_token_id=1)), "clip")
    t5 = tiny_t5()
    vae = randomize(AutoencoderKL(**VAE), "vae")
    for name, kind in KINDS.items():
        transformer = randomize(FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=kind["guidance_embeds"]), name)
        pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(**kind["scheduler"]), vae=vae, text_encoder=clip,
                            tokenizer=clip_tokenizer, text_encoder_2=t5, tokenizer_2=t5_tokenizer,
                            transformer=transformer)
        pipe.set_progress_bar_config(disable=True)
        folder = GOLDEN / f"pipeline_flux_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        rows, columns = HEIGHT // 2, WIDTH // 2
        latents = torch.from_numpy(normal(rng("flux_pipeline", name, "latents"), (len(PROMPTS), 4, rows, columns)))
        packed = pipe._pack_latents(latents, len(PROMPTS), 4, rows, columns)
        shared = dict(prompt=PROMPTS, height=HEIGHT, width=WIDTH, num_inference_steps=kind["steps"],
                      guidance_scale=kind["guidance"], max_sequence_length=LENGTH, latents=packed)
        with torch.no_grad():
            made = pipe(**shared, output_type="latent").images
            images = pipe(**shared, output_type="pt").images
        made = pipe._unpack_latents(made, HEIGHT, WIDTH, pipe.vae_scale_factor)
        pad = dict(padding="max_length", truncation=True, return_tensors="np")
        tensors = {
            "in/latents": latents.numpy(), "out/latents": made.numpy(), "out/images": images.numpy(),
            "in/prompt_ids.0": clip_tokenizer(PROMPTS, max_length=77, **pad).input_ids.astype(np.int32),
            "in/prompt_ids.1": t5_tokenizer(PROMPTS, max_length=LENGTH, **pad).input_ids.astype(np.int32),
        }
        half = FluxPipeline(**{k: v for k, v in pipe.components.items() if k in (
            "scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")})
        half.to(torch.float16).save_pretrained(folder)
        half.to(torch.float32)
        shared_parts = () if name == "dev" else ("vae", "text_encoder", "text_encoder_2")
        for part in ("tokenizer", "tokenizer_2", *shared_parts):
            shutil.rmtree(folder / part)
        meta = {"prompts": PROMPTS, "steps": kind["steps"], "guidance_scale": kind["guidance"], "length": LENGTH,
                "image_size": [HEIGHT, WIDTH],
                "versions": {"diffusers": diffusers.__version__, "transformers": transformers.__version__,
                             "torch": torch.__version__.split("+")[0]}}
        write(folder / "io.safetensors", tensors, meta)
        for path in sorted(folder.rglob("*.safetensors")):
            if path.name != "io.safetensors":
                report(path)
        assert json.load(open(folder / "model_index.json"))["_class_name"] == "FluxPipeline"


if __name__ == "__main__":
    main()
