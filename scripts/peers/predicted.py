"""MaxDiffusion's SDXL UNet and this program's for one TPU, compiled by the same libtpu: predicted milliseconds a step.

Usage: python predicted.py FOLDER [--chip v5e|v5p|v6e] [--program target/release/maxdiff-rs]
                           [--only maxdiffusion|bf16|int8]

FOLDER is a checkout of MaxDiffusion (AI-Hypercomputer/maxdiffusion), whose `src` is imported. Needs jax, flax and libtpu
of requirements-predicted.txt; no TPU. 1024x1024, batch 2 (guidance), weights and activations in bfloat16,
`attention=dot_product`, MaxDiffusion's default split of heads. Each compiles in a process of its own, one after the
other. Milliseconds are the sum of the `estimated_cycles` of the optimized program over the chip's clock; this program
adds the simulation of its kernels. Prints a line of Markdown table for each.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of one chip: the topology and the configuration as libtpu names them, and the clock, as in src/topology.
CHIPS = {"v5e": ("v5e:1x1", "default", 1.5e9), "v5p": ("v5:1x1x1", "megacore", 1.75e9),
         "v6e": ("v6e:1x1", "default", 1.75e9)}
BATCH, SIDE, TOKENS = 2, 128, 77
# The same as `compile_topology`. The smallest of v5p has four chips, of which each computes an image and its guidance.
TOPOLOGIES = {"v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1"}
CASES = ("maxdiffusion", "bf16", "int8")


def unet():
    """MaxDiffusion's UNet with the configuration of this repository's SDXL."""
    import jax.numpy as jnp
    from maxdiffusion.models.unet_2d_condition_flax import FlaxUNet2DConditionModel

    config = json.loads((ROOT / "src/models/sdxl/unet.json").read_text())
    named = ("attention_head_dim", "block_out_channels", "cross_attention_dim", "down_block_types", "up_block_types",
             "layers_per_block", "transformer_layers_per_block", "use_linear_projection", "addition_embed_type",
             "addition_time_embed_dim", "projection_class_embeddings_input_dim")
    fields = {name: tuple(value) if isinstance(value := config[name], list) else value for name in named}
    return FlaxUNet2DConditionModel(sample_size=SIDE, dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16, split_head_dim=True,
                                    **fields)


def maxdiffusion(chip):
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    name, config, clock = CHIPS[chip]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chip_config_name=config, chips_per_host_bounds=[1, 1, 1],
        num_slices=1, wrap=(False, False, False))
    model = unet()
    device = SingleDeviceSharding(topology.devices[0])

    def on_device(dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=device)

    sample = on_device((BATCH, 4, SIDE, SIDE), jnp.bfloat16)
    timesteps = on_device((BATCH,), jnp.int32)
    states = on_device((BATCH, TOKENS, 2048), jnp.bfloat16)
    added = {"text_embeds": on_device((BATCH, 1280), jnp.bfloat16), "time_ids": on_device((BATCH, 6), jnp.bfloat16)}
    arguments = (sample, timesteps, states, added)
    parameters = jax.eval_shape(lambda: model.init(jax.random.PRNGKey(0), *(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arguments)))["params"])
    # Boxed with the names of logical axes, which one device does not need.
    leaves, tree = jax.tree.flatten(jax.tree.map(
        lambda leaf: getattr(leaf, "value", leaf), parameters, is_leaf=lambda leaf: hasattr(leaf, "value")))
    count = sum(leaf.size for leaf in leaves)
    parameters = jax.tree.unflatten(tree, [on_device(leaf.shape, jnp.bfloat16) for leaf in leaves])

    def step(parameters, *arguments):
        return model.apply({"params": parameters}, *arguments).sample

    lowered = jax.jit(step).trace(parameters, *arguments).lower(lowering_platforms=("tpu",))
    start = time.monotonic()
    compiled = lowered.compile()
    seconds = time.monotonic() - start
    text = compiled.as_text()
    if " while(" in text:
        sys.exit("the program has loops, whose bodies would count once")
    # Operations inside fusions have no cycles of their own.
    cycles = sum(int(found) for found in re.findall(r'"estimated_cycles":"(\d+)"', text))
    return {"parameters": count, "ms": cycles / clock * 1e3, "seconds": seconds}


def ours(program, chip, quantization):
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [program, "compile", ROOT / "configs/base_xl.yml", f"compile_topology={TOPOLOGIES[chip]}", "weights_dtype=bfloat16",
             f"quantization={quantization}", f"output_dir={folder}", "run_name=predicted", "--json"],
            stdout=subprocess.PIPE, check=True)
    report = json.loads(found.stdout)
    return {"parameters": report["parameters"], "ms": report["predicted_ms"]["total"],
            "seconds": report["compile_seconds"], "unpredicted": len(report["predicted_ms"]["unpredicted"])}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--chip", choices=CHIPS, default="v5e")
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--only", action="append", choices=CASES)
    arguments.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    arguments = arguments.parse_args()
    if arguments.alone == "maxdiffusion":
        sys.path.insert(0, str(arguments.folder.resolve() / "src"))
        print(json.dumps(maxdiffusion(arguments.chip)))
        return
    if arguments.alone:
        print(json.dumps(ours(arguments.program, arguments.chip, {"bf16": "", "int8": "int8"}[arguments.alone])))
        return
    print("| | ms a step | over MaxDiffusion's | seconds to compile the step | processor seconds in all | no estimate |")
    print("|---|---|---|---|---|---|", flush=True)
    environment = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_LOG_DIR="disabled",
                       TPU_MIN_LOG_LEVEL="3")
    peer = None
    for name in arguments.only or CASES:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run(
            [sys.executable, __file__, arguments.folder, "--program", arguments.program, "--chip", arguments.chip,
             "--alone", name],
            stdout=subprocess.PIPE, text=True, check=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result = json.loads(found.stdout.strip().splitlines()[-1])
        peer = result["ms"] if name == "maxdiffusion" else peer
        ratio = f"{result['ms'] / peer:.3f}" if peer else ""
        print(f"| {name} | {result['ms']:.1f} | {ratio} | {result['seconds']:.0f} | {processor:.0f} | "
              f"{result.get('unpredicted', '')} |", flush=True)


if __name__ == "__main__":
    main()
