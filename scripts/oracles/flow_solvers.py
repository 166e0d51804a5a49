"""Sampling sequences of diffusers' other samplers for flow matching: Heun's, that of consistency models, and DPM-Solver++ and
UniPC with flow sigmas.

Usage: python flow_solvers.py

Writes tests/golden/flow_solvers.safetensors in the form of flow_match.safetensors, each case with its class:
  out/timesteps [runs]; out/samples [runs + 1, elements]: x before the first run and after each;
  out/sigmas [runs]: the noise level of each run.
The model is model(x) = 0.5 * x + in/model_offset. x starts as in/noise. Run i adds in/variance_noise[i], where the case is
stochastic. Noise levels are float32, as diffusers makes them; from there on it computes in float64.
"""

import numpy as np
import torch
from diffusers import (DPMSolverMultistepScheduler, DPMSolverSinglestepScheduler, FlowMatchHeunDiscreteScheduler,
                       FlowMatchLCMScheduler, UniPCMultistepScheduler)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers import (scheduling_dpmsolver_multistep, scheduling_dpmsolver_singlestep,
                                  scheduling_flow_match_lcm)

from common import record_sampling

FLOW = dict(use_flow_sigmas=True, prediction_type="flow_prediction")
DYNAMIC = dict(use_dynamic_shifting=True)
SDE = dict(algorithm_type="sde-dpmsolver++")


def cases():
    """(class, configuration, steps, tokens of the image)"""
    for steps in (1, 2, 7):
        yield FlowMatchHeunDiscreteScheduler, dict(shift=3.0), steps, None
        yield FlowMatchLCMScheduler, dict(shift=3.0), steps, None
    yield FlowMatchLCMScheduler, DYNAMIC, 4, 1024
    yield FlowMatchLCMScheduler, dict(shift=3.0, use_karras_sigmas=True), 4, None
    for steps in (3, 8, 20):
        yield DPMSolverMultistepScheduler, FLOW | dict(flow_shift=3.0), steps, None
        yield UniPCMultistepScheduler, FLOW | dict(flow_shift=3.0), steps, None
    yield DPMSolverMultistepScheduler, FLOW | DYNAMIC, 6, 1024
    yield DPMSolverMultistepScheduler, FLOW | dict(flow_shift=3.0, solver_order=3), 16, None
    yield DPMSolverMultistepScheduler, FLOW | SDE | dict(flow_shift=3.0), 6, None
    yield DPMSolverSinglestepScheduler, FLOW | dict(flow_shift=3.0), 6, None
    yield UniPCMultistepScheduler, FLOW | DYNAMIC, 6, 2304
    yield UniPCMultistepScheduler, FLOW | dict(flow_shift=2.0, solver_order=3), 9, None
    yield UniPCMultistepScheduler, FLOW | dict(flow_shift=3.0, shift_terminal=0.1, final_sigmas_type="sigma_min"), 5, None


def sample(kind, config, steps, tokens, t):
    scheduler = kind(**config)
    c = scheduler.config
    mu = {}
    if tokens is not None:
        mu = {"mu": calculate_shift(tokens, 256, 4096, 0.5, 1.15)}
    scheduler.set_timesteps(steps, **mu)
    runs = len(scheduler.timesteps)
    assert scheduler.sigmas.dtype == torch.float32
    scheduler.sigmas = scheduler.sigmas.double()
    scheduler.set_begin_index(0)
    x = t["noise"]
    samples = [x]
    modules = (scheduling_dpmsolver_multistep, scheduling_dpmsolver_singlestep, scheduling_flow_match_lcm)
    held = [m.randn_tensor for m in modules], torch.float32
    # `step` widens to float32 what is float64 here.
    torch.float32 = torch.float64
    for i, timestep in enumerate(scheduler.timesteps):
        for module in modules:
            module.randn_tensor = lambda *args, **kwargs: t["variance_noise"][i]
        prediction = 0.5 * x + t["model_offset"]
        x = scheduler.step(prediction, timestep, x).prev_sample
        assert x.dtype == torch.float64
        samples.append(x)
    torch.float32 = held[1]
    for module, function in zip(modules, held[0]):
        module.randn_tensor = function
    record = {"timesteps": scheduler.timesteps, "samples": torch.stack(samples).reshape(runs + 1, -1),
              "sigmas": scheduler.sigmas[:runs]}
    return {k: v.numpy().astype(np.float32) for k, v in record.items()}


def recorded(t):
    for kind, config, steps, tokens in cases():
        described = {"class": kind.__name__, "config": config, "steps": steps, "image_seq_len": tokens}
        yield described, sample(kind, config, steps, tokens, t)


if __name__ == "__main__":
    record_sampling("flow_solvers", 20, recorded)
