"""Five steps of fine-tuning FLUX.1, Stable Diffusion 3 and PixArt, as diffusers' training scripts compute them in latents.

Usage: python finetune_transformers.py (after flux_pipeline.py, sd3_pipeline.py and pixart_pipeline.py, whose transformers it
trains)

Writes tests/golden/finetune/<case>.safetensors for flux_dev, sd3 and pixart_alpha, in float32 on the CPU:
  in/latents, in/noise: [5, 2, 4, 4, 6]; in/timesteps: [5, 2], counted from the lowest noise level, while diffusers' indices count
  from the highest; in/encoder_hidden_states: [5, 2, 6, features]; in/pooled_projections, or for PixArt in/encoder_attention_mask
  out/<run>/loss, out/<run>/grad_norm: [5]; out/<run>/grad/<name> of the first step; out/<run>/<name> after all steps
Runs: of flux_dev `full` is `train_dreambooth_flux.py` (guidance_scale 3.5, weighting_scheme none) and `lora` is
`train_dreambooth_lora_flux.py` with weighting_scheme sigma_sqrt, whose initial factors are in/lora/<layer>.down and .up; of sd3 `full`
is `train_dreambooth_sd3.py` with weighting_scheme cosmap and precondition_outputs 1; of pixart_alpha it is the loss of
`train_pixart_controlnet_hf.py` for the transformer itself. AdamW and clipping are those of finetune.py. `lora` records all factors,
`full` some weights.

Also tests/golden/finetune/flow_matching.safetensors: in/uniform and in/normal, what compute_density_for_timestep_sampling makes of
the draws of the same generator, out/density/<case> and out/timesteps/<case> (diffusers' indices), and compute_loss_weighting_for_sd3
at all levels of Stable Diffusion 3 and FLUX.1 dev, out/sigmas/<model> and out/weights/<model>/<scheme>. The metadata has each case's
arguments.
"""

import re

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (DDPMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel,
                       PixArtTransformer2DModel, SD3Transformer2DModel)
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from common import GOLDEN, normal, rng, write
from finetune import ALPHA, BATCH, DECAY, NORM, RANK, RATE, STEPS, TOKENS, fit, low_rank, record

GUIDANCE = 3.5
ROWS, COLUMNS, FACTOR = 4, 6, 2
CASES = {"flux_dev": FluxTransformer2DModel, "sd3": SD3Transformer2DModel, "pixart_alpha": PixArtTransformer2DModel}
# The target modules of train_dreambooth_lora_flux.py.
FLUX_TARGETS = re.compile(r".*\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|(ff|ff_context)\.net\.(0\.proj|2))")
RECORDED = {
    "flux_dev": r"x_embedder\.weight|context_embedder\.bias|time_text_embed\.guidance_embedder\.linear_1\.weight|"
                r"time_text_embed\.text_embedder\.linear_2\.bias|transformer_blocks\.0\.attn\.add_k_proj\.weight|"
                r"transformer_blocks\.0\.norm1\.linear\.bias|single_transformer_blocks\.1\.proj_out\.weight|"
                r"single_transformer_blocks\.0\.attn\.norm_q\.weight|proj_out\.bias",
    "sd3": r"pos_embed\.proj\.weight|context_embedder\.bias|time_text_embed\.timestep_embedder\.linear_1\.weight|"
           r"transformer_blocks\.0\.attn\.add_q_proj\.weight|transformer_blocks\.1\.ff\.net\.2\.weight|"
           r"transformer_blocks\.2\.norm1_context\.linear\.weight|proj_out\.weight",
    "pixart_alpha": r"pos_embed\.proj\.weight|adaln_single\.emb\.resolution_embedder\.linear_1\.weight|"
                    r"adaln_single\.emb\.aspect_ratio_embedder\.linear_2\.bias|adaln_single\.linear\.bias|"
                    r"caption_projection\.linear_2\.weight|transformer_blocks\.0\.attn2\.to_v\.weight|"
                    r"transformer_blocks\.1\.scale_shift_table|scale_shift_table|proj_out\.weight",
}


def inputs(case, config):
    gen = lambda what: rng("finetune_transformers", case, what)
    shape = (STEPS, BATCH, 4, ROWS, COLUMNS)
    features = config.caption_channels if case == "pixart_alpha" else config.joint_attention_dim
    made = {
        "latents": normal(gen("latents"), shape),
        "noise": normal(gen("noise"), shape),
        "timesteps": gen("timesteps").integers(0, 1000, shape[:2]).astype(np.int32),
        "encoder_hidden_states": normal(gen("text"), (STEPS, BATCH, TOKENS, features)),
    }
    if case == "pixart_alpha":
        mask = np.ones((STEPS, BATCH, TOKENS), np.float32)
        mask[:, 0, 4:], mask[:, 1, 2:] = 0, 0
        made["encoder_attention_mask"] = mask
    else:
        made["pooled_projections"] = normal(gen("pooled"), (STEPS, BATCH, config.pooled_projection_dim))
    return made


def levels(scheduler, timesteps):
    """The scripts' timesteps and sigmas of `indices`, which count from the highest level."""
    indices = scheduler.config.num_train_timesteps - 1 - timesteps.long()
    told = scheduler.timesteps[indices]
    # get_sigmas of the scripts.
    places = [(scheduler.timesteps == t).nonzero().item() for t in told]
    return told, scheduler.sigmas[places].flatten().reshape(-1, 1, 1, 1)


def flux(model, scheduler, at, scheme):
    told, sigmas = levels(scheduler, at["timesteps"])
    noisy = (1.0 - sigmas) * at["latents"] + sigmas * at["noise"]
    batch, channels, rows, columns = noisy.shape
    predicted = model(
        hidden_states=FluxPipeline._pack_latents(noisy, batch, channels, rows, columns), timestep=told / 1000,
        guidance=torch.tensor([GUIDANCE]).expand(batch), pooled_projections=at["pooled_projections"],
        encoder_hidden_states=at["encoder_hidden_states"], txt_ids=torch.zeros(TOKENS, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, rows // 2, columns // 2, "cpu", torch.float32),
        return_dict=False)[0]
    predicted = FluxPipeline._unpack_latents(predicted, rows * FACTOR, columns * FACTOR, FACTOR)
    weights = compute_loss_weighting_for_sd3(weighting_scheme=scheme, sigmas=sigmas)
    target = at["noise"] - at["latents"]
    return torch.mean((weights.float() * (predicted.float() - target.float()) ** 2).reshape(batch, -1), 1).mean()


def sd3(model, scheduler, at, scheme):
    told, sigmas = levels(scheduler, at["timesteps"])
    noisy = (1.0 - sigmas) * at["latents"] + sigmas * at["noise"]
    predicted = model(hidden_states=noisy, timestep=told, encoder_hidden_states=at["encoder_hidden_states"],
                      pooled_projections=at["pooled_projections"], return_dict=False)[0]
    # precondition_outputs.
    predicted, target = predicted * (-sigmas) + noisy, at["latents"]
    weights = compute_loss_weighting_for_sd3(weighting_scheme=scheme, sigmas=sigmas)
    error = (weights.float() * (predicted.float() - target.float()) ** 2).reshape(len(target), -1)
    return torch.mean(error, 1).mean()


def pixart(model, scheduler, at):
    noisy = scheduler.add_noise(at["latents"], at["noise"], at["timesteps"].long())
    height, width = ROWS * FACTOR, COLUMNS * FACTOR
    added = {"resolution": torch.tensor([[float(height), float(width)]]).repeat(BATCH, 1),
             "aspect_ratio": torch.tensor([[height / width]]).repeat(BATCH, 1)}
    predicted = model(noisy, encoder_hidden_states=at["encoder_hidden_states"],
                      encoder_attention_mask=at["encoder_attention_mask"], timestep=at["timesteps"],
                      added_cond_kwargs=added, return_dict=False)[0]
    predicted = predicted.chunk(2, dim=1)[0]
    return F.mse_loss(predicted.float(), at["noise"].float(), reduction="mean")


def train_case(case, kind):
    folder = GOLDEN / f"pipeline_{case}"
    model = lambda: kind.from_pretrained(folder / "transformer", torch_dtype=torch.float32).train()
    flow = case != "pixart_alpha"
    scheduler = (FlowMatchEulerDiscreteScheduler if flow else DDPMScheduler).from_pretrained(folder / "scheduler")
    data = inputs(case, model().config)
    tensors = {f"in/{name}": values for name, values in data.items()}
    trained = model()
    parameters = dict(trained.named_parameters())
    losses = {"flux_dev": lambda at: flux(trained, scheduler, at, "none"),
              "sd3": lambda at: sd3(trained, scheduler, at, "cosmap"),
              "pixart_alpha": lambda at: pixart(trained, scheduler, at)}
    record(tensors, "full", fit(data, parameters, losses[case]), parameters, re.compile(RECORDED[case]).fullmatch)
    if case == "flux_dev":
        trained = model().requires_grad_(False)
        factors = low_rank(trained, FLUX_TARGETS, "transformers", case)
        tensors |= {f"in/lora/{name}": factor.detach().numpy().copy() for name, factor in factors.items()}
        record(tensors, "lora", fit(data, factors, lambda at: flux(trained, scheduler, at, "sigma_sqrt")), factors)
    write(GOLDEN / "finetune" / f"{case}.safetensors", tensors, {
        "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": NORM, "rank": RANK, "alpha": ALPHA,
        "guidance_scale": GUIDANCE, "image_size": [ROWS * FACTOR, COLUMNS * FACTOR], "versions": versions()})


def versions():
    return {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}


def densities():
    count, seed = 64, 7
    fresh = lambda: torch.Generator().manual_seed(seed)
    uniform, unit = torch.rand(count, generator=fresh()), torch.randn(count, generator=fresh())
    tensors, cases = {"in/uniform": uniform.numpy(), "in/normal": unit.numpy()}, {}
    for name, scheme, arguments in [
            ("none", "none", {}), ("normal", "logit_normal", dict(logit_mean=0.0, logit_std=1.0)),
            ("narrow", "logit_normal", dict(logit_mean=0.6, logit_std=0.4)), ("mode", "mode", dict(mode_scale=1.29)),
            ("ends", "mode", dict(mode_scale=-0.8))]:
        made = compute_density_for_timestep_sampling(scheme, count, generator=fresh(), **arguments)
        tensors[f"out/density/{name}"] = made.numpy()
        tensors[f"out/timesteps/{name}"] = (made * 1000).long().numpy().astype(np.int32)
        cases[name] = {"scheme": scheme, **arguments}
    for model in ("sd3", "flux_dev"):
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(GOLDEN / f"pipeline_{model}" / "scheduler")
        tensors[f"out/sigmas/{model}"] = scheduler.sigmas.numpy()
        for scheme in ("sigma_sqrt", "cosmap"):
            weights = compute_loss_weighting_for_sd3(scheme, scheduler.sigmas)
            tensors[f"out/weights/{model}/{scheme}"] = weights.numpy()
    write(GOLDEN / "finetune" / "flow_matching.safetensors", tensors, {"cases": cases, "versions": versions()})


def main():
    torch.set_num_threads(1)
    densities()
    for case, kind in CASES.items():
        train_case(case, kind)


if __name__ == "__main__":
    main()
