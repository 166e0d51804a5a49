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


def report(path: pathlib.Path) -> None:
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
