"""Five steps of fine-tuning, as diffusers' training scripts compute them in latents.

Usage: python finetune.py (after pipeline.py, whose models it trains)

Writes tests/golden/finetune/<case>/: unet/, a UNet of one level (float16) as Stable Diffusion 1.5, 2.1 (which predicts the
velocity) and SDXL have them, for use with the other parts of pipeline_<case>; and steps.safetensors, in float32 on the CPU:
  in/latents, in/noise: [5, 2, 4, 8, 8]; in/timesteps: [5, 2]; in/encoder_hidden_states: [5, 2, 6, features]; for SDXL
  in/text_embeds and in/time_ids
  out/<run>/loss, out/<run>/grad_norm: [5]; out/<run>/grad/<name> of the first step; out/<run>/<name> after all steps
Runs: `full` trains the whole UNet by `train_text_to_image.py` and `train_text_to_image_sdxl.py` (mean squared error, clipping
to norm 1, AdamW; sd21 with --snr_gamma 5), `lora` only low-rank updates (alpha / rank * up @ down, as PEFT adds them) whose
initial factors are in/lora/<layer>.down and .up. `full` records some weights, `lora` all factors. `text` (sd15, sdxl) trains
updates of the UNet and of the text encoders of pipeline_<case> together, as `train_dreambooth_lora.py --train_text_encoder`
and `train_text_to_image_lora_sdxl.py` do, each part with a learning rate of its own: in/ids and in/ids_2 are its token ids,
in/text/<part>/<layer>.down and .up the factors, and those of the UNet in/lora. Of layers that the loss does not depend on
(the last one of SDXL's first encoder) nothing is recorded. `plus` (sd15) is `lora` with a learning rate of .up that is
lora_plus_ratio times that of .down, in parameter groups as PEFT's create_loraplus_optimizer has them; the factors of the
middle block are recorded. So they are of `masked` (sd15): `lora` whose squared errors are multiplied with in/mask
[5, 2, 1, 8, 8] before their mean over all elements, as kohya's apply_masked_loss does with masks of the size of latents.
Also in/image (bytes, rows first), in/image_noise, and what the autoencoder makes of them: out/mean and out/deviation
(unscaled), and out/sample, drawn with the noise and scaled.
"""

import re

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from common import GOLDEN, normal, report, rng, write
from pipeline import randomize

STEPS, BATCH, TOKENS = 5, 2, 6
RATE, DECAY, NORM, GAMMA = 1e-3, 1e-2, 1.0, 5.0
RANK, ALPHA, PLUS = 2, 6.0, 16.0
TEXT_RATES = {"text_encoder": 5e-4, "text_encoder_2": 2e-4}
TEXT_TARGETS = re.compile(r".*\.(q_proj|k_proj|v_proj|out_proj)")
TARGETS = re.compile(r"(.*\.)?(to_k|to_q|to_v|to_out\.0|proj_in)")
RECORDED = re.compile(r"conv_in\.weight|conv_out\.bias|time_embedding\.linear_1\.weight|add_embedding\.linear_2\.bias|"
                      r"down_blocks\.0\.attentions\.0\.transformer_blocks\.0\.attn2\.to_k\.weight|"
                      r"mid_block\.resnets\.1\.norm2\.weight|mid_block\.attentions\.0\.proj_out\.weight|"
                      r"up_blocks\.0\.resnets\.1\.conv_shortcut\.weight|"
                      r"up_blocks\.0\.attentions\.0\.transformer_blocks\.0\.ff\.net\.0\.proj\.bias")
UNET = dict(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), attention_head_dim=2)
CASES = {
    "sd15": (dict(cross_attention_dim=16), None),
    "sd21": (dict(cross_attention_dim=16, use_linear_projection=True), GAMMA),
    "sdxl": (dict(cross_attention_dim=40, use_linear_projection=True, addition_embed_type="text_time",
                  addition_time_embed_dim=8, projection_class_embeddings_input_dim=60), None),
}


def inputs(case, unet):
    shape = (STEPS, BATCH, 4, 8, 8)
    made = {
        "latents": normal(rng("finetune", case, "latents"), shape),
        "noise": normal(rng("finetune", case, "noise"), shape),
        "timesteps": rng("finetune", case, "timesteps").integers(0, 1000, shape[:2]).astype(np.int32),
        "encoder_hidden_states": normal(rng("finetune", case, "text"),
                                        (STEPS, BATCH, TOKENS, unet.config.cross_attention_dim)),
    }
    if unet.config.addition_embed_type == "text_time":
        made["text_embeds"] = normal(rng("finetune", case, "pooled"), (STEPS, BATCH, 12))
        # Original size, corner of the crop, target size.
        made["time_ids"] = rng("finetune", case, "ids").integers(0, 32, (STEPS, BATCH, 6)).astype(np.float32)
    return made


def prediction(unet, noisy, timesteps, at):
    added = None
    if "text_embeds" in at:
        added = {"text_embeds": at["text_embeds"], "time_ids": at["time_ids"]}
    return unet(noisy, timesteps, at["encoder_hidden_states"], added_cond_kwargs=added, return_dict=False)[0]


def loss_of(unet, scheduler, at, gamma):
    """The loss of the training scripts."""
    timesteps = at["timesteps"].long()
    noisy = scheduler.add_noise(at["latents"], at["noise"], timesteps)
    kind = scheduler.config.prediction_type
    target = at["noise"] if kind == "epsilon" else scheduler.get_velocity(at["latents"], at["noise"], timesteps)
    predicted = prediction(unet, noisy, timesteps, at)
    if "mask" in at:
        return (F.mse_loss(predicted.float(), target.float(), reduction="none") * at["mask"]).mean()
    if gamma is None:
        return F.mse_loss(predicted.float(), target.float(), reduction="mean")
    snr = compute_snr(scheduler, timesteps)
    weights = torch.stack([snr, gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
    weights = weights / (snr if kind == "epsilon" else snr + 1)
    loss = F.mse_loss(predicted.float(), target.float(), reduction="none")
    return (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()


def train(unet, scheduler, data, parameters, gamma=None, plus=1.0):
    return fit(data, parameters, lambda at: loss_of(unet, scheduler, at, gamma), plus)


def fit(data, parameters, loss_at, plus=1.0):
    """Losses, gradient norms and the first step's gradients; `parameters` have the weights afterwards."""
    groups = [{"params": [p for name, p in parameters.items() if name.endswith(".up") == is_up], "lr": RATE * times}
              for is_up, times in ((False, 1.0), (True, plus))]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=DECAY, eps=1e-8)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        at = {name: torch.from_numpy(values[step]) for name, values in data.items()}
        loss = loss_at(at)
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone().numpy() for name, p in parameters.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return np.float32(losses), np.float32(norms), gradients


def low_rank(model, targets, *key):
    """Puts updates beside the targets; their factors by name."""
    factors = {}
    for name, layer in model.named_modules():
        if not (targets.fullmatch(name) and isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))):
            continue
        out, *rest = layer.weight.shape
        gen = rng("finetune", *key, name)
        down = torch.nn.Parameter(torch.from_numpy(normal(gen, (RANK, *rest), scale=1 / RANK)))
        # PEFT begins with zeros, for which the first step's gradient of `down` is zero.
        up = torch.nn.Parameter(torch.from_numpy(normal(gen, (out, RANK), scale=0.1)))
        factors[f"{name}.down"], factors[f"{name}.up"] = down, up

        def beside(layer, given, result, down=down, up=up):
            (x,) = given
            if isinstance(layer, torch.nn.Conv2d):
                update = F.conv2d(F.conv2d(x, down, stride=layer.stride, padding=layer.padding), up[:, :, None, None])
            else:
                update = F.linear(F.linear(x, down), up)
            return result + update * (ALPHA / RANK)

        layer.register_forward_hook(beside)
    return factors


def record(tensors, run, results, parameters, wanted=lambda name: True):
    losses, norms, gradients = results
    tensors[f"out/{run}/loss"], tensors[f"out/{run}/grad_norm"] = losses, norms
    for name, parameter in parameters.items():
        if wanted(name):
            tensors[f"out/{run}/grad/{name}"] = gradients[name]
            tensors[f"out/{run}/{name}"] = parameter.detach().numpy().copy()


def text_and_unet(case, folder, unet, scheduler, data, tensors):
    """The run `text`."""
    factors = {"": low_rank(unet, TARGETS, case, "lora")}
    encoders = {}
    for part in TEXT_RATES:
        if (folder / part).is_dir():
            kind = CLIPTextModel if part == "text_encoder" else CLIPTextModelWithProjection
            encoder = kind.from_pretrained(folder / part, torch_dtype=torch.float32).requires_grad_(False)
            encoders[part] = encoder
            # transformers 5 has no `text_model` around an encoder without projection.
            path = lambda name: name if name.startswith("text_model.") else f"text_model.{name}"
            made = low_rank(encoder, TEXT_TARGETS, case, part)
            factors[part] = {path(name): factor for name, factor in made.items()}
    ids = {part: rng("finetune", case, part).integers(3, 2000, (STEPS, BATCH, TOKENS)).astype(np.int32) for part in encoders}
    for values in ids.values():
        values[..., 0], values[..., 4:] = 2012, 2013

    groups = [{"params": own.values(), "lr": TEXT_RATES.get(part, RATE)} for part, own in factors.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=DECAY, eps=1e-8)
    trained = {(part, name): p for part, own in factors.items() for name, p in own.items()}
    initial = {key: p.detach().numpy().copy() for key, p in trained.items()}
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        at = {name: torch.from_numpy(values[step]) for name, values in data.items()}
        outputs = [encoder(torch.from_numpy(ids[part][step]).long(), output_hidden_states=True)
                   for part, encoder in encoders.items()]
        if "text_embeds" in at:
            at["encoder_hidden_states"] = torch.cat([output.hidden_states[-2] for output in outputs], -1)
            at["text_embeds"] = outputs[-1].text_embeds
        else:
            at["encoder_hidden_states"] = outputs[0].last_hidden_state
        loss = loss_of(unet, scheduler, at, None)
        loss.backward()
        if step == 0:
            trained = {key: p for key, p in trained.items() if p.grad is not None}
            gradients = {key: p.grad.clone().numpy() for key, p in trained.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for at, values in enumerate(ids.values()):
        tensors[f"in/ids{'_2' if at else ''}"] = values
    tensors["out/text/loss"], tensors["out/text/grad_norm"] = np.float32(losses), np.float32(norms)
    for (part, name), parameter in trained.items():
        key = f"{part}/{name}" if part else name
        if part:
            tensors[f"in/text/{key}"] = initial[part, name]
        tensors[f"out/text/grad/{key}"] = gradients[part, name]
        tensors[f"out/text/{key}"] = parameter.detach().numpy().copy()


def encoded(case, folder, tensors):
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    image = rng("finetune", case, "image").integers(0, 256, (16, 16, 3), dtype=np.uint8)
    noise = normal(rng("finetune", case, "image noise"), (1, 4, 8, 8))
    pixels = torch.from_numpy(image).float().permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        distribution = vae.encode(pixels).latent_dist
    sample = (distribution.mean + distribution.std * torch.from_numpy(noise)) * vae.config.scaling_factor
    tensors |= {"in/image": image, "in/image_noise": noise, "out/mean": distribution.mean.numpy(),
                "out/deviation": distribution.std.numpy(), "out/sample": sample.numpy()}


def main():
    for case, (config, gamma) in CASES.items():
        parts, folder = GOLDEN / f"pipeline_{case}", GOLDEN / "finetune" / case
        randomize(UNet2DConditionModel(**UNET, **config), f"finetune_{case}").half().save_pretrained(folder / "unet")
        model = lambda: UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32).train()
        scheduler = DDPMScheduler.from_pretrained(parts / "scheduler")
        data = inputs(case, model())
        tensors = {f"in/{name}": values for name, values in data.items()}
        unet = model()
        parameters = dict(unet.named_parameters())
        record(tensors, "full", train(unet, scheduler, data, parameters, gamma), parameters, RECORDED.fullmatch)
        unet = model().requires_grad_(False)
        factors = low_rank(unet, TARGETS, case, "lora")
        tensors |= {f"in/lora/{name}": factor.detach().numpy().copy() for name, factor in factors.items()}
        record(tensors, "lora", train(unet, scheduler, data, factors), factors)
        if case == "sd15":
            unet = model().requires_grad_(False)
            factors = low_rank(unet, TARGETS, case, "lora")
            results = train(unet, scheduler, data, factors, plus=PLUS)
            in_middle = lambda name: name.startswith("mid_block.")
            record(tensors, "plus", results, factors, in_middle)
            # Some places count in full, some in part and some not.
            drawn = rng("finetune", case, "mask").integers(-2, 7, (STEPS, BATCH, 1, 8, 8))
            tensors["in/mask"] = (drawn / 4).clip(0, 1).astype(np.float32)
            unet = model().requires_grad_(False)
            factors = low_rank(unet, TARGETS, case, "lora")
            results = train(unet, scheduler, data | {"mask": tensors["in/mask"]}, factors)
            record(tensors, "masked", results, factors, in_middle)
        if case != "sd21":
            text_and_unet(case, parts, model().requires_grad_(False), scheduler, data, tensors)
        encoded(case, parts, tensors)
        of_plus = {"lora_plus_ratio": PLUS} if case == "sd15" else {}
        write(folder / "steps.safetensors", tensors, of_plus | {
            "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": NORM, "snr_gamma": gamma,
            "text_rates": TEXT_RATES, "rank": RANK, "alpha": ALPHA, "prediction_type": scheduler.config.prediction_type,
            "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})
        report(folder / "unet/diffusion_pytorch_model.safetensors")


if __name__ == "__main__":
    main()
