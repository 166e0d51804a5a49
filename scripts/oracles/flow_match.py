"""Sampling sequences of diffusers' FlowMatchEulerDiscreteScheduler, with the noise levels that FluxPipeline gives it and with
its own, as StableDiffusion3Pipeline takes it.

Usage: python flow_match.py

Writes tests/golden/flow_match.safetensors, in the form of schedulers.safetensors: the cases of the metadata lie one after
the other, each with as many runs of the model as it says.
  out/timesteps [runs]; out/samples [runs + 1, elements]: x before the first run and after each;
  out/noised [runs + 1, 2]: scale_noise's coefficients of the clean image and of the noise, before each run; after the
  last it is [1, 0].
The model is model(x) = 0.5 * x + in/model_offset. x starts as in/noise. Run i adds in/variance_noise[i], where the case is
stochastic. Noise levels are float32, as diffusers makes them; from there on it computes in float64.
"""

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers import scheduling_flow_match_euler_discrete as module

from common import record_sampling

DEV = dict(shift=3.0, use_dynamic_shifting=True)
SCHNELL = dict(shift=1.0)


def cases():
    """(configuration, steps, tokens of the image, whether the noise levels are its own)"""
    for case in given_levels():
        yield *case, False
    for steps in (1, 4, 28):
        yield dict(shift=3.0), steps, None, True
    yield dict(shift=1.0), 5, None, True
    yield DEV, 6, 1024, True
    yield dict(shift=3.0, shift_terminal=0.1), 5, None, True


def given_levels():
    for steps in (1, 2, 4, 28):
        yield SCHNELL, steps, None
        for tokens in (64, 256, 1024, 4096, 9216):
            yield DEV, steps, tokens
    yield dict(shift=3.0), 8, None
    yield dict(DEV, base_shift=0.3, max_shift=2.0, base_image_seq_len=100, max_image_seq_len=1000), 6, 500
    yield dict(DEV, time_shift_type="linear"), 6, 1024
    for terminal in (0.02, 0.1):
        yield dict(DEV, shift_terminal=terminal), 7, 2304
        yield dict(shift=2.0, shift_terminal=terminal), 5, None
    for spaced in ("karras", "exponential", "beta"):
        yield dict(DEV, **{f"use_{spaced}_sigmas": True}), 6, 1024
        yield dict(SCHNELL, **{f"use_{spaced}_sigmas": True}), 4, None
    yield dict(SCHNELL, stochastic_sampling=True), 4, None
    yield dict(DEV, stochastic_sampling=True), 9, 1024


def sample(config, steps, tokens, own, t):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    c = scheduler.config
    mu = None
    if tokens is not None:
        mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    levels = dict(num_inference_steps=steps) if own else dict(sigmas=np.linspace(1.0, 1 / steps, steps))
    scheduler.set_timesteps(**levels, mu=mu)
    assert scheduler.sigmas.dtype == torch.float32 and len(scheduler.timesteps) == steps
    scheduler.sigmas = scheduler.sigmas.double()
    scheduler.set_begin_index(0)
    x = t["noise"]
    samples, noised = [x], []
    for i, timestep in enumerate(scheduler.timesteps):
        sigma = scheduler.sigmas[i]
        noised.append(torch.stack([1.0 - sigma, sigma]))
        prediction = 0.5 * x + t["model_offset"]
        held = module.randn_tensor, torch.float32
        module.randn_tensor = lambda *args, **kwargs: t["variance_noise"][i]
        # `step` widens to float32 what is float64 here.
        torch.float32 = torch.float64
        x = scheduler.step(prediction, timestep, x).prev_sample
        module.randn_tensor, torch.float32 = held
        assert x.dtype == torch.float64
        samples.append(x)
    noised.append(torch.tensor([1.0, 0.0]).double())
    record = {"timesteps": scheduler.timesteps, "samples": torch.stack(samples).reshape(steps + 1, -1),
              "noised": torch.stack(noised)}
    return {k: v.numpy().astype(np.float32) for k, v in record.items()}


def recorded(t):
    for config, steps, tokens, own in cases():
        described = {"config": config, "steps": steps, "image_seq_len": tokens, "own_levels": own}
        yield described, sample(config, steps, tokens, own, t)


if __name__ == "__main__":
    record_sampling("flow_match", 28, recorded)
