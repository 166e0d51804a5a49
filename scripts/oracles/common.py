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


def report(path: pathlib.Path) -> None:
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
