"""A GGUF file with a tensor of each type that is read, the floats that the gguf package makes of it, and T5's names.

gguf needs packages of its own (requirements-formats.txt). tests/golden/gguf/blocks.gguf is written by gguf's writer; what
it quantizes itself are random weights, the blocks of the K types are random bytes with small scales. Names in blocks.safetensors:
out/<tensor>. names.json: the names of a T5 encoder's tensors in transformers, and in llama.cpp's files.
"""

import json

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from common import GOLDEN, normal, rng, write

FOLDER = GOLDEN / "gguf"
ROWS, COLUMNS = 3, 512
QUANTIZED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
# Where a block has its scales in f16.
K_TYPES = {Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208]}


def weight(name: str) -> np.ndarray:
    w = normal(rng("gguf", name), (ROWS, COLUMNS), scale=0.3)
    w[1, :64] = 0
    w[2] += 0.7
    return w


def random_blocks(kind: Type, halves: list[int]) -> np.ndarray:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    gen = rng("gguf", kind.name)
    blocks = gen.integers(0, 256, (ROWS * COLUMNS // elements, size), dtype=np.uint8)
    for at in halves:
        scales = (gen.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, -1)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "blocks.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    data = {}
    for kind in QUANTIZED:
        data[f"{kind.name.lower()}.weight"] = (gguf.quantize(weight(kind.name), kind), kind)
    for kind, halves in K_TYPES.items():
        data[f"{kind.name.lower()}.weight"] = (random_blocks(kind, halves), kind)
    data["bf16.weight"] = (gguf.quantize(weight("BF16"), Type.BF16), Type.BF16)
    data["f16.weight"] = (weight("F16").astype(np.float16), Type.F16)
    data["f32.bias"] = (weight("F32")[0, :5], Type.F32)
    # A kernel whose rows no block divides, cut into rows of 256 as ComfyUI-GGUF does it.
    kernel = normal(rng("gguf", "kernel"), (8, 32, 3, 3))
    data["kernel.weight"] = (gguf.quantize(kernel.reshape(-1, 256), Type.Q8_0), Type.Q8_0)
    writer.add_array("comfy.gguf.orig_shape.kernel.weight", kernel.shape)
    for name, (values, kind) in data.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    floats = {f"out/{name}": gguf.dequantize(values, kind).astype(np.float32) for name, (values, kind) in data.items()}
    floats["out/kernel.weight"] = floats["out/kernel.weight"].reshape(kernel.shape)
    # The weights that the package quantized, for the other way.
    floats |= {f"in/{kind.name.lower()}.weight": weight(kind.name) for kind in (Type.Q4_0, Type.Q4_1, Type.Q8_0)}
    write(FOLDER / "blocks.safetensors", floats, {"versions": {"gguf": "0.17.1"}})

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 2)
    block = ["layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v", "layer.0.SelfAttention.o",
             "layer.0.layer_norm", "layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1", "layer.1.DenseReluDense.wo",
             "layer.1.layer_norm"]
    keys = ["shared", "encoder.final_layer_norm", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"]
    keys += [f"encoder.block.{i}.{leaf}" for i in range(2) for leaf in block]
    pairs = {f"{key}.weight": names.get_name(f"{key}.weight", try_suffixes=(".weight",)) for key in keys}
    (FOLDER / "names.json").write_text(json.dumps(pairs, indent=1) + "\n")


def save(path, architecture: str, tensors: dict, kind: Type) -> None:
    """A model with matrices in `kind` where blocks divide their rows, and all else in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, values in tensors.items():
        elements, _ = gguf.GGML_QUANT_SIZES[kind]
        blocks = values.ndim == 2 and values.shape[1] % elements == 0
        kept = kind if blocks else Type.F32
        writer.add_tensor(name, gguf.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def flux_names(tensors: dict) -> dict:
    """A transformer of diffusers by the names of Black Forest Labs' code, as ComfyUI-GGUF writes them."""
    fixed = {"x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear",
             "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
             "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
             "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
             "time_text_embed.text_embedder.linear_2": "vector_in.out_layer"}
    double = {"img_mod.lin": "norm1.linear", "txt_mod.lin": "norm1_context.linear", "img_attn.proj": "attn.to_out.0",
              "txt_attn.proj": "attn.to_add_out", "img_mlp.0": "ff.net.0.proj", "img_mlp.2": "ff.net.2",
              "txt_mlp.0": "ff_context.net.0.proj", "txt_mlp.2": "ff_context.net.2"}
    scales = {"img_attn.norm.query_norm": "attn.norm_q", "img_attn.norm.key_norm": "attn.norm_k",
              "txt_attn.norm.query_norm": "attn.norm_added_q", "txt_attn.norm.key_norm": "attn.norm_added_k"}
    new = {}
    both = ("weight", "bias")
    for old, name in fixed.items():
        new |= {f"{name}.{leaf}": tensors[f"{old}.{leaf}"] for leaf in both}
    for leaf in both:
        scale, shift = np.split(tensors[f"norm_out.linear.{leaf}"], 2)
        new[f"final_layer.adaLN_modulation.1.{leaf}"] = np.concatenate([shift, scale])
    count = lambda kind: len({k.split(".")[1] for k in tensors if k.startswith(f"{kind}.")})
    fuse = lambda names: np.concatenate([tensors[name] for name in names])
    for i in range(count("transformer_blocks")):
        old, name = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for leaf in both:
            new |= {f"{name}.{a}.{leaf}": tensors[f"{old}.{b}.{leaf}"] for a, b in double.items()}
            for kind, parts in {"img": "to_q to_k to_v", "txt": "add_q_proj add_k_proj add_v_proj"}.items():
                new[f"{name}.{kind}_attn.qkv.{leaf}"] = fuse(f"{old}.attn.{part}.{leaf}" for part in parts.split())
        new |= {f"{name}.{a}.scale": tensors[f"{old}.{b}.weight"] for a, b in scales.items()}
    for i in range(count("single_transformer_blocks")):
        old, name = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        for leaf in both:
            new[f"{name}.modulation.lin.{leaf}"] = tensors[f"{old}.norm.linear.{leaf}"]
            new[f"{name}.linear2.{leaf}"] = tensors[f"{old}.proj_out.{leaf}"]
            parts = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
            new[f"{name}.linear1.{leaf}"] = fuse(f"{old}.{part}.{leaf}" for part in parts)
        for a, b in {"query": "q", "key": "k"}.items():
            new[f"{name}.norm.{a}_norm.scale"] = tensors[f"{old}.attn.norm_{b}.weight"]
    return new


def models() -> None:
    """The tiny FLUX.1 schnell in Q8_0, and its T5 by llama.cpp's names, whose map is names.json."""
    folder = GOLDEN / "pipeline_flux_schnell" / "transformer"
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    save(FOLDER / "flux-schnell.gguf", "flux", flux_names(tensors), Type.Q8_0)
    tensors = load_file(GOLDEN / "pipeline_flux_dev" / "text_encoder_2" / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 8)
    renamed = {names.get_name(k, try_suffixes=(".weight",)): v for k, v in tensors.items() if k != "encoder.embed_tokens.weight"}
    save(FOLDER / "t5.gguf", "t5encoder", renamed, Type.Q8_0)


if __name__ == "__main__":
    main()
    models()
