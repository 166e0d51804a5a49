"""Tiny `T5EncoderModel`s of T5 v1.1: weights, inputs, outputs; and the buckets of relative positions at full size.

Usage: python t5.py

Writes tests/golden/t5_{plain,odd}/ in transformers' layout (`odd` in shards) and beside it `io.safetensors`:
  in/input_ids, in/attention_mask;
  out/last_hidden_state, without a mask, and out/masked, with it.
The metadata of t5_plain has `buckets`: those of the published configuration for relative positions -511 to 511.
Values are computed in float64 from the float32 weights and rounded once.
"""

import math
import shutil

import numpy as np
import torch
import transformers
from transformers import T5Config, T5EncoderModel
from transformers.models.t5.modeling_t5 import T5Attention

from common import GOLDEN, normal, report, rng, write

SHARED = dict(feed_forward_proj="gated-gelu", dropout_rate=0.0, layer_norm_epsilon=1e-6, tie_word_embeddings=False)
CONFIGS = {
    "plain": dict(SHARED, vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4),
    # Heads whose features are not those of the model, few buckets that end soon.
    "odd": dict(SHARED, vocab_size=33, d_model=20, d_kv=6, d_ff=28, num_layers=3, num_heads=3,
                relative_attention_num_buckets=8, relative_attention_max_distance=12),
}
BATCH, LENGTH = 2, 23


def randomize(model, name):
    for key, param in model.named_parameters():
        gen = rng("t5", name, key)
        if param.ndim == 1:
            value = 1.0 + normal(gen, param.shape, scale=0.2)
        else:
            # Attention has no scale: queries and keys are small instead.
            scale = 1.0 / math.sqrt(param.shape[-1])
            value = normal(gen, param.shape, scale=1.0 if "bias" in key or "shared" in key else scale)
        param.data = torch.from_numpy(np.asarray(value, np.float32))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, fields in CONFIGS.items():
        folder = GOLDEN / f"t5_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        model = T5EncoderModel(T5Config(**fields)).eval()
        randomize(model, name)
        model.save_pretrained(folder, max_shard_size="12KB" if name == "odd" else "5GB")
        gen = rng("t5_inputs", name)
        ids = gen.integers(0, fields["vocab_size"], (BATCH, LENGTH)).astype(np.int32)
        mask = np.ones((BATCH, LENGTH), np.int32)
        mask[0, 17:], mask[1, 5:] = 0, 0
        t = {"input_ids": torch.from_numpy(ids).long(), "mask": torch.from_numpy(mask).long()}
        with torch.no_grad():
            single = model(t["input_ids"]).last_hidden_state
            model = model.double()
            plain = model(t["input_ids"]).last_hidden_state
            masked = model(t["input_ids"], attention_mask=t["mask"]).last_hidden_state
        error = float(((single - plain).norm() / plain.norm()))
        meta = {"parameters": sum(p.numel() for p in model.parameters()), "pytorch_float32_rel_l2": error,
                "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}}
        if name == "plain":
            position = torch.arange(-511, 512)
            buckets = T5Attention._relative_position_bucket(position, bidirectional=True, num_buckets=32,
                                                            max_distance=128)
            meta["buckets"] = [int(b) for b in buckets]
        print(name, error)
        write(folder / "io.safetensors",
              {"in/input_ids": ids, "in/attention_mask": mask,
               "out/last_hidden_state": plain.numpy().astype(np.float32),
               "out/masked": masked.numpy().astype(np.float32)}, meta)
        for path in sorted(folder.iterdir()):
            if path.name != "io.safetensors":
                report(path)


if __name__ == "__main__":
    main()
