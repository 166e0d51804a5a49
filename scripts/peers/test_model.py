"""Compares `model.py` with the recorded outputs and gradients of PyTorch. Usage: python test_model.py"""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (safetensors needs it for bfloat16)
import numpy as np
from safetensors.numpy import load_file

import model

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"


def rel_l2(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


def check(name, folder, forward, cotangents):
    """`forward(weights, io)` gives the outputs by name; the loss is the sum of mean(output * cotangent)."""
    _, weights = model.load(folder)
    io = load_file(folder / "io.safetensors")

    def loss(weights):
        outs = forward(weights, io)
        return sum(jnp.mean(outs[k] * io[c]) for k, c in cotangents.items()), outs

    grads, outs = jax.jit(jax.grad(loss, has_aux=True))(weights)
    for key, out in outs.items():
        error = rel_l2(out, io[key])
        print(f"{name} {key}: relative L2 error {error:.2e}")
        assert error < 1e-5  # float32 rounding; PyTorch's own float32 run has up to 8e-7
    errors = {}
    for key, g in grads.items():
        want = model.from_pytorch(key, io[f"grad/param/{key}"])
        errors[key] = rel_l2(g, want) if np.any(want) else float(jnp.abs(g).max())
    worst = max(errors, key=errors.get)
    print(f"{name} gradients: {len(errors)}, worst {errors[worst]:.2e} at {worst}")
    assert errors[worst] < 1e-4


def main():
    for name in ("sd15", "sd21", "sdxl", "scale_shift"):
        folder = GOLDEN / f"unet_{name}"
        config, _ = model.load(folder)

        def forward(weights, io):
            added = {k: io[f"in/{k}"] for k in ("text_embeds", "time_ids") if f"in/{k}" in io}
            out = model.unet(model.Params(dict(weights)), config, io["in/sample"].transpose(0, 2, 3, 1), io["in/timestep"],
                             io["in/encoder_hidden_states"], **added)
            return {"out/sample": out.transpose(0, 3, 1, 2)}

        check(name, folder, forward, {"out/sample": "in/cotangent"})
    for name in ("clip_quick_gelu", "clip_gelu"):
        config, weights = model.load(GOLDEN / name)
        io = load_file(GOLDEN / name / "io.safetensors")
        for key, out in zip(("last_hidden_state", "text_embeds"), model.clip_text(model.Params(weights), config, io["in/input_ids"])):
            if out is None:
                continue
            error = rel_l2(out, io[f"out/{key}"])
            print(f"{name} out/{key}: relative L2 error {error:.2e}")
            assert error < 1e-5


if __name__ == "__main__":
    main()
