"""OpenCV's Canny edges of small 8-bit RGB images.

Usage: python canny.py

Writes tests/golden/canny.safetensors: in/<case> (uint8 [height, width, 3]) and out/<case> (uint8 [height, width], 0 and
255); the metadata has each case's thresholds. Images are smoothed noise with a disc and a bar of other colours, so
that gradients of all directions, ties, and weak edges with and without strong ones occur; `edges` counts the edge
pixels.
"""

import cv2
import numpy as np

from common import GOLDEN, rng, write

CASES = {  # height, width, smoothing, low and high threshold
    "coarse": (33, 47, 2.0, 100, 200),
    "fine": (40, 29, 0.7, 100, 200),
    "low": (24, 24, 1.5, 30, 90),
    "flat": (5, 6, 0.0, 0, 0),  # thresholds of 0: every local maximum
    "line": (1, 40, 0.8, 60, 100),
}


def sample_image(name: str, height: int, width: int, smoothing: float) -> np.ndarray:
    gen = rng("canny", name)
    noise = gen.integers(0, 256, (height, width, 3)).astype(np.uint8)
    if smoothing == 0.0:
        return np.where(noise > 127, 200, 190).astype(np.uint8)
    base = cv2.GaussianBlur(noise, (0, 0), smoothing)
    cv2.circle(base, (width // 3, height // 2), height // 4, (200, 40, 90), -1)
    cv2.rectangle(base, (width // 2, height // 5), (width - 4, height // 3), (30, 180, 60), -1)
    return base


def main():
    tensors, meta = {}, {"cases": {}, "versions": {"opencv": cv2.__version__}}
    for name, (height, width, smoothing, low, high) in CASES.items():
        image = sample_image(name, height, width, smoothing)
        edges = cv2.Canny(image, low, high)
        tensors[f"in/{name}"], tensors[f"out/{name}"] = image, edges
        meta["cases"][name] = {"thresholds": [low, high], "edges": int((edges > 0).sum())}
    print(meta)
    write(GOLDEN / "canny.safetensors", tensors, meta)


if __name__ == "__main__":
    main()
