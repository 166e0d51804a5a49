"""Five steps of training a new token, alone and with low-rank updates of the UNet, as diffusers' scripts compute them.

Usage: python token_training.py (after finetune.py, whose UNets and updates it trains)

Writes tests/golden/finetune/<case>/token.safetensors for sd15 (run `token`) and sdxl (run `pivotal`), in float32 on the CPU:
  in/ids, in/ids_2: [5, 2, 6], in which the ids behind the vocabulary (`first` in the metadata) are those of the token's two
  vectors; in/latents, in/noise, in/timesteps and for SDXL in/time_ids as in steps.safetensors
  out/<run>/loss, out/<run>/grad_norm: [5]; out/<run>/<part>, the vectors [2, features] after all steps; and out/<run>/grad/<part>
  those of the first step
`token` is `textual_inversion.py` and `textual_inversion_sdxl.py`: the embedding tables are trained, and all rows but the new ones are
put back after each step. Both vectors start from the row of the token `initializer`. `pivotal` trains updates of the UNet beside them, whose
initial factors are in/lora of steps.safetensors, with the learning rate of finetune.py; out/pivotal/<layer>.down and .up are the
factors.
"""

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from common import GOLDEN, rng, write
from finetune import BATCH, DECAY, RATE, STEPS, TARGETS, TOKENS, inputs, loss_of, low_rank

TOKEN_RATE, VECTORS, INITIALIZER = 2e-3, 2, 7
PARTS = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
START, END = 2012, 2013
RUNS = {"sd15": ["token"], "sdxl": ["pivotal"]}


def encoders(folder):
    """The text encoders with rows for the token, and the first of its ids."""
    found, first = {}, {}
    for part, kind in PARTS.items():
        if not (folder / part).is_dir():
            continue
        encoder = kind.from_pretrained(folder / part, torch_dtype=torch.float32).requires_grad_(False)
        for module in encoder.modules():
            # Pool at the end token, not at the highest id, which is the new token's.
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = END
        first[part] = encoder.get_input_embeddings().weight.shape[0]
        encoder.resize_token_embeddings(first[part] + VECTORS, mean_resizing=False)
        table = encoder.get_input_embeddings().weight
        with torch.no_grad():
            table[first[part]:] = table[INITIALIZER]
        table.requires_grad_(True)
        found[part] = encoder
    return found, first


def captions(case, part, first):
    ids = rng("token", case, part).integers(3, 2000, (STEPS, BATCH, TOKENS)).astype(np.int32)
    ids[..., 0], ids[..., 4:] = START, END
    # Both vectors in one caption, the second alone in the other.
    ids[:, 0, 1:3] = [first, first + 1]
    ids[:, 1, 2] = first + 1
    return ids


def train(case, folder, unet, scheduler, data, factors):
    models, first = encoders(folder)
    ids = {part: captions(case, part, first[part]) for part in models}
    tables = {part: model.get_input_embeddings().weight for part, model in models.items()}
    before = {part: table.detach().clone() for part, table in tables.items()}
    groups = [{"params": list(tables.values()), "lr": TOKEN_RATE}, {"params": list(factors.values()), "lr": RATE}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=DECAY, eps=1e-8)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        at = {name: torch.from_numpy(values[step]) for name, values in data.items()}
        outputs = [model(torch.from_numpy(ids[part][step]).long(), output_hidden_states=True)
                   for part, model in models.items()]
        if "text_embeds" in at:
            at["encoder_hidden_states"] = torch.cat([output.hidden_states[-2] for output in outputs], -1)
            at["text_embeds"] = outputs[-1].text_embeds
        else:
            at["encoder_hidden_states"] = outputs[0].last_hidden_state
        loss = loss_of(unet, scheduler, at, None)
        loss.backward()
        own = {part: table.grad[first[part]:].clone() for part, table in tables.items()}
        own |= {name: factor.grad.clone() for name, factor in factors.items()}
        if step == 0:
            gradients = {name: grad.numpy() for name, grad in own.items()}
        norms.append(float(torch.sqrt(sum((grad ** 2).sum() for grad in own.values()))))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for part, table in tables.items():
                table[:first[part]] = before[part][:first[part]]
        losses.append(float(loss.detach()))
    trained = {part: table.detach()[first[part]:] for part, table in tables.items()} | factors
    trained = {name: value.detach().numpy().copy() for name, value in trained.items()}
    return ids, first, (np.float32(losses), np.float32(norms), gradients, trained)


def main():
    torch.set_num_threads(1)
    for case in RUNS:
        parts, folder = GOLDEN / f"pipeline_{case}", GOLDEN / "finetune" / case
        model = lambda: UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32).requires_grad_(False)
        scheduler = DDPMScheduler.from_pretrained(parts / "scheduler")
        data = inputs(case, model())
        tensors = {f"in/{name}": values for name, values in data.items() if name not in ("encoder_hidden_states", "text_embeds")}
        for run in RUNS[case]:
            unet = model()
            factors = low_rank(unet, TARGETS, case, "lora") if run == "pivotal" else {}
            ids, first, (losses, norms, gradients, trained) = train(case, parts, unet, scheduler, data, factors)
            tensors |= {f"out/{run}/loss": losses, f"out/{run}/grad_norm": norms}
            tensors |= {f"out/{run}/grad/{name}": value for name, value in gradients.items()}
            tensors |= {f"out/{run}/{name}": value for name, value in trained.items()}
        for at, values in enumerate(ids.values()):
            tensors[f"in/ids{'_2' if at else ''}"] = values
        write(folder / "token.safetensors", tensors, {
            "steps": STEPS, "learning_rate": RATE, "token_learning_rate": TOKEN_RATE, "weight_decay": DECAY, "vectors": VECTORS,
            "initializer": INITIALIZER, "first": first,
            "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0],
                         "transformers": transformers.__version__}})


if __name__ == "__main__":
    main()
