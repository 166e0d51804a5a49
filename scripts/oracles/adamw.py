"""AdamW with global-norm clipping, and EMA, over five steps of a tiny problem.

Usage: python adamw.py

Writes tests/golden/adamw.safetensors. Two parameters, `weight` [3,4] and `bias` [4]; the gradients are inputs.
  in/weight, in/bias; in/grad_weight and in/grad_bias: [5, ...]
  out/<case>/<param>, out/<case>/mu_<param>, out/<case>/nu_<param>: [5, ...] after each step
  out/<case>/grad_norm: [5], before clipping; out/<case>/ema_<param> with decay 0.9 where the case has it
Cases are in the metadata. optax.adamw and torch.optim.AdamW differ: torch decays with the parameter before the Adam
update (p *= 1 - lr*wd, then subtract), optax adds wd*p to the update; with one lr the two are equal up to rounding, and
this generator asserts it. optax's clip_by_global_norm scales by max_norm/norm when norm >= max_norm; torch's
clip_grad_norm_ by max_norm/(norm + 1e-6), so clipped runs differ by about 1e-6. The optax values are recorded.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from common import GOLDEN, normal, rng, write

STEPS = 5
CASES = {
    "plain": dict(lr=[1e-2] * STEPS, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-2, max_norm=None),
    "clipped": dict(lr=[1e-2] * STEPS, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-2, max_norm=1.0),
    "schedule": dict(lr=[0.0, 5e-3, 1e-2, 5e-3, 1e-3], b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, max_norm=3.0),
    "no_decay": dict(lr=[1e-2] * STEPS, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, max_norm=None, ema=0.9),
}


def run_optax(case, params, grads):
    lr = jnp.asarray(case["lr"], jnp.float32)
    adamw = optax.adamw(lambda step: lr[step], b1=case["b1"], b2=case["b2"], eps=case["eps"],
                        weight_decay=case["weight_decay"])
    clip = optax.identity() if case["max_norm"] is None else optax.clip_by_global_norm(case["max_norm"])
    tx = optax.chain(clip, adamw)
    state, out, ema = tx.init(params), [], params
    for i in range(STEPS):
        g = jax.tree.map(lambda a: a[i], grads)
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        adam = state[1][0]
        values = {k: v for k, v in params.items()} | {f"mu_{k}": v for k, v in adam.mu.items()}
        values |= {f"nu_{k}": v for k, v in adam.nu.items()} | {"grad_norm": optax.global_norm(g)}
        if "ema" in case:
            ema = jax.tree.map(lambda e, p: case["ema"] * e + (1 - case["ema"]) * p, ema, params)
            values |= {f"ema_{k}": v for k, v in ema.items()}
        out.append(values)
    return {k: np.stack([np.asarray(o[k]) for o in out]) for k in out[0]}


def run_torch(case, params, grads):
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in params.items()}
    optimizer = torch.optim.AdamW(tensors.values(), betas=(case["b1"], case["b2"]), eps=case["eps"],
                                  weight_decay=case["weight_decay"])
    for i in range(STEPS):
        for k, p in tensors.items():
            p.grad = torch.from_numpy(grads[k][i].copy())
        if case["max_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(tensors.values(), case["max_norm"])
        optimizer.param_groups[0]["lr"] = case["lr"][i]
        optimizer.step()
    return {k: p.detach().numpy() for k, p in tensors.items()}


def main():
    gen = rng("adamw")
    params = {"weight": normal(gen, (3, 4)), "bias": normal(gen, (4,), scale=0.1)}
    sizes = np.array([0.01, 1.0, 5.0, 0.3, 0.1], np.float32)  # below and above the clipping norms
    grads = {k: normal(gen, (STEPS, *v.shape)) * sizes.reshape(-1, *[1] * v.ndim) for k, v in params.items()}
    grads["weight"][2, 0, 0] = 0.0
    grads["bias"][:, 3] = 0.0  # never a gradient: only weight decay moves it
    tensors = {f"in/{k}": v for k, v in params.items()} | {f"in/grad_{k}": v for k, v in grads.items()}
    for name, case in CASES.items():
        out = run_optax(case, params, grads)
        for k, v in run_torch(case, params, grads).items():
            assert np.allclose(out[k][-1], v, rtol=2e-5, atol=2e-6), (name, k, np.abs(out[k][-1] - v).max())
        tensors |= {f"out/{name}/{k}": v for k, v in out.items()}
    write(GOLDEN / "adamw.safetensors", tensors,
          {"cases": CASES, "versions": {"jax": jax.__version__, "optax": optax.__version__,
                                        "torch": torch.__version__.split("+")[0]}})


if __name__ == "__main__":
    main()
