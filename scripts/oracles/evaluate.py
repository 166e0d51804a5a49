"""Similarity of pictures by torchmetrics: PSNR and SSIM of pairs of 8-bit RGB pictures, with channels from 0 to 1.

torchmetrics needs a package of its own (requirements-evaluate.txt).

Names: in/<pair>/{reference,picture} `u8[rows, columns, 3]`; out/<pair>/{psnr,ssim} and out/all/{psnr,ssim} of all pairs of one size.
"""

import numpy as np
import torch
import torchmetrics
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

from common import GOLDEN, normal, rng, write


def picture(key: str, rows: int, columns: int) -> np.ndarray:
    """Smooth colours with an edge."""
    y, x = np.mgrid[0:rows, 0:columns]
    waves = [np.sin(x / (3 + c) + c) * np.cos(y / (4 + c)) for c in range(3)]
    values = 128 + 90 * np.stack(waves, -1) + normal(rng("evaluate", key), (rows, columns, 3), scale=4)
    values[rows // 2 :, columns // 2 :] = 20
    return values.clip(0, 255).astype(np.uint8)


def changed(values: np.ndarray, key: str, noise: float) -> np.ndarray:
    moved = values.astype(np.float64) + normal(rng("evaluate", "noise", key), values.shape, scale=noise)
    return moved.round().clip(0, 255).astype(np.uint8)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).permute(2, 0, 1)[None].double() / 255


def main():
    tensors, pairs = {}, []
    for name, rows, columns, noise in [("slight", 24, 20, 3), ("strong", 24, 20, 40), ("small", 11, 13, 10)]:
        reference = picture(name, rows, columns)
        pairs.append((name, reference, changed(reference, name, noise)))
    metrics = {
        "psnr": lambda: PeakSignalNoiseRatio(data_range=1.0).double(),
        "ssim": lambda: StructuralSimilarityIndexMeasure(data_range=1.0).double(),
    }
    for key, metric in metrics.items():
        together = metric()
        for name, reference, found in pairs:
            tensors |= {f"in/{name}/reference": reference, f"in/{name}/picture": found}
            value = metric()(tensor(found), tensor(reference))
            tensors[f"out/{name}/{key}"] = np.float64(value)
            if name != "small":
                together.update(tensor(found), tensor(reference))
        tensors[f"out/all/{key}"] = np.float64(together.compute())
    print({k: float(v) for k, v in tensors.items() if k.startswith("out/")})
    versions = {"torchmetrics": torchmetrics.__version__, "torch": torch.__version__.split("+")[0]}
    write(GOLDEN / "evaluate.safetensors", tensors, {"versions": versions})


main()
