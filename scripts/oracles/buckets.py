"""Aspect-ratio buckets by kohya's sd-scripts, run from its own sources.

Usage: python buckets.py FOLDER, a git clone of https://github.com/kohya-ss/sd-scripts that has the commit below

Writes tests/golden/buckets.safetensors: in/sizes, [1000, 2] widths and heights; for each case of the metadata
out/<case>/buckets, the widths and heights of `BucketManager.make_buckets`, and out/<case>/chosen, [1000, 2], those of
`BucketManager.select_bucket`.
"""

import ast
import math
import random
import subprocess
import sys

import numpy as np

from common import GOLDEN, rng, write

COMMIT = "036907ee976ed0dc6c0cc32ffd24da9860d7fb3e"
# Resolution, shortest and longest side, step; kohya's dataset rounds the sides outwards to multiples of the step.
CASES = {"sd15": (512, 256, 1024, 64), "sd21": (768, 384, 1536, 64), "sdxl": (1024, 512, 2048, 64),
         "kohya": (1024, 256, 1024, 64), "odd": (1000, 300, 1300, 32), "small": (64, 16, 128, 8)}


def definition(folder, path, name):
    """The source of a class or function at the top of a file of the commit."""
    source = subprocess.run(["git", "-C", folder, "show", f"{COMMIT}:{path}"], check=True, capture_output=True, text=True)
    (found,) = [node for node in ast.parse(source.stdout).body if getattr(node, "name", None) == name]
    return ast.get_source_segment(source.stdout, found)


def manager(folder):
    class model_util:
        pass

    names = {"math": math, "np": np, "random": random, "model_util": model_util}
    types = "from __future__ import annotations\n"
    exec(types + definition(folder, "library/model_util.py", "make_bucket_resolutions"), names)
    model_util.make_bucket_resolutions = staticmethod(names["make_bucket_resolutions"])
    exec(types + definition(folder, "library/train_util.py", "BucketManager"), names)
    return names["BucketManager"]


def sizes():
    gen = rng("buckets")
    area = np.exp(gen.uniform(np.log(128**2), np.log(4096**2), 1000))
    ratio = np.exp(gen.normal(0, 0.5, 1000))
    made = np.stack([np.sqrt(area * ratio), np.sqrt(area / ratio)], 1).round().astype(np.int32)
    # Sizes of cameras and screens, and sizes of buckets.
    made[:12] = [[1920, 1080], [1080, 1920], [4032, 3024], [3024, 4032], [6000, 4000], [512, 512], [1024, 1024], [832, 1216],
                 [1216, 832], [640, 384], [3840, 2160], [1, 5000]]
    return made


def main():
    bucket_manager = manager(sys.argv[1])
    tensors = {"in/sizes": sizes()}
    for case, (side, least, most, step) in CASES.items():
        least, most = least - least % step, most + -most % step
        made = bucket_manager(False, (side, side), least, most, step)
        made.make_buckets()
        tensors[f"out/{case}/buckets"] = np.array(made.predefined_resos, dtype=np.int32)
        chosen = [made.select_bucket(int(width), int(height))[0] for width, height in tensors["in/sizes"]]
        tensors[f"out/{case}/chosen"] = np.array(chosen, dtype=np.int32)
    write(GOLDEN / "buckets.safetensors", tensors, {"cases": CASES, "sd-scripts": COMMIT})


if __name__ == "__main__":
    main()
