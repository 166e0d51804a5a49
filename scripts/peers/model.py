"""`UNet2DConditionModel` and the CLIP text encoder in plain JAX, with the parameter paths of their checkpoints.

Activations are NHWC, kernels HWIO and dense weights [in, out]: the layouts XLA takes as they are.
`test_model.py` compares both with the recorded outputs and gradients of diffusers and transformers.
"""

import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

UNET_DEFAULTS = dict(
    in_channels=4, out_channels=4, flip_sin_to_cos=True, freq_shift=0,
    down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    block_out_channels=[320, 640, 1280, 1280], layers_per_block=2, norm_num_groups=32, norm_eps=1e-5,
    cross_attention_dim=1280, transformer_layers_per_block=1, attention_head_dim=8, use_linear_projection=False,
    addition_embed_type=None, addition_time_embed_dim=None, resnet_time_scale_shift="default",
)
CLIP_DEFAULTS = dict(
    vocab_size=49408, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
    max_position_embeddings=77, hidden_act="quick_gelu", layer_norm_eps=1e-5, eos_token_id=49407, architectures=None,
)
ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


class Params:
    """Weights by checkpoint key. With a PRNG key, a missing weight is made (as PyTorch would); without one it is an error.

    A weight is cast to the activations' dtype where it is used.
    """

    def __init__(self, weights: dict, key=None):
        self.weights, self.key = weights, key

    def get(self, name, shape, fan_in=None, value=None):
        if name not in self.weights:
            if self.key is None:
                raise KeyError(f"no weight {name}")
            if value is not None:
                self.weights[name] = jnp.full(shape, value, jnp.float32)
            else:
                key = jax.random.fold_in(self.key, len(self.weights))
                bound = 1.0 / math.sqrt(fan_in)
                self.weights[name] = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        if self.weights[name].shape != tuple(shape):
            raise ValueError(f"{name}: shape {self.weights[name].shape}, expected {tuple(shape)}")
        return self.weights[name]

    def linear(self, name, x, features, bias=True):
        y = x @ self.get(f"{name}.weight", (x.shape[-1], features), x.shape[-1]).astype(x.dtype)
        return y + self.get(f"{name}.bias", (features,), x.shape[-1]).astype(x.dtype) if bias else y

    def conv(self, name, x, features, kernel=3, stride=1):
        fan_in, pad = kernel * kernel * x.shape[-1], kernel // 2
        w = self.get(f"{name}.weight", (kernel, kernel, x.shape[-1], features), fan_in).astype(x.dtype)
        if kernel == 1:  # the same number as a matrix product, which XLA's CPU backend runs faster
            y = x @ w[0, 0]
        else:
            y = lax.conv_general_dilated(x, w, (stride, stride), [(pad, pad)] * 2,
                                         dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y + self.get(f"{name}.bias", (features,), fan_in).astype(x.dtype)

    def affine(self, name, y):
        features = y.shape[-1]
        return y * self.get(f"{name}.weight", (features,), value=1.0) + self.get(f"{name}.bias", (features,), value=0.0)

    def layer_norm(self, name, x, eps):
        y = x.astype(jnp.float32)
        mean = y.mean(-1, keepdims=True)
        variance = jnp.square(y - mean).mean(-1, keepdims=True)
        return self.affine(name, (y - mean) * lax.rsqrt(variance + eps)).astype(x.dtype)

    def group_norm(self, name, x, groups, eps):
        y = x.astype(jnp.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
        mean = y.mean((1, 3), keepdims=True)
        variance = jnp.square(y - mean).mean((1, 3), keepdims=True)
        return self.affine(name, ((y - mean) * lax.rsqrt(variance + eps)).reshape(x.shape)).astype(x.dtype)


def attention(q, k, v, heads, mask=None):
    """Softmax in float32, operands and results [batch, length, heads * head size]."""
    split = lambda x: x.reshape(*x.shape[:2], heads, -1)
    q, k, v = split(q), split(k), split(v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    return out.reshape(*out.shape[:2], -1)


# --- UNet ------------------------------------------------------------------------------------------------------------


def timestep_embedding(t, size, flip_sin_to_cos, freq_shift):
    half = size // 2
    frequency = jnp.exp(-math.log(10000) * jnp.arange(half, dtype=jnp.float32) / (half - freq_shift))
    angle = t.astype(jnp.float32)[:, None] * frequency
    parts = [jnp.cos(angle), jnp.sin(angle)] if flip_sin_to_cos else [jnp.sin(angle), jnp.cos(angle)]
    return jnp.concatenate(parts, -1)


def embedding_mlp(p, name, x, features):
    return p.linear(f"{name}.linear_2", jax.nn.silu(p.linear(f"{name}.linear_1", x, features)), features)


def resnet(p, name, x, temb, features, c):
    h = p.conv(f"{name}.conv1", jax.nn.silu(p.group_norm(f"{name}.norm1", x, c["norm_num_groups"], c["norm_eps"])), features)
    norm2 = lambda y: p.group_norm(f"{name}.norm2", y, c["norm_num_groups"], c["norm_eps"])
    time = lambda width: p.linear(f"{name}.time_emb_proj", temb, width)[:, None, None, :]
    if c["resnet_time_scale_shift"] == "scale_shift":
        scale, shift = jnp.split(time(2 * features), 2, -1)
        h = norm2(h) * (1 + scale) + shift
    else:
        h = norm2(h + time(features))
    h = p.conv(f"{name}.conv2", jax.nn.silu(h), features)
    return h + (x if x.shape[-1] == features else p.conv(f"{name}.conv_shortcut", x, features, kernel=1))


def cross_attention(p, name, x, context, heads):
    width = x.shape[-1]
    q = p.linear(f"{name}.to_q", x, width, bias=False)
    k = p.linear(f"{name}.to_k", context, width, bias=False)
    v = p.linear(f"{name}.to_v", context, width, bias=False)
    return p.linear(f"{name}.to_out.0", attention(q, k, v, heads), width)


def transformer(p, name, x, context, heads, layers, c):
    b, h, w, width = x.shape
    y = p.group_norm(f"{name}.norm", x, c["norm_num_groups"], 1e-6)
    project = (lambda k, y: p.linear(k, y, width)) if c["use_linear_projection"] else \
              (lambda k, y: p.conv(k, y.reshape(b, h, w, width), width, kernel=1).reshape(b, h * w, width))
    y = project(f"{name}.proj_in", y.reshape(b, h * w, width))
    for i in range(layers):
        block = f"{name}.transformer_blocks.{i}"
        n = p.layer_norm(f"{block}.norm1", y, 1e-5)
        y = y + cross_attention(p, f"{block}.attn1", n, n, heads)
        n = p.layer_norm(f"{block}.norm2", y, 1e-5)
        y = y + cross_attention(p, f"{block}.attn2", n, context, heads)
        value, gate = jnp.split(p.linear(f"{block}.ff.net.0.proj", p.layer_norm(f"{block}.norm3", y, 1e-5), 8 * width), 2, -1)
        y = y + p.linear(f"{block}.ff.net.2", value * jax.nn.gelu(gate, approximate=False), width)
    return x + project(f"{name}.proj_out", y).reshape(x.shape)


def unet(p, config, sample, timestep, context, text_embeds=None, time_ids=None):
    """`sample` NHWC, `timestep` [batch], `context` [batch, tokens, width]; the prediction, NHWC."""
    c = UNET_DEFAULTS | {k: v for k, v in config.items() if v is not None}
    widths, depth = c["block_out_channels"], len(c["block_out_channels"])
    per_block = lambda v: list(v) if isinstance(v, (list, tuple)) else [v] * depth
    heads, layers, resnets = (per_block(c[k]) for k in ("attention_head_dim", "transformer_layers_per_block", "layers_per_block"))
    dtype, temb_width = sample.dtype, 4 * widths[0]
    sinusoid = functools.partial(timestep_embedding, flip_sin_to_cos=c["flip_sin_to_cos"], freq_shift=c["freq_shift"])
    temb = embedding_mlp(p, "time_embedding", sinusoid(timestep, widths[0]).astype(dtype), temb_width)
    if c["addition_embed_type"] == "text_time":
        ids = sinusoid(time_ids.reshape(-1), c["addition_time_embed_dim"]).reshape(sample.shape[0], -1)
        added = jnp.concatenate([text_embeds, ids.astype(dtype)], -1)
        temb = temb + embedding_mlp(p, "add_embedding", added, temb_width)
    elif c["addition_embed_type"] is not None:
        raise ValueError(f"addition_embed_type {c['addition_embed_type']} is not supported")
    temb = jax.nn.silu(temb)
    x = p.conv("conv_in", sample, widths[0])
    skips = [x]
    for i, kind in enumerate(c["down_block_types"]):
        for j in range(resnets[i]):
            x = resnet(p, f"down_blocks.{i}.resnets.{j}", x, temb, widths[i], c)
            if kind == "CrossAttnDownBlock2D":
                x = transformer(p, f"down_blocks.{i}.attentions.{j}", x, context, heads[i], layers[i], c)
            skips.append(x)
        if i + 1 < depth:
            x = p.conv(f"down_blocks.{i}.downsamplers.0.conv", x, widths[i], stride=2)
            skips.append(x)
    x = resnet(p, "mid_block.resnets.0", x, temb, widths[-1], c)
    x = transformer(p, "mid_block.attentions.0", x, context, heads[-1], layers[-1], c)
    x = resnet(p, "mid_block.resnets.1", x, temb, widths[-1], c)
    for i, kind in enumerate(c["up_block_types"]):
        level = depth - 1 - i
        for j in range(resnets[level] + 1):
            x = resnet(p, f"up_blocks.{i}.resnets.{j}", jnp.concatenate([x, skips.pop()], -1), temb, widths[level], c)
            if kind == "CrossAttnUpBlock2D":
                x = transformer(p, f"up_blocks.{i}.attentions.{j}", x, context, heads[level], layers[level], c)
        if i + 1 < depth:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = p.conv(f"up_blocks.{i}.upsamplers.0.conv", x, widths[level])
    x = jax.nn.silu(p.group_norm("conv_norm_out", x, c["norm_num_groups"], c["norm_eps"]))
    return p.conv("conv_out", x, c["out_channels"])


# --- CLIP text encoder -----------------------------------------------------------------------------------------------


def clip_text(p, config, ids, dtype=jnp.float32):
    """`last_hidden_state` [batch, tokens, width], and `text_embeds` [batch, projection_dim] where there is a projection:
    that of the state at the first `eos_token_id`."""
    c = CLIP_DEFAULTS | {k: v for k, v in config.items() if v is not None}
    width, length, eps = c["hidden_size"], ids.shape[1], c["layer_norm_eps"]
    act = ACTIVATIONS[c["hidden_act"]]
    tokens = p.get("text_model.embeddings.token_embedding.weight", (c["vocab_size"], width), width)
    positions = p.get("text_model.embeddings.position_embedding.weight", (c["max_position_embeddings"], width), width)
    x = (jnp.take(tokens, ids, axis=0) + positions[:length]).astype(dtype)
    causal = jnp.tril(jnp.ones((length, length), bool))
    for i in range(c["num_hidden_layers"]):
        layer = f"text_model.encoder.layers.{i}"
        n = p.layer_norm(f"{layer}.layer_norm1", x, eps)
        q, k, v = (p.linear(f"{layer}.self_attn.{k}_proj", n, width) for k in "qkv")
        x = x + p.linear(f"{layer}.self_attn.out_proj", attention(q, k, v, c["num_attention_heads"], causal), width)
        n = p.layer_norm(f"{layer}.layer_norm2", x, eps)
        x = x + p.linear(f"{layer}.mlp.fc2", act(p.linear(f"{layer}.mlp.fc1", n, c["intermediate_size"])), width)
    x = p.layer_norm("text_model.final_layer_norm", x, eps)
    if "CLIPTextModelWithProjection" not in (c["architectures"] or ()):
        return x, None
    pooled = jnp.take_along_axis(x, jnp.argmax(ids == c["eos_token_id"], axis=1)[:, None, None], axis=1)[:, 0]
    return x, p.linear("text_projection", pooled, c["projection_dim"], bias=False)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def from_pytorch(name: str, value: np.ndarray) -> np.ndarray:
    """A weight of a checkpoint in this file's layout."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value if value.ndim != 2 or "embeddings." in name else value.T


def load(folder: pathlib.Path) -> tuple[dict, dict]:
    """Configuration and weights of a diffusers or transformers folder, sharded or not."""
    from safetensors.numpy import load_file

    files = [f for f in sorted(folder.glob("*.safetensors")) if f.name != "io.safetensors"]
    weights = {k: from_pytorch(k, v) for f in files for k, v in load_file(f).items()}
    return json.loads((folder / "config.json").read_text()), {k: jnp.asarray(v) for k, v in weights.items()}
