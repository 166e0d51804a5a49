"""Seconds of a training step of diffusers' UNet in PyTorch, bfloat16, on this machine's processors.

Usage: python training_torch.py FOLDER [--lora-rank 16] [--latents 64] [--steps 4]

FOLDER is a model in diffusers' layout (random_model.py makes one). The arithmetic is that of diffusers' training scripts:
noise is added to latents, the error of its prediction is averaged, AdamW follows the gradients. With --lora-rank the base
stays as it is and PEFT's updates of all attention projections are trained in float32 (mixed precision, as in the scripts);
0 trains all weights in bfloat16. Latents and text embeddings are random, so that neither side's encoders count. No gradient
checkpointing, as many threads as processors, not torch.compile. Prints a line of JSON: the minimum and the median of the
steps after a warm-up step, and the peak memory of the process. `training.py` compares it with this program.
"""

import argparse
import json
import pathlib
import resource
import statistics
import time

import diffusers
import peft
import torch


def conditions(config, latents):
    """Text embeddings and SDXL's other conditions for one picture."""
    text = torch.randn(1, 77, config.cross_attention_dim, dtype=torch.bfloat16)
    if config.addition_embed_type != "text_time":
        return text, None
    features = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return text, {"text_embeds": torch.randn(1, features, dtype=torch.bfloat16),
                  "time_ids": torch.full((1, 6), 8.0 * latents, dtype=torch.bfloat16)}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--lora-rank", type=int, default=0)
    arguments.add_argument("--latents", type=int, default=64)
    arguments.add_argument("--steps", type=int, default=4)
    arguments = arguments.parse_args()
    model = diffusers.UNet2DConditionModel.from_pretrained(arguments.folder / "unet", torch_dtype=torch.bfloat16)
    model = model.to(memory_format=torch.channels_last).train()
    if arguments.lora_rank:
        model.requires_grad_(False)
        model.add_adapter(peft.LoraConfig(r=arguments.lora_rank, lora_alpha=arguments.lora_rank,
                                          init_lora_weights="gaussian",
                                          target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
        diffusers.training_utils.cast_training_params(model, dtype=torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    scheduler = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    side = arguments.latents
    latents = torch.randn(1, 4, side, side, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    text, added = conditions(model.config, side)
    seconds, losses = [], []
    for _ in range(arguments.steps + 1):
        start = time.perf_counter()
        noise, timestep = torch.randn_like(latents), torch.randint(0, 1000, (1,))
        noisy = scheduler.add_noise(latents, noise, timestep)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(noisy, timestep, text, added_cond_kwargs=added).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    print(json.dumps({
        "least": min(seconds[1:]), "median": statistics.median(seconds[1:]), "losses": losses,
        "trained": sum(p.numel() for p in trained),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "torch": torch.__version__,
        "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
