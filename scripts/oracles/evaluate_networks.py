"""CLIP score, LPIPS, FID and Inception score of pairs of pictures, by torchmetrics, lpips, torch-fidelity and clean-fid.

The networks have their published architectures (CLIP's is small) with weights that a formula makes of their names, so that no weights
are stored. Packages of its own: requirements-evaluate.txt.

Names: in/<reference|picture>/<n> `u8[rows, columns, 3]`; out/clip_score/<reference|picture> and out/lpips_<alex|vgg> of each pair, out/.../all of
all; out/fid_<tensorflow|clean>; out/inception_score/<reference|picture> `[mean, deviation]`; in/features/<few|many>/<0|1> and
out/frechet/<few|many>; in/logits and out/inception_score/logits; in/resample and out/resample/<bytes|floats>: Pillow's bicubic filter.
The metadata has `prompts`, and for each network `weights`: dimensions, scale and offset of the formula by name.
"""

import shutil
import tempfile

import lpips
import numpy as np
import torch
import torch_fidelity
import torchmetrics
import torchvision
import transformers
from PIL import Image
from cleanfid.resize import build_resizer
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torchmetrics.functional.image.lpips import _lpips_compute, _lpips_update, _NoTrainLpips
from torchmetrics.functional.multimodal.clip_score import _clip_score_update
from torchmetrics.multimodal import CLIPScore
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from common import GOLDEN, fill, normal, rng, write

PAIRS, SIZE = 12, (36, 44)
SIDE = 32
PROMPTS = ["a small red cat on the roof", "an ancient golden clock", "misty mountain, oil painting", "two blue owls",
           "a wooden train at night", "portrait of an astronaut", "a frozen lake, pencil sketch", "a dragon over the city",
           "a garden with butterflies", "", "dark forest, studio lighting", "A TEAPOT!"]
CLIP = {
    "projection_dim": 24,
    "text_config": {"vocab_size": 2014, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "max_position_embeddings": 77, "bos_token_id": 2012, "eos_token_id": 2013,
                    "pad_token_id": 2013},
    "vision_config": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "image_size": SIDE, "patch_size": 8},
}


def picture(key: int) -> np.ndarray:
    """Smooth colours with an edge, of its own wavelengths."""
    y, x = np.mgrid[0 : SIZE[0], 0 : SIZE[1]]
    lengths = rng("networks", key).uniform(2, 12, (3, 2))
    waves = [np.sin(x / a + key) * np.cos(y / b - key) for a, b in lengths]
    values = 128 + 100 * np.stack(waves, -1)
    values[SIZE[0] // 2 :, (3 * key) % SIZE[1] :] = 20 * (key % 12)
    return values.clip(0, 255).astype(np.uint8)


def changed(values: np.ndarray, key: int) -> np.ndarray:
    moved = values.astype(np.float64) + normal(rng("networks", "noise", key), values.shape, scale=2 + 4 * key)
    return moved.round().clip(0, 255).astype(np.uint8)


def batch(pictures: list) -> torch.Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


class Clip:
    """transformers' model with the features as tensors, which torchmetrics expects."""

    def __init__(self, model):
        self.model, self.config = model, model.config

    def to(self, _):
        return self

    def eval(self):
        return self

    def get_image_features(self, pixels):
        return self.model.get_image_features(pixels).pooler_output

    def get_text_features(self, ids, mask):
        return self.model.get_text_features(ids, mask).pooler_output


def clip_scores(out: dict, sets: dict) -> dict:
    model = CLIPModel(CLIPConfig(**CLIP)).eval()
    rules = fill({k: v for k, v in model.state_dict().items()}, {})
    with tempfile.TemporaryDirectory() as folder:
        for name in ["vocab.json", "merges.txt"]:
            shutil.copy(GOLDEN / "tokenizer" / name, folder)
        tokenizer = CLIPTokenizer.from_pretrained(folder)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = CLIPProcessor(CLIPImageProcessorPil(**sizes), tokenizer)

    class Mean(CLIPScore):
        """Its networks are modules, which this one is not."""

        def __init__(self):
            torch.nn.Module.__init__(self)
            torchmetrics.Metric.__init__(self)
            object.__setattr__(self, "model", Clip(model))
            self.processor = processor
            self.add_state("score", torch.tensor(0.0), dist_reduce_fx="sum")
            self.add_state("n_samples", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    for name, pictures in sets.items():
        together, single = Mean(), []
        for values, prompt in zip(pictures, PROMPTS):
            tensor = batch([values])[0]
            together.update([tensor], [prompt])
            score, _ = _clip_score_update([tensor], [prompt], Clip(model), processor)
            single.append(float(score[0]))
        out[f"out/clip_score/{name}"] = np.array(single)
        out[f"out/clip_score/{name}/all"] = np.float64(together.compute())
    return rules


def distances(out: dict, sets: dict, kind: str) -> dict:
    """Of torchmetrics, and of the package lpips, whose small number in the norm is another."""
    network = {"alex": torchvision.models.alexnet, "vgg": torchvision.models.vgg16}[kind](weights=None)
    features = {k: v for k, v in network.state_dict().items() if k.startswith("features.")}
    ours = _NoTrainLpips(net=kind, pretrained=False, pnet_rand=True)
    lins = {k: v for k, v in ours.state_dict().items() if k.startswith("lin") and not k.startswith("lins")}
    rules = fill(features | lins, {})
    index = {f"features.{k.split('.', 2)[2]}": k for k in ours.state_dict() if k.startswith("net.")}
    assert index.keys() == features.keys()
    state = {index.get(k, k): v for k, v in (features | lins).items()}
    ours.load_state_dict(state, strict=False)
    original = lpips.LPIPS(net=kind, pretrained=False, pnet_rand=True, verbose=False).eval()
    original.load_state_dict(state, strict=False)

    a, b = (batch(pictures).float() / 255 for pictures in sets.values())
    scores = _lpips_update(a, b, ours, normalize=True)
    out[f"out/lpips_{kind}"] = scores.double().numpy()
    out[f"out/lpips_{kind}/all"] = np.float64(_lpips_compute(scores, "mean"))
    with torch.no_grad():
        theirs = original(a, b, normalize=True).double().numpy().ravel()
    print(kind, "lpips beside torchmetrics:", np.abs(theirs / out[f"out/lpips_{kind}"] - 1).max())
    return rules


def inception(out: dict, sets: dict) -> dict:
    class Unloaded(FeatureExtractorInceptionV3):
        """Without weights, which the constructor loads."""

        def load_state_dict(self, state):
            pass

    with tempfile.NamedTemporaryFile() as empty:
        torch.save({}, empty.name)
        network = Unloaded("inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=empty.name)
    rules = fill(network.state_dict(), {"fc.weight": 4.0})
    resize = build_resizer("clean")

    def forward(pixels):
        """After the resizing inside the network, which leaves pictures of its own size as they are."""
        x = (pixels - 128) / 128
        for name, layer in network.named_children():
            if name != "fc":
                x = layer(x)
        return torch.flatten(x, 1)

    features = {}
    for name, pictures in sets.items():
        found, logits = network(batch(pictures))
        features["tensorflow", name] = found
        scores = isc_features_to_metric(logits)
        out[f"out/inception_score/{name}"] = np.array([scores[f"inception_score_{k}"] for k in ["mean", "std"]])
        resized = torch.from_numpy(np.stack([resize(p) for p in pictures])).permute(0, 3, 1, 2)
        features["clean", name] = forward(resized)
        print(name, "spread of features", found.std(0).mean(), "logits", logits.std(0).mean(), logits.std(1).mean())
    for kind in ["tensorflow", "clean"]:
        stats = [fid_features_to_statistics(features[kind, name].double()) for name in sets]
        out[f"out/fid_{kind}"] = np.float64(fid_statistics_to_metric(*stats, False)["frechet_inception_distance"])
    return rules


def statistics(out: dict) -> None:
    """Of random features, fewer and more than dimensions, and of random logits, whose number the splits do not divide."""
    for name, counts in {"few": (5, 7), "many": (40, 30)}.items():
        gen = rng("networks", "features", name)
        mixing = normal(gen, (9, 9))
        pair = [normal(gen, (count, 9)) @ mixing + k for k, count in enumerate(counts)]
        out |= {f"in/features/{name}/{k}": features for k, features in enumerate(pair)}
        stats = [fid_features_to_statistics(torch.from_numpy(features).double()) for features in pair]
        out[f"out/frechet/{name}"] = np.float64(fid_statistics_to_metric(*stats, False)["frechet_inception_distance"])
    logits = normal(rng("networks", "logits"), (37, 6), scale=2.0)
    scores = isc_features_to_metric(torch.from_numpy(logits))
    out["in/logits"] = logits
    out["out/inception_score/logits"] = np.array([scores[f"inception_score_{k}"] for k in ["mean", "std"]])


def resampled(out: dict) -> None:
    """Pillow's bicubic filter: smaller in one direction, larger in the other."""
    values = picture(5)[:30, :41]
    out["in/resample"] = values
    out["out/resample/bytes"] = np.asarray(Image.fromarray(values).resize((17, 50), Image.BICUBIC))
    floats = [Image.fromarray(values[..., c].astype(np.float32)).resize((17, 50), Image.BICUBIC) for c in range(3)]
    out["out/resample/floats"] = np.stack([np.asarray(channel) for channel in floats], -1)


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    tensors, out = {}, {}
    references = [picture(n) for n in range(PAIRS)]
    sets = {"reference": references, "picture": [changed(values, n) for n, values in enumerate(references)]}
    for name, pictures in sets.items():
        tensors |= {f"in/{name}/{n}": values for n, values in enumerate(pictures)}
    resampled(out)
    statistics(out)
    weights = {"clip": clip_scores(out, sets), "alex": distances(out, sets, "alex"), "vgg": distances(out, sets, "vgg"),
               "inception": inception(out, sets)}
    for name, value in out.items():
        if name.startswith("out/") and value.size < 20:
            print(name, value)
    versions = {"torchmetrics": torchmetrics.__version__, "torch": torch.__version__.split("+")[0],
                "torchvision": torchvision.__version__.split("+")[0], "torch-fidelity": torch_fidelity.__version__,
                "transformers": transformers.__version__}
    write(GOLDEN / "evaluate_networks.safetensors", tensors | out,
          {"versions": versions, "prompts": PROMPTS, "clip": CLIP, "weights": weights})


main()
