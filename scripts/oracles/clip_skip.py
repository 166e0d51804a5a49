"""The results of diffusers with layers of the text encoders left out.

Usage: python clip_skip.py (after pipeline.py, whose pipelines it uses)

Writes tests/golden/clip_skip.safetensors: in/latents (unit normal) and out/<case>_<first><second>, the last latents of the
pipelines sd15 and sdxl with so many layers skipped of the first and of the second text encoder. diffusers skips as many of
both, so each encoder's features come from a call of its own. It skips none for the negative prompt, which therefore
is encoded as a prompt here. The metadata has prompts, steps and guidance.
"""

import diffusers
import torch
import transformers

from common import GOLDEN, normal, rng, write
from textual_inversion import pipeline

PROMPTS = ["a red circle above a blue square", "blue"]
NEGATIVE = "blurry"
STEPS = 6
GUIDANCE = 5.0


def main():
    torch.set_num_threads(1)
    latents = normal(rng("clip_skip", "latents"), (len(PROMPTS), 4, 8, 8))
    tensors = {"in/latents": latents}
    for case, (first, second) in (("sd15", (1, 1)), ("sdxl", (1, 2))):
        pipe = pipeline(case)
        pipe.set_progress_bar_config(disable=True)
        shared = dict(height=16, width=16, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
                      latents=torch.from_numpy(latents), output_type="latent")
        with torch.no_grad():
            if case == "sd15":
                # Where diffusers looks for the final layer norm; transformers 5 has no such module.
                object.__setattr__(pipe.text_encoder, "text_model", pipe.text_encoder)
                encode = lambda texts: pipe.encode_prompt(texts, "cpu", 1, False, clip_skip=first)[0]
                out = pipe(prompt_embeds=encode(PROMPTS), negative_prompt_embeds=encode([NEGATIVE] * len(PROMPTS)), **shared)
            else:
                encode = lambda skip: pipe.encode_prompt(PROMPTS, do_classifier_free_guidance=True, clip_skip=skip)
                (one, no, pooled, no_pooled), (two, *_) = encode(first), encode(second)
                width = pipe.text_encoder.config.hidden_size
                out = pipe(prompt_embeds=torch.cat([one[..., :width], two[..., width:]], -1), negative_prompt_embeds=no,
                           pooled_prompt_embeds=pooled, negative_pooled_prompt_embeds=no_pooled, **shared)
        tensors[f"out/{case}_{first}{second}"] = out.images.numpy()
    write(GOLDEN / "clip_skip.safetensors", tensors, {
        "prompts": PROMPTS, "steps": STEPS, "guidance_scale": GUIDANCE,
        "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0],
                     "transformers": transformers.__version__}})


if __name__ == "__main__":
    main()
