"""Some steps of the optimizers beside AdamW, as their authors' code computes them on the CPU.

Usage: python optimizers.py

Writes tests/golden/optimizers.safetensors. Gradients are inputs:
  in/<param>; in/grad_<param>: [5, ...]; in/large and in/grad_large for 8 bits; in/steady_<param>: [12, ...] for Prodigy
  out/<case>/<param>: [5 or 12, ...] after each step; out/<case>/<state>_<param> after the last
  out/adamw8bit/qmap1, qmap2: bitsandbytes' code books
  out/rates/<name>: [15], the learning rates of diffusers' schedules
Cases are in the metadata. Lion is lion-pytorch's, Adafactor transformers', Prodigy prodigyopt's, AdamW8bit bitsandbytes'
(whose kernel for the CPU decays weights before the step, as torch.optim.AdamW does; its kernel for CUDA after it). Codes are
the nearest, as in bitsandbytes' kernels for CUDA and in plain PyTorch: that for the CPU takes a shortcut, which misses the
nearest of 1 in 30 squares.
"""

import bitsandbytes
import numpy as np
import torch
from importlib.metadata import version
from diffusers.optimization import get_scheduler
from lion_pytorch import Lion
from prodigyopt import Prodigy
from transformers.optimization import Adafactor

import bitsandbytes.backends.cpu.ops as kernels
from common import GOLDEN, normal, rng, write

STEPS = 5
SHAPES = {"weight": (3, 4), "bias": (4,), "conv": (2, 3, 3, 3)}
# 17 blocks of 256 elements and a part of one.
LARGE = {"large": (40, 110), "bias": (4,)}
RATES = [1e-2, 1e-2, 5e-3, 2e-2, 1e-2]
CASES = {
    "lion": dict(lr=RATES, b1=0.9, b2=0.99, weight_decay=0.1),
    "adafactor": dict(lr=RATES, weight_decay=0.1, scale_parameter=False),
    "adafactor_scaled": dict(lr=RATES, weight_decay=0.0, scale_parameter=True),
    "prodigy": dict(lr=[0.0, 1.0, 0.5] + [1.0] * 8 + [0.7], b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01, d_coef=1.0,
                    use_bias_correction=False, safeguard_warmup=False),
    "prodigy_guarded": dict(lr=[0.5] + [1.0] * 10 + [0.5], b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0,
                            d_coef=2.0, use_bias_correction=True, safeguard_warmup=True),
    "adamw8bit": dict(lr=RATES, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1),
}


def quantize(values, code, largest, codes, block):
    """In place of bitsandbytes' shortcut for the CPU: the nearest values."""
    flat = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % block)).reshape(-1, block)
    largest.copy_(flat.abs().max(dim=1).values)
    scaled = (flat / largest[:, None]).reshape(-1)[: values.numel()]
    codes.copy_((scaled[:, None] - code).abs().argmin(dim=1).to(torch.uint8).reshape(values.shape))


kernels._quant_blockwise_fp32_direct = quantize


def optimizer(name, case, tensors):
    lr, decay = 1.0, case["weight_decay"]
    if name == "lion":
        return Lion(tensors, lr=lr, betas=(case["b1"], case["b2"]), weight_decay=decay)
    if name.startswith("adafactor"):
        return Adafactor(tensors, lr=lr, weight_decay=decay, scale_parameter=case["scale_parameter"], relative_step=False,
                         warmup_init=False)
    betas = (case["b1"], case["b2"])
    if name.startswith("prodigy"):
        return Prodigy(tensors, lr=lr, betas=betas, eps=case["eps"], weight_decay=decay, d_coef=case["d_coef"],
                       use_bias_correction=case["use_bias_correction"], safeguard_warmup=case["safeguard_warmup"])
    return bitsandbytes.optim.AdamW8bit(tensors, lr=lr, betas=betas, eps=case["eps"], weight_decay=decay)


def run(name, case, params, grads):
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in params.items()}
    opt = optimizer(name, case, list(tensors.values()))
    out = {k: [] for k in tensors}
    for i, lr in enumerate(case["lr"]):
        for k, p in tensors.items():
            p.grad = torch.from_numpy(grads[k][i].copy())
        opt.param_groups[0]["lr"] = lr
        opt.step()
        for k, p in tensors.items():
            out[k].append(p.detach().numpy().copy())
    out = {k: np.stack(v) for k, v in out.items()}
    for k, p in tensors.items():
        for state, value in opt.state[p].items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not state.startswith("qmap"):
                out[f"{state}_{k}"] = value.detach().numpy().copy()
            if state.startswith("qmap"):
                out[state] = value.detach().numpy().copy()
    if name.startswith("prodigy"):
        out["d"] = np.array([opt.param_groups[0]["d"]], np.float32)
    return out


RATES_OF = {"peak": 0.25, "warmup_steps": 3, "total_steps": 14, "num_cycles": 2, "power": 1.7}


def learning_rates(name):
    """The rates of diffusers' schedulers of all steps and at the end."""
    weight = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([weight], lr=RATES_OF["peak"])
    scheduler = get_scheduler(name, opt, num_warmup_steps=RATES_OF["warmup_steps"],
                              num_training_steps=RATES_OF["total_steps"], num_cycles=RATES_OF["num_cycles"],
                              power=RATES_OF["power"])
    rates = []
    for _ in range(RATES_OF["total_steps"] + 1):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return np.array(rates, np.float32)


def main():
    gen = rng("optimizers")
    params = {k: normal(gen, shape, scale=0.5) for k, shape in (SHAPES | LARGE).items()}
    sizes = np.array([0.01, 1.0, 5.0, 0.3, 0.1], np.float32)
    grads = {k: normal(gen, (STEPS, *v.shape)) * sizes.reshape(-1, *[1] * v.ndim) for k, v in params.items()}
    grads["weight"][2, 0, 0] = 0.0
    grads["bias"][:, 3] = 0.0  # never a gradient: only weight decay moves it
    grads["large"][:, 10] *= 1e-3
    # Prodigy's estimate grows where gradients agree.
    steady = {k: normal(gen, SHAPES[k]) + normal(gen, (12, *SHAPES[k]), scale=0.2) for k in SHAPES}
    tensors = {f"in/{k}": v for k, v in params.items()} | {f"in/grad_{k}": v for k, v in grads.items()}
    tensors |= {f"in/steady_{k}": v for k, v in steady.items()}
    for name, case in CASES.items():
        own = LARGE if name == "adamw8bit" else SHAPES
        of_case = steady if name.startswith("prodigy") else grads
        out = run(name, case, {k: params[k] for k in own}, of_case)
        tensors |= {f"out/{name}/{k}": v for k, v in out.items()}
        print(name, {k: v.shape for k, v in out.items()}, out.get("d"))
    for name in ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]:
        own = "constant_with_warmup" if name == "constant" else name
        tensors[f"out/rates/{name}"] = learning_rates(own)
    assert all(tensors[f"out/{name}/d"] > 1.1e-6 for name in ("prodigy", "prodigy_guarded")), "estimates have not grown"
    packages = ["bitsandbytes", "diffusers", "lion-pytorch", "prodigyopt", "torch", "transformers"]
    write(GOLDEN / "optimizers.safetensors", tensors,
          {"cases": CASES, "rates": RATES_OF, "versions": {name: version(name).split("+")[0] for name in packages}})


if __name__ == "__main__":
    main()
