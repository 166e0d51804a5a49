"""Sampling sequences of diffusers' schedulers, and its noise schedules for training.

Usage: python schedulers.py

Writes tests/golden/schedulers.safetensors. The sampling cases of the metadata lie one after the other, each with as
many runs of the model as it says; its configuration is its `config` over the metadata's schedule of that name:
  out/timesteps [runs]; out/samples [runs + 1, elements]: x before the first run and after each;
  out/clean [runs, elements]: the predicted clean sample of each run, for the classes that give it (where the case has
  `clean`);
  out/noised [runs + 1, 2]: add_noise's coefficients of the clean image and of the noise, before the first run and after
  each. After the last it is [1, 0], as diffusers' inpainting pipelines have it.
The model is model(x) = 0.5 * scale_model_input(x) + in/model_offset. x starts as in/noise * init_noise_sigma, or where
the case has a start, as in/image with in/noise by add_noise. Run i adds in/variance_noise[i].

A scheduler's tables are float32, as diffusers makes them; from there on it computes in float64, so that a comparison
measures what is compared and not the roundings of diffusers' float32.

For the training cases, at in/timesteps:
  out/<case>/add_noise and out/<case>/velocity of in/clean and in/training_noise, in float32;
  out/<case>/alphas_cumprod.
"""

import importlib
import itertools

import diffusers
import numpy as np
import torch
from diffusers import DDPMScheduler

from common import GOLDEN, normal, rng, write

SHAPE = (1, 2, 1, 3)
SD = dict(num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
LINEAR = dict(num_train_timesteps=1000, beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
COSINE = dict(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2")
SCHEDULES = {"sd": SD, "linear": LINEAR, "cosine": COSINE}
ALL_PREDICTIONS = ("epsilon", "v_prediction", "sample")
PREDICTIONS = {"PNDMScheduler": ("epsilon", "v_prediction"),
               "EulerAncestralDiscreteScheduler": ("epsilon", "v_prediction"),
               "KDPM2DiscreteScheduler": ("epsilon", "v_prediction"),
               "KDPM2AncestralDiscreteScheduler": ("epsilon", "v_prediction")}
# What is not Stable Diffusion's in its files for these classes, or needed to be built.
BASE = {"DDIMScheduler": dict(clip_sample=False, set_alpha_to_one=False), "DDPMScheduler": dict(clip_sample=False),
        "PNDMScheduler": dict(skip_prk_steps=True, set_alpha_to_one=False)}
SPACED_SIGMAS = ("EulerDiscreteScheduler", "HeunDiscreteScheduler", "LMSDiscreteScheduler",
                 "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler",
                 "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler")
GIVES_CLEAN = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
               "HeunDiscreteScheduler", "LMSDiscreteScheduler", "KDPM2DiscreteScheduler",
               "KDPM2AncestralDiscreteScheduler")
SPACED = [name for name in (
    "DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler", "LMSDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler",
    "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler")]
CLASSES = SPACED + ["DPMSolverSinglestepScheduler", "LCMScheduler", "TCDScheduler"]


def sampling_cases():
    """(class, schedule, configuration over it, steps, how it is run)"""
    for name in CLASSES:
        base = BASE.get(name, {})
        spacings = ("leading", "linspace", "trailing") if name in SPACED else (None,)
        sigmas = (None, "karras", "exponential", "beta") if name in SPACED_SIGMAS else (None,)
        for kind, spacing, spaced in itertools.product(PREDICTIONS.get(name, ALL_PREDICTIONS), spacings, sigmas):
            config = dict(base, prediction_type=kind)
            if spacing:
                config["timestep_spacing"] = spacing
            if spaced:
                config[f"use_{spaced}_sigmas"] = True
            yield name, "sd", config, 5 if spaced is None else 4, {}
        base = dict(base, **({"timestep_spacing": "leading"} if name in SPACED else {}))
        for steps in (1, 2, 4, 20):
            yield name, "sd", base, steps, {}
        yield name, "sd", dict(base, prediction_type="v_prediction"), 7, dict(strength=0.6)
        yield name, "sd", base, 10, dict(strength=0.5)
        yield name, "sd", base, 10, dict(after=0.4)
        yield name, "sd", base, 6, dict(end=0.7)
        yield name, "linear", base, 4, {}
        yield name, "cosine", base, 4, {}
        if name in SPACED_SIGMAS:
            yield name, "cosine", dict(base, use_karras_sigmas=True), 4, {}
            yield name, "sd", dict(base, use_karras_sigmas=True), 20, dict(strength=0.3)

    for kind in ALL_PREDICTIONS:
        config = dict(clip_sample=True, prediction_type=kind)
        for name in ("DDIMScheduler", "DDPMScheduler", "LCMScheduler", "HeunDiscreteScheduler"):
            yield name, "linear", config, 5, {}
        yield "DDIMScheduler", "linear", config, 5, dict(use_clipped_model_output=True)
    zero = dict(rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type="v_prediction")
    for kind in ("v_prediction", "sample"):
        config = dict(zero, clip_sample=True, prediction_type=kind)
        yield "DDIMScheduler", "cosine", config, 6, dict(use_clipped_model_output=True)
    for name in ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
                 "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LCMScheduler", "TCDScheduler"):
        yield name, "sd", dict(zero), 6, {}

    yield "DDIMScheduler", "sd", dict(clip_sample=False), 5, dict(eta=0.7)
    yield "DDIMScheduler", "sd", dict(clip_sample=False, set_alpha_to_one=False), 7, dict(eta=1.0)
    yield "DDPMScheduler", "sd", dict(clip_sample=False, variance_type="fixed_large"), 5, {}
    yield "DDPMScheduler", "sd", dict(clip_sample=False, variance_type="fixed_small_log"), 5, {}
    yield "PNDMScheduler", "sd", dict(skip_prk_steps=True, set_alpha_to_one=True), 5, {}
    yield "PNDMScheduler", "sd", dict(skip_prk_steps=True), 10, dict(strength=0.9)
    for config in (dict(final_sigmas_type="sigma_min"), dict(use_karras_sigmas=True, sigma_min=0.03, sigma_max=10.0),
                   dict(timestep_type="continuous", prediction_type="v_prediction")):
        yield "EulerDiscreteScheduler", "sd", config, 5, {}
    for eta in (0.3, 1.0):
        for steps in (4, 7):
            yield "TCDScheduler", "sd", {}, steps, dict(eta=eta)
    yield "LCMScheduler", "sd", dict(original_inference_steps=40, timestep_scaling=8.0), 3, {}

    for name in ("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"):
        orders = itertools.product((1, 2, 3), ("midpoint", "heun"), ("dpmsolver++", "sde-dpmsolver++"))
        for order, solver, algorithm in orders:
            config = dict(solver_order=order, solver_type=solver, algorithm_type=algorithm)
            yield name, "sd", config, 6, {}
            yield name, "sd", dict(config, final_sigmas_type="sigma_min", lower_order_final=False), 6, {}
            yield name, "sd", dict(config, use_karras_sigmas=True), 16, dict(strength=0.7)
            yield name, "sd", dict(config, final_sigmas_type="sigma_min"), 15, dict(strength=0.5)
    yield "DPMSolverMultistepScheduler", "sd", dict(euler_at_final=True, final_sigmas_type="sigma_min"), 16, {}
    for order, solver, clean in itertools.product((1, 2, 3), ("bh1", "bh2"), (True, False)):
        config = dict(solver_order=order, solver_type=solver, predict_x0=clean, final_sigmas_type="sigma_min")
        for kind in ALL_PREDICTIONS:
            yield "UniPCMultistepScheduler", "sd", dict(config, prediction_type=kind), 6, {}
        yield "UniPCMultistepScheduler", "sd", dict(config, lower_order_final=False), 7, dict(strength=0.8)
        yield "UniPCMultistepScheduler", "sd", dict(config, use_karras_sigmas=True, disable_corrector=[0, 3]), 6, {}
    yield "UniPCMultistepScheduler", "sd", dict(solver_order=3), 8, {}


TRAINING = {
    "ddpm_scaled_linear": dict(SD),
    "ddpm_linear": dict(LINEAR),
    "ddpm_zero_snr": dict(SD, rescale_betas_zero_snr=True),
    "ddpm_cosine": dict(COSINE),
    "ddpm_cosine_zero_snr": dict(COSINE, rescale_betas_zero_snr=True),
}


class Double:
    """The torch module, but that float32 is float64: some steps convert the sample to float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def cut(scheduler, steps, how):
    """The runs of the pipelines' get_timesteps (strength, denoising_start) and denoising_end: first and number."""
    timesteps, order, train = scheduler.timesteps, scheduler.order, scheduler.config.num_train_timesteps
    start = 0
    if "strength" in how:
        start = max(steps - min(int(steps * how["strength"]), steps), 0) * order
    if "after" in how:
        kept = (timesteps < int(round(train - how["after"] * train))).sum().item()
        if order == 2 and kept % 2 == 0:
            kept += 1
        start = len(timesteps) - kept
    timesteps = timesteps[start:]
    if "end" in how:
        cutoff = int(round(train - how["end"] * train))
        timesteps = timesteps[:len([t for t in timesteps if t >= cutoff])]
    return start, timesteps


def sample(name, schedule, config, steps, how, t):
    """Runs one case and returns what is recorded of it."""
    module = importlib.import_module(getattr(diffusers, name).__module__)
    scheduler = getattr(diffusers, name).from_config({**SCHEDULES[schedule], **config})
    scheduler.set_timesteps(steps)
    for table in ("sigmas", "sigmas_interpol", "sigmas_up", "sigmas_down", "alphas_cumprod", "final_alpha_cumprod"):
        if hasattr(scheduler, table):
            setattr(scheduler, table, getattr(scheduler, table).double())
    start, timesteps = cut(scheduler, steps, how)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(start)

    def noised(index):
        at = scheduler.timesteps[index:index + 1]
        if name == "TCDScheduler":
            # add_noise of this version of the class is DDIM's.
            return diffusers.DDIMScheduler.add_noise(scheduler, *units, at)
        return scheduler.add_noise(*units, at)

    # A clean image of ones and noise of zeros, and the other way round.
    one = torch.tensor([1.0, 0.0]).reshape(2, 1, 1, 1)
    units = (one, 1.0 - one)
    coefficients = [noised(start).flatten()]
    x = t["noise"] * scheduler.init_noise_sigma
    if start > 0:
        x = coefficients[0][0] * t["image"] + coefficients[0][1] * t["noise"]
    samples, clean = [x], []
    extra = {k: how[k] for k in ("eta", "use_clipped_model_output") if k in how}
    if name == "TCDScheduler":
        # The pipelines' default, not that of the class.
        extra.setdefault("eta", 0.0)
    for i, timestep in enumerate(timesteps):
        prediction = 0.5 * scheduler.scale_model_input(x, timestep) + t["model_offset"]
        if name == "LMSDiscreteScheduler":
            # A start in the middle takes the coefficients of more derivatives than there are, unless told.
            extra["order"] = min(4, i + 1)
        noise = t["variance_noise"][i]
        held = {"torch": module.torch, "randn_tensor": getattr(module, "randn_tensor", None)}
        module.torch, module.randn_tensor = Double(), lambda *args, **kwargs: noise
        out = scheduler.step(prediction, timestep, x, **extra)
        module.torch, module.randn_tensor = held["torch"], held["randn_tensor"]
        x = out.prev_sample
        samples.append(x)
        if name in GIVES_CLEAN:
            clean.append(out.pred_original_sample)
        last = start + i + 1 == len(scheduler.timesteps)
        coefficients.append(torch.tensor([1.0, 0.0]) if last else noised(start + i + 1).flatten())
    record = {"timesteps": timesteps, "samples": torch.stack(samples).reshape(len(samples), -1),
              "noised": torch.stack(coefficients)}
    if clean:
        record["clean"] = torch.stack(clean).reshape(len(clean), -1)
    assert all(v.dtype == torch.float64 for k, v in record.items() if k != "timesteps"), name
    record = {k: v.numpy().astype(np.float32) for k, v in record.items()}
    case = {"class": name, "schedule": schedule, "config": config, "steps": steps, "runs": len(timesteps),
            "clean": bool(clean), "init_noise_sigma": float(f"{scheduler.init_noise_sigma:.9g}"), **how}
    bad = [k for k, v in record.items() if not np.all(np.isfinite(v))]
    assert not bad, (case, bad)
    return case, record


def main():
    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    gen = rng("schedulers")
    ins = {"noise": normal(gen, SHAPE), "image": normal(gen, SHAPE), "model_offset": normal(gen, SHAPE, scale=0.5),
           "variance_noise": normal(gen, (40, *SHAPE)), "clean": normal(gen, (6, 2, 3, 4)),
           "training_noise": normal(gen, (6, 2, 3, 4)), "timesteps": np.array([0, 1, 137, 500, 998, 999], np.int64)}
    tensors = {f"in/{k}": v for k, v in ins.items()}

    t = {k: torch.from_numpy(v) for k, v in ins.items()}
    training = {}
    for case, config in TRAINING.items():
        scheduler = DDPMScheduler(**config)
        tensors[f"out/{case}/alphas_cumprod"] = scheduler.alphas_cumprod.numpy()
        noisy = (t["clean"], t["training_noise"], t["timesteps"])
        tensors[f"out/{case}/add_noise"] = scheduler.add_noise(*noisy).numpy()
        tensors[f"out/{case}/velocity"] = scheduler.get_velocity(*noisy).numpy()
        training[case] = config

    torch.set_default_dtype(torch.float64)
    t = {k: v.double() for k, v in t.items()}
    cases, records = [], []
    for case in sampling_cases():
        case, record = sample(*case, t)
        cases.append(case)
        records.append(record)
    for key in ("timesteps", "samples", "noised", "clean"):
        tensors[f"out/{key}"] = np.concatenate([record[key] for record in records if key in record])
    print(len(cases), "cases")
    write(GOLDEN / "schedulers.safetensors", tensors,
          {"cases": cases, "schedules": SCHEDULES, "training": training,
           "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})


if __name__ == "__main__":
    main()
