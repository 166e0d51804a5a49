"""Noise schedules and sampling sequences of diffusers' DDIM, DDPM and Euler schedulers.

Usage: python schedulers.py

Writes tests/golden/schedulers.safetensors. For each sampling case of the metadata (its scheduler, configuration, steps):
  out/<case>/timesteps, out/<case>/sigmas (Euler), out/<case>/alphas_cumprod (where the schedule is a new one)
  out/<case>/samples: x before the first step and after each; out/<case>/pred_original_sample: of each step.
The model is model(x) = 0.5 * scale_model_input(x) + in/model_offset, and x starts as in/noise * init_noise_sigma.
DDIM with eta > 0 adds in/variance_noise[step]. With use_clipped_model_output the noise is derived from the clipped
sample. For the training cases, at in/timesteps:
  out/<case>/add_noise and out/<case>/velocity of in/clean and in/training_noise.
All in float32, as diffusers computes them.
"""

import diffusers
import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler

from common import GOLDEN, normal, rng, write

SHAPE = (2, 3, 4)
SD = dict(num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
LINEAR = dict(num_train_timesteps=1000, beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
CLIPPED = dict(use_clipped_model_output=True)
DDIM_SD = dict(SD, clip_sample=False, set_alpha_to_one=False, steps_offset=1)

# name -> (scheduler, configuration, number of inference steps, arguments of step)
SAMPLING = {
    "ddim_sd15": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="leading", prediction_type="epsilon"), 5, {}),
    "ddim_sd21": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="leading", prediction_type="v_prediction"), 5, {}),
    "ddim_uneven_steps": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="leading"), 7, {}),
    "ddim_linspace": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="linspace", prediction_type="v_prediction"), 7, {}),
    "ddim_trailing": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="trailing", prediction_type="epsilon"), 7, {}),
    "ddim_zero_snr": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="trailing", prediction_type="v_prediction",
                                          rescale_betas_zero_snr=True), 5, {}),
    "ddim_linear_clipped": (DDIMScheduler, dict(LINEAR, clip_sample=True, set_alpha_to_one=True), 5, {}),
    "ddim_sample": (DDIMScheduler, dict(LINEAR, clip_sample=False, prediction_type="sample"), 5, {}),
    "ddim_eta": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="leading"), 5, dict(eta=0.7)),
    "ddim_cosine_zero_snr": (DDIMScheduler, dict(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2",
                                                 timestep_spacing="trailing", prediction_type="v_prediction",
                                                 rescale_betas_zero_snr=True, clip_sample=True), 6, {}),
    "ddim_clipped_epsilon": (DDIMScheduler, dict(LINEAR, timestep_spacing="trailing", clip_sample=True), 6, CLIPPED),
    **{f"ddim_clipped_{kind}": (DDIMScheduler, dict(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2",
                                                    timestep_spacing="trailing", prediction_type=kind,
                                                    rescale_betas_zero_snr=True, clip_sample=True), 6, CLIPPED)
       for kind in ("v_prediction", "sample")},
    "ddim_one_step": (DDIMScheduler, dict(DDIM_SD, timestep_spacing="trailing"), 1, {}),
} | {
    f"euler_{spacing}_{kind}": (EulerDiscreteScheduler,
                                dict(SD, timestep_spacing=spacing, prediction_type=kind, steps_offset=offset), 6, {})
    for spacing, offset in (("leading", 1), ("linspace", 0), ("trailing", 0)) for kind in ("epsilon", "v_prediction")
} | {
    "euler_zero_snr": (EulerDiscreteScheduler, dict(SD, timestep_spacing="trailing", prediction_type="v_prediction",
                                                    rescale_betas_zero_snr=True), 6, {}),
    "euler_linear": (EulerDiscreteScheduler, dict(LINEAR, timestep_spacing="leading"), 4, {}),
}
TRAINING = {
    "ddpm_scaled_linear": dict(SD),
    "ddpm_linear": dict(LINEAR),
    "ddpm_zero_snr": dict(SD, rescale_betas_zero_snr=True),
    "ddpm_cosine": dict(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2"),
    "ddpm_cosine_zero_snr": dict(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2",
                                 rescale_betas_zero_snr=True),
}


def main():
    torch.set_num_threads(1)
    gen = rng("schedulers")
    ins = {"noise": normal(gen, SHAPE), "model_offset": normal(gen, SHAPE, scale=0.5),
           "variance_noise": normal(gen, (8, *SHAPE)), "clean": normal(gen, (6, *SHAPE)),
           "training_noise": normal(gen, (6, *SHAPE)), "timesteps": np.array([0, 1, 137, 500, 998, 999], np.int64)}
    t = {k: torch.from_numpy(v) for k, v in ins.items()}
    tensors, cases, schedules = {f"in/{k}": v for k, v in ins.items()}, {}, set()

    def record_schedule(case, scheduler):
        key = scheduler.alphas_cumprod.numpy().tobytes()
        if key not in schedules:
            schedules.add(key)
            tensors[f"out/{case}/alphas_cumprod"] = scheduler.alphas_cumprod.numpy()

    for case, (kind, config, steps, step_args) in SAMPLING.items():
        scheduler = kind(**config)
        scheduler.set_timesteps(steps)
        record_schedule(case, scheduler)
        x = t["noise"] * scheduler.init_noise_sigma
        samples, originals = [x], []
        for i, timestep in enumerate(scheduler.timesteps):
            prediction = 0.5 * scheduler.scale_model_input(x, timestep) + t["model_offset"]
            extra = dict(step_args, variance_noise=t["variance_noise"][i]) if step_args else {}
            out = scheduler.step(prediction, timestep, x, **extra)
            x = out.prev_sample
            samples.append(x)
            originals.append(out.pred_original_sample)
        tensors[f"out/{case}/timesteps"] = scheduler.timesteps.numpy()
        tensors[f"out/{case}/samples"] = torch.stack(samples).numpy()
        tensors[f"out/{case}/pred_original_sample"] = torch.stack(originals).numpy()
        if kind is EulerDiscreteScheduler:
            tensors[f"out/{case}/sigmas"] = scheduler.sigmas.numpy()
        cases[case] = {"scheduler": kind.__name__, "num_inference_steps": steps, "step": step_args,
                       "config": {k: v for k, v in scheduler.config.items() if not k.startswith("_")},
                       "init_noise_sigma": float(scheduler.init_noise_sigma)}
    for case, config in TRAINING.items():
        scheduler = DDPMScheduler(**config)
        record_schedule(case, scheduler)
        tensors[f"out/{case}/add_noise"] = scheduler.add_noise(t["clean"], t["training_noise"], t["timesteps"]).numpy()
        tensors[f"out/{case}/velocity"] = scheduler.get_velocity(t["clean"], t["training_noise"], t["timesteps"]).numpy()
        cases[case] = {"scheduler": "DDPMScheduler", "training": True,
                       "config": {k: v for k, v in scheduler.config.items() if not k.startswith("_")}}
    bad = [k for k, v in tensors.items() if not np.all(np.isfinite(v))]
    assert not bad, bad
    write(GOLDEN / "schedulers.safetensors", tensors,
          {"cases": cases, "versions": {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}})


if __name__ == "__main__":
    main()
