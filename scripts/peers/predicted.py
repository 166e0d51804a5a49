"""MaxDiffusion's SDXL and this program's for a TPU, compiled by the same libtpu: predicted milliseconds of a program.

Usage: python predicted.py FOLDER [--step denoise|train|decode] [--chip v5e|v5p|v6e] [--program target/release/maxdiff-rs]
                           [--only maxdiffusion|bf16|int8] [KEY=VALUE ...]

FOLDER is a checkout of MaxDiffusion (AI-Hypercomputer/maxdiffusion), whose `src` is imported. Needs jax, flax and libtpu
of requirements-predicted.txt; no TPU. 1024x1024, `attention=dot_product`, MaxDiffusion's default split of heads.
A denoising step of the UNet is for one chip: batch 2 (guidance), weights and activations in bfloat16. So is the VAE's
decoder, for one image (`examples/compile_decoder.rs` is built for it; not on a v5p, whose smallest topology has four chips).
A training step of the UNet is for a few chips (`TRAINING`) with weights and AdamW's state split over all of them: one image a
chip, weights in float32, activations in bfloat16, latents and text already encoded, no rematerialization on either side
unless a KEY=VALUE for this program says so. Each compiles in a process of its own, one after the other. Milliseconds are the sum of the `estimated_cycles` of the
optimized program, loops included, over the chip's clock, without waiting for collectives; this program adds the simulation of its kernels.
Prints a line of Markdown table for each.
"""

import argparse
import functools
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
# For training steps: libtpu's name, chips of a host, this program's name.
TRAINING = {"v5e": ("v5e:4x4", [2, 2, 1], "v5e-16"), "v5p": ("v5:2x2x1", [2, 2, 1], "v5p-8"),
            "v6e": ("v6e:2x4", [2, 4, 1], "v6e-8")}
# MaxDiffusion's `logical_axis_rules` of SDXL.
RULES = (("batch", "data"), ("activation_batch", ("data", "fsdp")), ("activation_heads", "tensor"),
         ("activation_kv", "tensor"), ("embed", "fsdp"), ("heads", "tensor"), ("conv_batch", ("data", "fsdp")),
         ("out_channels", "tensor"), ("conv_out", "fsdp"))
CASES = ("maxdiffusion", "bf16", "int8")


def described(part, named):
    """These fields of this repository's configuration of a part of SDXL, as Flax takes them."""
    config = json.loads((ROOT / f"src/models/sdxl/{part}.json").read_text())
    return {name: tuple(value) if isinstance(value := config[name], list) else value for name in named}


def unet(**fields):
    """MaxDiffusion's UNet with the configuration of this repository's SDXL."""
    import jax.numpy as jnp
    from maxdiffusion.models.unet_2d_condition_flax import FlaxUNet2DConditionModel

    named = ("attention_head_dim", "block_out_channels", "cross_attention_dim", "down_block_types", "up_block_types",
             "layers_per_block", "transformer_layers_per_block", "use_linear_projection", "addition_embed_type",
             "addition_time_embed_dim", "projection_class_embeddings_input_dim")
    fields |= described("unet", named)
    return FlaxUNet2DConditionModel(sample_size=SIDE, dtype=jnp.bfloat16, split_head_dim=True, **fields)


def on_one(chip):
    """What describes an array on one chip."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    name, config, _ = CHIPS[chip]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chip_config_name=config, chips_per_host_bounds=[1, 1, 1],
        num_slices=1, wrap=(False, False, False))
    device = SingleDeviceSharding(topology.devices[0])
    return lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=device)


def decoding(chip):
    """MaxDiffusion's decoder, lowered, and its number of parameters with the encoder's."""
    import jax
    import jax.numpy as jnp
    from maxdiffusion.models.vae_flax import FlaxAutoencoderKL

    on_device = on_one(chip)
    named = ("block_out_channels", "down_block_types", "up_block_types", "latent_channels", "layers_per_block", "scaling_factor")
    fields = described("vae", named)
    model = FlaxAutoencoderKL(sample_size=8 * SIDE, dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16, **fields)
    parameters = jax.eval_shape(lambda: model.init(jax.random.PRNGKey(0), jnp.zeros((1, 3, 64, 64), jnp.bfloat16))["params"])
    parameters = jax.tree.map(lambda leaf: on_device(leaf.shape, jnp.bfloat16), parameters)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))

    def decode(parameters, latents):
        return model.apply({"params": parameters}, latents / fields["scaling_factor"], method=model.decode).sample

    latents = on_device((1, 4, SIDE, SIDE), jnp.bfloat16)
    return jax.jit(decode).trace(parameters, latents).lower(lowering_platforms=("tpu",)), count


def denoising(chip):
    """The lowered step of MaxDiffusion, and its number of parameters."""
    import jax
    import jax.numpy as jnp

    on_device = on_one(chip)
    model = unet(weights_dtype=jnp.bfloat16)
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

    return jax.jit(step).trace(parameters, *arguments).lower(lowering_platforms=("tpu",)), count


def training(chip):
    """The lowered training step of MaxDiffusion's UNet, with what its trainer does around it, and its number of parameters."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy
    import optax
    from flax.linen import partitioning
    from flax.training.train_state import TrainState
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    name, host, _ = TRAINING[chip]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chip_config_name=CHIPS[chip][1], chips_per_host_bounds=host, num_slices=1)
    chips = len(topology.devices)
    mesh = Mesh(numpy.array(topology.devices).reshape(1, chips, 1, 1), ("data", "fsdp", "context", "tensor"))
    model = unet(weights_dtype=jnp.float32, mesh=mesh)
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())

    def of_all(*dims):
        return jax.ShapeDtypeStruct((chips, *dims), jnp.float32, sharding=split)

    batch = {"latents": of_all(4, SIDE, SIDE), "states": of_all(TOKENS, 2048), "pooled": of_all(1280)}
    time_ids = jnp.array([[8 * SIDE, 8 * SIDE, 0, 0, 8 * SIDE, 8 * SIDE]] * chips, jnp.float32)
    # `scaled_linear` of SDXL's scheduler.
    kept = jnp.cumprod(1 - jnp.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)

    def start():
        arguments = [jnp.zeros(batch["latents"].shape), jnp.zeros((chips,), jnp.int32), jnp.zeros(batch["states"].shape)]
        added = {"text_embeds": jnp.zeros(batch["pooled"].shape), "time_ids": time_ids}
        parameters = model.init(jax.random.PRNGKey(0), *arguments, added)["params"]
        return TrainState.create(apply_fn=model.apply, params=parameters, tx=optax.adamw(4e-7, weight_decay=1e-2))

    def step(state, batch, key):
        noise_key, timestep_key, key = jax.random.split(key, 3)

        def loss(parameters):
            noise = jax.random.normal(noise_key, batch["latents"].shape)
            timesteps = jax.random.randint(timestep_key, (chips,), 0, 1000)
            scale = kept[timesteps][:, None, None, None]
            noisy = jnp.sqrt(scale) * batch["latents"] + jnp.sqrt(1 - scale) * noise
            added = {"text_embeds": batch["pooled"], "time_ids": time_ids}
            predicted = state.apply_fn({"params": parameters}, noisy, timesteps, batch["states"], added, train=True).sample
            return jnp.mean((noise - predicted) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value, key

    with mesh, partitioning.axis_rules(RULES):
        abstract = jax.eval_shape(start)
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
        boxed = lambda leaf: isinstance(leaf, nn.spmd.LogicallyPartitioned)
        state = jax.tree.map(lambda leaf: leaf.unbox() if boxed(leaf) else leaf, abstract, is_leaf=boxed)
        count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        state = jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                             state, shardings)
        key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole)
        lowered = jax.jit(step, out_shardings=(shardings, None, None), donate_argnums=0).trace(state, batch, key).lower(
            lowering_platforms=("tpu",))
    return lowered, count


def estimated_cycles(text):
    """The cycles of an optimized program's operations, those of a loop as often as its body runs. Operations inside fusions have
    none of their own."""
    # Of each computation its operations by name; the one that it returns is also at "ROOT".
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?(%[\w.-]+) \(.*\{$", line):
            current = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
        elif current is not None and (found := re.match(r"\s+(ROOT )?(%[\w.-]+) = (.*)$", line)):
            current[found[2]] = found[3]
            if found[1]:
                current["ROOT"] = found[3]

    def called(operation, computation):
        if " while(" in operation:
            return [(re.search(r"body=(%[\w.-]+)", operation)[1], trips(operation, computation, computations))]
        names = re.findall(r"(?:calls|to_apply)=(%[\w.-]+)", operation)
        if branches := re.search(r"branch_computations=\{(.*?)\}", operation):
            names += branches[1].split(", ")
        return [(name, 1) for name in names]

    @functools.cache
    def total(name):
        computation = computations[name]
        operations = [operation for key, operation in computation.items() if key != "ROOT"]
        own = sum(int(cycles) for operation in operations for cycles in re.findall(r'"estimated_cycles":"(\d+)"', operation))
        return own + sum(count * total(of) for operation in operations for of, count in called(operation, computation))

    return total(entry)


def trips(loop, computation, computations):
    """How often the body of a loop runs, whose condition compares an element of what it carries with a constant, and whose body adds
    a constant to that element. Windowed products, which wait for weights of another chip in each trip, are such loops."""
    condition, body = (computations[re.search(rf"{name}=(%[\w.-]+)", loop)[1]] for name in ("condition", "body"))
    compared = operands(condition["ROOT"])
    element = re.search(r"index=(\d+)", constant_or_operation(condition, compared[0]))
    limit = constant_or_operation(condition, compared[1])
    if "direction=LT" not in condition["ROOT"] or not element or not isinstance(limit, int):
        sys.exit(f"the program does not tell how often a loop runs: {loop[:200]}")
    element = int(element[1])
    first = constant_or_operation(computation, operands(constant_or_operation(computation, operands(loop)[0]))[element])
    added = [constant_or_operation(body, name)
             for name in operands(constant_or_operation(body, operands(body["ROOT"])[element]))]
    steps = [step for step in added if isinstance(step, int)]
    if not isinstance(first, int) or len(steps) != 1:
        sys.exit(f"the program does not tell how often a loop runs: {loop[:200]}")
    return -(-(limit - first) // steps[0])


def operands(operation):
    """The names of an operation's operands."""
    return re.findall(r"%[\w.-]+", re.search(r"[\w-]\((.*?)\)(?:, |$)", re.sub(r"\{[^{}]*\}", "", operation))[1])


def constant_or_operation(computation, name):
    """The number if the operation of this name is a constant or copies one, else the operation, behind copies."""
    operation = computation[name]
    while re.search(r" copy\(", operation):
        operation = computation[operands(operation)[0]]
    found = re.search(r" constant\((\d+)\)", operation)
    return int(found[1]) if found else operation


def maxdiffusion(chip, step):
    lowered, count = {"denoise": denoising, "train": training, "decode": decoding}[step](chip)
    start = time.monotonic()
    compiled = lowered.compile()
    seconds = time.monotonic() - start
    cycles = estimated_cycles(compiled.as_text())
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {"parameters": count, "ms": cycles / CHIPS[chip][2] * 1e3, "seconds": seconds, "peak": peak}


def ours_decoding(program, chip, overrides):
    example = pathlib.Path(program).parent / "examples/compile_decoder"
    found = subprocess.run(
        [example, ROOT / "configs/base_xl.yml", f"compile_topology={TOPOLOGIES[chip]}", "weights_dtype=bfloat16", *overrides],
        stdout=subprocess.PIPE, text=True, check=True).stdout

    def told(line, unit):
        return float(re.search(rf"^ *{line} +([\d.]+) {unit}", found, re.MULTILINE)[1])

    unpredicted = re.search(r"not predicted: (\d+)", found)
    return {"parameters": int(re.search(r"parameters +([\d,]+)", found)[1].replace(",", "")), "ms": told("total", "ms"),
            "seconds": told("compile time", "s"), "unpredicted": int(unpredicted[1]) if unpredicted else 0,
            "peak": told("peak", "GiB") * 2**30}


def ours(program, chip, step, quantization, overrides):
    if step == "train":
        topology = TRAINING[chip][2]
        overrides = ["per_device_batch_size=1", "ici_fsdp_parallelism=-1", "ici_data_parallelism=1", *overrides]
    else:
        topology = TOPOLOGIES[chip]
        overrides = ["weights_dtype=bfloat16", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [program, "compile", ROOT / "configs/base_xl.yml", "--step", step, "--output", f"{folder}/compiled",
             f"compile_topology={topology}", f"quantization={quantization}", f"output_dir={folder}", "run_name=predicted",
             "--json", *overrides],
            stdout=subprocess.PIPE, check=True)
    report = json.loads(found.stdout)
    return {"parameters": report["parameters"], "ms": report["predicted_ms"]["total"],
            "seconds": report["compile_seconds"], "unpredicted": len(report["predicted_ms"]["unpredicted"]),
            "peak": report["memory"]["peak"]}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments.add_argument("--step", choices=("denoise", "train", "decode"), default="denoise")
    arguments.add_argument("--chip", choices=CHIPS, default="v5e")
    arguments.add_argument("--program", default=ROOT / "target/release/maxdiff-rs")
    arguments.add_argument("--only", action="append", choices=CASES)
    arguments.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    # Overrides may follow options.
    arguments = arguments.parse_intermixed_args()
    if arguments.alone == "maxdiffusion":
        sys.path.insert(0, str(arguments.folder.resolve() / "src"))
        print(json.dumps(maxdiffusion(arguments.chip, arguments.step)))
        return
    if arguments.alone:
        quantization = {"bf16": "", "int8": "int8"}[arguments.alone]
        found = (ours_decoding(arguments.program, arguments.chip, arguments.overrides) if arguments.step == "decode"
                 else ours(arguments.program, arguments.chip, arguments.step, quantization, arguments.overrides))
        print(json.dumps(found))
        return
    print("| | ms a step | over MaxDiffusion's | seconds to compile the step | processor seconds in all | no estimate "
          "| peak, GB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    environment = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_LOG_DIR="disabled",
                       TPU_MIN_LOG_LEVEL="3")
    peer = None
    # The decoder runs in bfloat16 whatever the denoiser is quantized to.
    cases = [name for name in arguments.only or CASES if (arguments.step, name) != ("decode", "int8")]
    for name in cases:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run(
            [sys.executable, __file__, arguments.folder, *arguments.overrides, "--program", arguments.program,
             "--chip", arguments.chip, "--step", arguments.step, "--alone", name],
            stdout=subprocess.PIPE, text=True, check=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result = json.loads(found.stdout.strip().splitlines()[-1])
        peer = result["ms"] if name == "maxdiffusion" else peer
        ratio = f"{result['ms'] / peer:.3f}" if peer else ""
        print(f"| {name} | {result['ms']:.1f} | {ratio} | {result['seconds']:.0f} | {processor:.0f} | "
              f"{result.get('unpredicted', '')} | {result['peak'] / 1e9:.1f} |", flush=True)


if __name__ == "__main__":
    main()
