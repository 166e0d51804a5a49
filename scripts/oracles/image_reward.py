"""ImageReward of pairs of pictures by the package image-reward, and the token ids of its tokenizer.

The network is a small one of the package's own classes, with weights that a formula makes of their names, so that no weights are
stored; the vocabulary is written here. Packages of its own: requirements-image-reward.txt. The pictures are those of
evaluate_networks.safetensors, which evaluate_networks.py wrote.

Names: out/reward/<reference|picture> of each picture; out/ids `[texts, 35]`. The metadata has `prompts`, `texts`, and
`weights`: dimensions, scale and offset of the formula by name. The vocabulary is image_reward/vocab.txt.
"""

import importlib.util
import json
import sys
import tempfile
import types

import numpy as np
import timm
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file
from transformers import BertTokenizer

from common import GOLDEN, fill, write


def without_init(name: str) -> None:
    """Registers a package without running its `__init__`: image-reward's import trainers and other scores."""
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = package


without_init("ImageReward")
without_init("ImageReward.models")

from ImageReward import ImageReward as original  # noqa: E402
from ImageReward.models.BLIP import blip_pretrain  # noqa: E402
from ImageReward.models.BLIP.vit import VisionTransformer  # noqa: E402

PAIRS, SIDE, LENGTH, FEATURES = 12, 32, 35, 64
FOLDER = GOLDEN / "image_reward"
WORDS = ["red", "cat", "dog", "on", "the", "roof", "an", "small", "old", "clock", "##ing", "##ed", "paint", "oil",
         "mountain", "lake", "frozen", "night", "cafe", "naive", "istanbul", "strasse", "中", "山", "²", "½"]
PROMPTS = ["a small red cat on the roof", "an old golden clock", "Misty mountain, oil painting!", "two blue owls (4k)", "", "A LAKE",
           "the dog's roof; frozen", "a café at night", "中山 mountain", "painting of the old roof " * 8, "x", "a cat. a dog."]
TEXTS = PROMPTS + ["naïve Ångström", "İstanbul ISTANBUL", "a\tb\nc\u00a0d\u200be\u0000f\ufffdg", "[SEP] cat [MASK]dog [ENC] [pad]", "cat" * 34,
                   "z" * 101, "🐈 cat🐈dog", "co-operate_now #1 $5 ~ ^ `", "e\u0301te\u0301 été", "½ x²", "ﬁne ａｂｃ", "don't [UNK]ed",
                   "a " * 33, "a " * 34, "日本語の猫"]
TEXT = {"architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": FEATURES, "intermediate_size": 96, "layer_norm_eps": 1e-12, "max_position_embeddings": 40,
        "num_attention_heads": FEATURES // 64, "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2,
        "add_cross_attention": True}


def vocabulary() -> list:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [chr(c) for c in range(ord("0"), ord("9") + 1)]
    signs = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    lines = special + signs + letters + [f"##{letter}" for letter in letters] + WORDS
    assert len(lines) == len(set(lines))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def tokenizer() -> BertTokenizer:
    """As `init_tokenizer` of BLIP makes it of bert-base-uncased."""
    made = BertTokenizer(str(FOLDER / "vocab.txt"))
    made.add_special_tokens({"bos_token": "[DEC]"})
    made.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    made.enc_token_id = made.additional_special_tokens_ids[0]
    return made


def small_vit(vit, image_size, *_):
    assert (vit, image_size) == ("large", 224)
    width = 128
    return VisionTransformer(img_size=SIDE, patch_size=16, embed_dim=width, depth=2, num_heads=width // 64), width


def network(words: int):
    blip_pretrain.create_vit, blip_pretrain.init_tokenizer = small_vit, tokenizer
    full = original.MLP
    original.MLP = lambda size: full(FEATURES)
    transform = original._transform
    original._transform = lambda size: transform(SIDE)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(TEXT | {"vocab_size": words}))
        file.flush()
        return original.ImageReward(med_config=file.name, device="cpu").eval()


def main():
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    words = len(vocabulary()) + 2
    model = network(words)
    used = {name: value for name, value in model.state_dict().items() if not name.startswith(("blip.vision_proj", "blip.text_proj"))}
    rules = fill(used, {"pos_embed": 8.0, "cls_token": 8.0, "mlp.layers.7.weight": 0.2})
    sets = load_file(GOLDEN / "evaluate_networks.safetensors")
    out = {}
    for name in ["reference", "picture"]:
        pictures = [Image.fromarray(sets[f"in/{name}/{n}"]) for n in range(PAIRS)]
        out[f"out/reward/{name}"] = np.array([model.score(prompt, picture) for prompt, picture in zip(PROMPTS, pictures)])
        print(name, out[f"out/reward/{name}"])
    encoded = tokenizer()(TEXTS, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="np")
    out["out/ids"] = encoded.input_ids.astype(np.int32)
    versions = {"image-reward": "1.5", "timm": timm.__version__, "torch": torch.__version__.split("+")[0],
                "transformers": transformers.__version__}
    write(GOLDEN / "image_reward.safetensors", out,
          {"versions": versions, "prompts": PROMPTS, "texts": TEXTS, "weights": rules})


main()
