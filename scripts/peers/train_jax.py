"""The training step of a configuration in JAX, timed: UNet and text encoder, mean squared error, global-norm
clipping, AdamW, EMA, one jitted program with donated state.

Usage: python train_jax.py configs/quickstart.yml [--dtype float32|bfloat16] [--steps N] [--warmup N] [key=value ...]

Prints one line of JSON: the median, 10th and 90th percentile of seconds per step after the warm-up, the loss, and what
was measured. The images are random: their content does not change the work. Pixels only: a configuration with a VAE or
with pretrained weights is refused. `--dtype bfloat16` computes in bfloat16 with float32 weights, optimizer and norms.
"""

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml

import model

DEFAULTS = dict(per_device_batch_size=2, learning_rate=4e-7, adam_b1=0.9, adam_b2=0.999, adam_eps=1e-8,
                adam_weight_decay=1e-2, max_grad_norm=1.0, opt_enable_grad_global_norm_clipping=False, ema_decay=0.0,
                caption_dropout=0.0, seed=0, resolution=32, max_train_steps=1000, warmup_steps_fraction=0.0,
                learning_rate_schedule="constant", train_text_encoder=False, pretrained_model_name_or_path="")


def read_config(path, overrides):
    config = DEFAULTS | yaml.safe_load(pathlib.Path(path).read_text())
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep:
            raise SystemExit(f"{item}: expected key=value")
        *parents, last = key.split(".")
        target = config
        for parent in parents:
            target = target[parent]
        target[last] = yaml.safe_load(value)
    channels = 3 * int(config.get("pixel_unshuffle", 1)) ** 2
    if config["pretrained_model_name_or_path"] or config["unet_config"].get("in_channels", 4) != channels:
        raise SystemExit(f"{path}: only pixel models trained from scratch are timed here")
    return config


def alphas_cumprod(schedule):
    """As diffusers computes it, with the terminal SNR rescaled to zero where asked."""
    steps = int(schedule.get("num_train_timesteps", 1000))
    kind = schedule.get("beta_schedule", "scaled_linear")
    start, end = float(schedule.get("beta_start", 0.00085)), float(schedule.get("beta_end", 0.012))
    if kind == "squaredcos_cap_v2":
        bar = lambda t: np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2
        t = np.arange(steps) / steps
        betas = np.minimum(1 - bar(t + 1 / steps) / bar(t), 0.999)
    elif kind == "scaled_linear":
        betas = np.linspace(start**0.5, end**0.5, steps) ** 2
    elif kind == "linear":
        betas = np.linspace(start, end, steps)
    else:
        raise SystemExit(f"beta_schedule {kind} is not known")
    acp = np.cumprod(1 - betas)
    if schedule.get("rescale_zero_terminal_snr"):
        root = np.sqrt(acp)
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])
        acp = root**2
    return jnp.asarray(acp, jnp.float32)


def learning_rate(config):
    peak, total = float(config["learning_rate"]), int(config["max_train_steps"])
    warmup = int(float(config["warmup_steps_fraction"]) * total)
    if config["learning_rate_schedule"] == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, max(warmup, 1), max(total, warmup + 1))
    return optax.linear_schedule(0.0, peak, max(warmup, 1))


def build(config, dtype, vocab_size):
    """The initial state and the step function `(state, batch) -> (state, loss)`."""
    unet_config = config["unet_config"]
    text_config = dict(config["text_encoder_config"], vocab_size=vocab_size, eos_token_id=1)
    length = int(text_config["max_position_embeddings"])
    batch = int(config["per_device_batch_size"])
    # A model of blocks of pixels (pixel_unshuffle) sees fewer rows and columns than the image has.
    block = int(config.get("pixel_unshuffle", 1))
    size, channels = int(config["resolution"]) // block, 3 * block * block
    schedule = config.get("diffusion_scheduler_config", {})
    acp, prediction = alphas_cumprod(schedule), schedule.get("prediction_type", "epsilon")

    def predict(weights, noisy, t, ids, key=None):
        text, unet = (model.Params(weights[k], key) for k in ("text_encoder", "unet"))
        context, pooled = model.clip_text(text, text_config, ids, dtype)
        if not config["train_text_encoder"]:
            context, pooled = jax.lax.stop_gradient((context, pooled))
        side = float(config["resolution"])
        time_ids = jnp.tile(jnp.array([side, side, 0, 0, side, side]), (batch, 1))
        return model.unet(unet, unet_config, noisy.astype(dtype), t, context, pooled, time_ids).astype(jnp.float32)

    def init(key):
        weights = {"text_encoder": {}, "unet": {}}
        predict(weights, jnp.zeros((batch, size, size, channels)), jnp.zeros((batch,), jnp.int32),
                jnp.zeros((batch, length), jnp.int32), key)
        return weights

    adamw = optax.adamw(learning_rate(config), float(config["adam_b1"]), float(config["adam_b2"]),
                        float(config["adam_eps"]), weight_decay=float(config["adam_weight_decay"]))
    clip = optax.clip_by_global_norm(float(config["max_grad_norm"])) if \
        config["opt_enable_grad_global_norm_clipping"] else optax.identity()
    optimizer, ema_decay = optax.chain(clip, adamw), float(config["ema_decay"])

    def loss_fn(weights, images, ids, key):
        k_t, k_noise, k_drop = jax.random.split(key, 3)
        t = jax.random.randint(k_t, (batch,), 0, acp.shape[0])
        noise = jax.random.normal(k_noise, images.shape)
        alpha, sigma = jnp.sqrt(acp[t])[:, None, None, None], jnp.sqrt(1 - acp[t])[:, None, None, None]
        target = {"epsilon": noise, "v_prediction": alpha * noise - sigma * images, "sample": images}[prediction]
        dropped = jax.random.uniform(k_drop, (batch, 1)) < float(config["caption_dropout"])
        ids = jnp.where(dropped, 0, ids)
        return jnp.mean(jnp.square(predict(weights, alpha * images + sigma * noise, t, ids) - target))

    def step(state, images, ids):
        key = jax.random.fold_in(state["key"], state["step"])
        pixels = images.astype(jnp.float32) / 127.5 - 1.0
        loss, grads = jax.value_and_grad(loss_fn)(state["weights"], pixels, ids, key)
        updates, opt = optimizer.update(grads, state["opt"], state["weights"])
        weights = optax.apply_updates(state["weights"], updates)
        new = dict(state, weights=weights, opt=opt, step=state["step"] + 1)
        if ema_decay:
            new["ema"] = jax.tree.map(lambda e, w: ema_decay * e + (1 - ema_decay) * w, state["ema"], weights)
        return new, loss

    key = jax.random.key(int(config["seed"]))
    weights = jax.jit(init)(key)
    state = {"weights": weights, "opt": jax.jit(optimizer.init)(weights), "step": jnp.zeros((), jnp.int32), "key": key}
    if ema_decay:
        state["ema"] = jax.tree.map(jnp.copy, weights)
    return state, jax.jit(step, donate_argnums=0), (batch, size, length)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=64)
    args = parser.parse_intermixed_args()
    config = read_config(args.config, args.overrides)
    state, step, (batch, size, length) = build(config, jnp.dtype(args.dtype), args.vocab_size)
    gen = np.random.default_rng(0)
    images = lambda: gen.integers(0, 256, (batch, size, size, config["unet_config"]["in_channels"]), np.uint8)
    ids = lambda: gen.integers(0, args.vocab_size, (batch, length), np.int32)
    began = time.perf_counter()
    compiled = step.lower(state, images(), ids()).compile()
    compile_seconds = time.perf_counter() - began
    parameters = sum(w.size for w in jax.tree.leaves(state["weights"]))
    seconds, losses = [], []
    for _ in range(args.warmup + args.steps):
        one, two = images(), ids()
        began = time.perf_counter()
        state, loss = compiled(state, one, two)
        losses.append(float(loss))  # waits for the step
        seconds.append(time.perf_counter() - began)
    timed = np.array(seconds[args.warmup:])
    if not np.all(np.isfinite(losses)):
        raise SystemExit("the loss is not finite")
    print(json.dumps({
        "peer": "jax", "jax": jax.__version__, "config": args.config, "dtype": args.dtype, "batch": batch,
        "resolution": size, "parameters": parameters, "steps": args.steps, "warmup": args.warmup,
        "step_seconds_median": float(np.median(timed)), "step_seconds_p10": float(np.percentile(timed, 10)),
        "step_seconds_p90": float(np.percentile(timed, 90)), "samples_per_second": batch / float(np.median(timed)),
        "compile_seconds": compile_seconds, "first_loss": losses[0], "last_loss": losses[-1],
        "platform": jax.devices()[0].platform,
    }))


if __name__ == "__main__":
    main()
