"""Shared by all generators: seeded values and the golden file format.

A golden file is a safetensors file. Tensor names start with `in/`, `param/`, `out/` or `grad/`.
The `__metadata__` has one key, `golden`, whose value is a JSON object with sorted keys (one key only, because the
library does not keep an order among several and the files must be the same bytes on every run).
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


def rng(*key) -> np.random.Generator:
    """A generator seeded by the names in `key`, so that adding a case does not change the others."""
    return np.random.default_rng([b for part in key for b in str(part).encode()] + [len(key)])


def normal(gen: np.random.Generator, shape, dtype=np.float32, scale=1.0) -> np.ndarray:
    return (gen.standard_normal(shape) * scale).astype(np.float32).astype(dtype)


def write(path: pathlib.Path, tensors: dict, meta: dict) -> None:
    """Writes one golden file and prints its size."""
    for name in tensors:
        if name.split("/")[0] not in ("in", "param", "out", "grad"):
            raise ValueError(f"tensor {name}: a name starts with in/, param/, out/ or grad/")
    arrays = {k: np.array(v, order="C") for k, v in sorted(tensors.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, str(path), metadata={"golden": json.dumps(meta, sort_keys=True, default=int)})
    report(path)


def rel_l2(a, b) -> float:
    """The relative L2 distance of `a` from `b`."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def record_denoiser(folder: pathlib.Path, model, ins: dict, single: dict, double: dict, with_gradients=True) -> None:
    """Writes a model's inputs and its results in float64, `single` being those in float32, beside its weights."""
    import torch

    grads = [k for k in double if k.startswith("grad/param/")]
    meta = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "pytorch_float32_rel_l2": {
            "out/sample": rel_l2(single["out/sample"], double["out/sample"]),
            "worst_grad": max(rel_l2(single[k], double[k]) for k in grads),
        },
        "versions": {"diffusers": json.load(open(folder / "config.json"))["_diffusers_version"],
                     "torch": torch.__version__.split("+")[0]},
    }
    print(folder.name, meta)
    kept = {k: v for k, v in double.items() if with_gradients or k not in grads}
    tensors = {f"in/{k}": v for k, v in ins.items()} | {k: v.astype(np.float32) for k, v in kept.items()}
    write(folder / "io.safetensors", tensors, meta)


def record_sampling(name: str, runs: int, recorded) -> None:
    """Writes tests/golden/<name>.safetensors: sequences of samplers on one sample and one model of no weights, with the noise of
    at most `runs` runs. `recorded` makes of the inputs, in float64, the description of each case and its arrays by name; the
    cases' arrays lie one after the other."""
    import diffusers
    import torch

    torch.set_num_threads(1)
    shape, gen = (1, 2, 1, 3), rng(name)
    ins = {"noise": normal(gen, shape), "model_offset": normal(gen, shape, scale=0.5),
           "variance_noise": normal(gen, (runs, *shape))}
    described, records = zip(*recorded({k: torch.from_numpy(v).double() for k, v in ins.items()}))
    tensors = {f"in/{k}": v for k, v in ins.items()}
    for key in records[0]:
        tensors[f"out/{key}"] = np.concatenate([record[key] for record in records])
        assert np.all(np.isfinite(tensors[f"out/{key}"])), key
    print(len(records), "cases")
    versions = {"diffusers": diffusers.__version__, "torch": torch.__version__.split("+")[0]}
    write(GOLDEN / f"{name}.safetensors", tensors, {"cases": list(described), "versions": versions})


def record_loras(folder: pathlib.Path, cases: dict, plain) -> None:
    """Writes the results of models with LoRAs, by case, as `io.safetensors` of `folder`. The metadata says how far they are from
    those without, `plain(case)`; weights, which are no results, are not compared."""
    import diffusers
    import peft
    import torch
    import transformers

    changes = {f"{case}/{k}": rel_l2(v, plain(case)[k])
               for case, values in cases.items() for k, v in values.items() if not k.startswith("weight/")}
    print(changes)
    meta = {"change_rel_l2": changes,
            "versions": {"diffusers": diffusers.__version__, "peft": peft.__version__,
                         "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}}
    write(folder / "io.safetensors",
          {f"out/{case}/{k}": v.astype(np.float32) for case, values in cases.items() for k, v in values.items()}, meta)


def report(path: pathlib.Path) -> None:
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def linear_model(w):
    """A model of one linear layer without a bias, for AMD Quark."""
    import torch

    class Model(torch.nn.Module):
        """Quark asks models for their device."""

        device = torch.device("cpu")

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
            self.linear.weight.data.copy_(w)

        def forward(self, x):
            return self.linear(x)

    return Model()


def formula(name: str, count: int, scale: float, offset: float) -> np.ndarray:
    """Numbers of [offset - scale, offset + scale): SplitMix64 from the FNV-1a hash of the name, the upper 24 bits of each word."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    unit = (z >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    return unit * np.float32(scale) + np.float32(offset)


def fill(state: dict, gain: dict) -> dict:
    """Fills PyTorch's tensors by the formula; gives dimensions, scale and offset of each. `gain` has factors by the end of names."""
    import torch

    rules = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            continue
        dims = list(tensor.shape)
        if name.startswith("lin"):
            scale, offset = 1.0 / dims[1], 1.0 / dims[1]
        elif name.endswith("running_mean") or name.endswith("bias"):
            scale, offset = 0.1, 0.0
        elif name.endswith("running_var") or (name.endswith("weight") and len(dims) == 1):
            scale, offset = 0.3, 1.0
        else:
            fan_in = int(np.prod(dims[1:])) if len(dims) > 1 else 1
            scale, offset = float(np.sqrt(6 / fan_in)), 0.0
            if "embedding" in name and "patch" not in name:
                scale = 0.5
        scale = float(np.float32(scale * next((g for end, g in gain.items() if name.endswith(end)), 1.0)))
        rules[name] = [dims, scale, offset]
        tensor.copy_(torch.from_numpy(formula(name, tensor.numel(), scale, offset).reshape(dims)))
    return rules
