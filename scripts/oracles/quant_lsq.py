"""Learned step size quantization (Esser et al. 2020) in PyTorch: the quantizer of the paper's appendix, with its gradient scale.

Names: in/weight, in/gradient; of each case in/<case>/scale, out/<case>/weight, what the weight is after it is rounded, and
grad/<case>/weight and grad/<case>/scale for the loss sum(gradient * weight). Scales are smaller than ranges, so that numbers are
clipped. In a case `ends` are the lowest and the highest integer.
"""

import math

import torch

from common import GOLDEN, write

CASES = {"int4_tensor": (-8, 7, 32), "int4_channel": (-8, 7, 32), "int4_group": (-8, 7, 8), "int8_channel": (-128, 127, 32)}


def grad_scale(x, scale):
    return (x - x * scale).detach() + x * scale


def round_pass(x):
    return (x.round() - x).detach() + x


def quantized(w, s, low, high):
    n = w.numel() // s.numel()
    s = grad_scale(s, 1 / math.sqrt(n * high))
    rows = w.reshape(*s.shape, -1) / s.unsqueeze(-1)
    return (round_pass(rows.clamp(low, high)) * s.unsqueeze(-1)).reshape(w.shape)


def main():
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(6, 32, generator=generator)
    gradient = torch.randn(6, 32, generator=generator)
    tensors = {"in/weight": weight, "in/gradient": gradient}
    for case, (low, high, group) in CASES.items():
        runs = weight.reshape(1, -1) if case.endswith("tensor") else weight.reshape(6, -1, group)
        scale = (runs.abs().amax(-1) * 0.8 / (high + 0.5)).squeeze()
        scale = scale.reshape(()) if case.endswith("tensor") else scale
        w, s = weight.clone().requires_grad_(), scale.clone().requires_grad_()
        y = quantized(w, s, low, high)
        (y * gradient).sum().backward()
        clipped = (w.grad == 0).float().mean().item()
        assert 0.005 < clipped < 0.5, clipped
        tensors |= {
            f"in/{case}/scale": scale,
            f"out/{case}/weight": y.detach(),
            f"grad/{case}/weight": w.grad,
            f"grad/{case}/scale": s.grad,
        }
    tensors = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    meta = {"cases": {case: ends for case, ends in CASES.items()}, "versions": {"torch": torch.__version__}}
    write(GOLDEN / "quant_lsq.safetensors", tensors, meta)


main()
