"""The user's options as a Model, a Cluster and a Layout. Every mistake is one sentence (ValueError)."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Literal

from flash_allreduce_plugin.cli.plan import presets as presets
from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Model, Shares
from flash_allreduce_plugin.cli.plan.step_model import Layout
from flash_allreduce_plugin.config import strict_json

_SPEED = re.compile(r"([0-9.]+(?:e[+-]?\d+)?)\s*([kKMGTmgt]?)(bit|b|B|byte|bytes)(?:/s|ps)?")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Default bytes of a bucket: Megatron's 40 M fp32 elements, DeepSpeed's 500 M of bf16, DDP's 25 MiB.
_BUCKETS = {"megatron": 160_000_000, "deepspeed": 1_000_000_000, "torch": 25 << 20}
#: Model types of Hugging Face with two matrices in the MLP; others are gated.
_PLAIN_MLP = ("gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2")


def positive(text: str, what: str, example: str) -> float:
    """Return the value of 312e12, 312T or 8k."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([kKmMgGtT]?)", text.strip())
    return _scaled(match, ValueError(f"{what} {text}: expected a number above 0, such as {example}."))


def speed(text: str, what: str) -> float:
    """Return the bytes a second of 450GB/s, 400gbit, 100Gb/s: B is bytes, b and bit are bits."""
    match = _SPEED.fullmatch(text.strip())
    value = _scaled(
        match,
        ValueError(
            f"{what} {text}: expected a speed such as 450GB/s (bytes) or 400gbit (bits), or one of "
            f"{', '.join(presets.LINKS)}."
        ),
    )
    return value if match and match[3] in ("B", "byte", "bytes") else value / 8


def size(text: str, what: str) -> float:
    """Return the bytes of 80GB."""
    match = re.fullmatch(r"([0-9.]+)\s*([MGT])B", text.strip())
    return _scaled(match, ValueError(f"{what} {text}: expected a size such as 80GB."))


def _scaled(match: re.Match[str] | None, otherwise: ValueError) -> float:
    """Return the first group times the second, a unit such as G."""
    try:
        value = float(match[1]) * _SCALE[match[2].lower()] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise otherwise
    return value


def nearest(name: str, known: Iterable[str], what: str) -> ValueError:
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return ValueError(f"{what} {name} is not known; the nearest is {close} (flash-allreduce plan --list has them all).")


def model_of(
    name: str | None, megatron: dict[str, Any] | None, given: Mapping[str, Any] | None = None
) -> tuple[Model, str, str]:
    """Return the model, its name and its source. given: the values of --layout, which override a preset's."""
    given = given or {}
    if name is not None and megatron is not None:
        raise ValueError("--model and --megatron-args both describe the model; give one of them.")
    if megatron is not None:
        model, title, source = model_of_megatron(megatron), "the model of --megatron-args", "--megatron-args"
    elif name is None:
        return _model_of_numbers(given), "the model given", "--layout"
    elif name in presets.MODELS:
        preset = presets.MODELS[name]
        model, title, source = preset.model, name, preset.source
    elif name.endswith(".json") or os.path.exists(name):
        model, title, source = model_of_hf(Path(name)), name, "Hugging Face's config.json"
    else:
        raise nearest(name, presets.MODELS, "--model")
    return replace(model, **given), title, source


def _model_of_numbers(given: Mapping[str, Any]) -> Model:
    missing = [key for key in ("layers", "hidden", "heads") if key not in given]
    if missing:
        raise ValueError(
            "no model: expected --model NAME or config.json, --megatron-args, or --layout FILE with "
            f"{', '.join(missing)}."
        )
    defaults = {"kv_heads": given["heads"], "ffn": 4 * given["hidden"], "vocabulary": 50304, "sequence": 2048}
    return Model(**{**defaults, **given})


def model_of_hf(path: Path) -> Model:
    """Read a model from a config.json (or its folder), with LLaMA's or GPT-2's keys."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        c = strict_json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--model {file}: cannot be read ({error.strerror}); expected a config.json.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model {file}: expected a JSON object, the config.json of a model ({error}).") from None
    if isinstance(c, dict):
        c = c.get("text_config", c)
    if not isinstance(c, dict):
        raise ValueError(f"--model {file}: expected a JSON object, the config.json of a model.")
    if c.get("n_routed_experts") or c.get("shared_expert_intermediate_size"):
        raise ValueError(f"--model {file}: shared experts are not covered; expected equal ones or none.")

    def number(*keys: str, default: int | None = None) -> int:
        value = next((c[key] for key in keys if c.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"--model {file}: expected a whole number above 0 under {' or '.join(keys)}.")
        return value

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    kind = str(c.get("model_type", ""))
    longest = number("max_position_embeddings", "n_positions", default=2048)
    experts = number("num_local_experts", "num_experts") if c.get("num_local_experts") or c.get("num_experts") else 0
    ffn = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return Model(
        layers=number("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        ffn=number("moe_intermediate_size", default=ffn) if experts else ffn,
        vocabulary=number("vocab_size"),
        sequence=min(4096, longest),
        gated=kind not in _PLAIN_MLP,
        tied=bool(c.get("tie_word_embeddings", kind in ("gpt2", "opt", "bloom"))),
        positions=longest if kind in ("gpt2", "opt") else 0,
        head_size=number("head_dim", default=hidden // heads),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", default=1) if experts else 1,
    )


def megatron_arguments(text: str) -> dict[str, Any]:
    """Return {"num_layers": "32", "swiglu": True, ...} of a Megatron-LM command line. Other words are skipped."""
    try:
        words = shlex.split(text, comments=False)
    except ValueError as error:
        raise ValueError(f"--megatron-args: expected one quoted command line ({error}).") from None
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            found[key.replace("-", "_")] = value if equals else True if following.startswith("--") else following
    if not found:
        raise ValueError(
            '--megatron-args: expected Megatron-LM\'s flags, such as "--num-layers 32 --hidden-size 4096".'
        )
    return found


def megatron_number(arguments: dict[str, Any], key: str, default: int | None = None) -> int:
    value = arguments.get(key, default)
    try:
        number = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"--megatron-args: expected --{key.replace('_', '-')} with a whole number above 0.")
    return number


def model_of_megatron(a: dict[str, Any]) -> Model:
    for flag in ("moe_shared_expert_intermediate_size", "moe_layer_freq"):
        if flag in a:
            raise ValueError(f"--megatron-args: --{flag.replace('_', '-')} is not covered; expected equal layers.")
    experts = megatron_number(a, "num_experts") if "num_experts" in a else 0
    hidden, heads = megatron_number(a, "hidden_size"), megatron_number(a, "num_attention_heads")
    gated = "swiglu" in a
    ffn = int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden  # Megatron's own default
    sequence = megatron_number(a, "seq_length")
    return Model(
        layers=megatron_number(a, "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=megatron_number(a, "num_query_groups", 1) if "group_query_attention" in a else heads,
        ffn=megatron_number(a, "moe_ffn_hidden_size" if "moe_ffn_hidden_size" in a else "ffn_hidden_size", ffn),
        vocabulary=megatron_number(a, "vocab_size", 50304),
        sequence=sequence,
        gated=gated,
        tied="untie_embeddings_and_output_weights" not in a,
        positions=0
        if a.get("position_embedding_type") in ("rope", "none")
        else megatron_number(a, "max_position_embeddings", sequence),
        head_size=megatron_number(a, "kv_channels", hidden // heads if hidden >= heads else 1),
        experts=experts,
        experts_per_token=megatron_number(a, "moe_router_topk", 2) if experts else 1,
    )


def _link(text: str, what: str, share: float | None) -> tuple[float, str]:
    """Return the reached bytes a second, and their source. A speed given as a number counts as reached."""
    if text in presets.LINKS:
        known = presets.LINKS[text]
        if share is not None:
            return share * known.peak, f"{what}: {text}, {share:g} of {known.peak / 1e9:g} GB/s, given"
        return known.reached, f"{what}: {text}, {known.reached / 1e9:.4g} GB/s of {known.peak / 1e9:g}: {known.source}"
    value = speed(text, what) * (1.0 if share is None else share)
    return value, f"{what}: {value / 1e9:.4g} GB/s, given" + ("" if share is None else f" as {share:g} of {text}")


def cluster_of(
    name: str | None,
    *,
    peak_flops: str | None = None,
    efficiency: float | None = None,
    memory: str | None = None,
    codec: str | None = None,
    ranks_per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    adapters: int | None = None,
    link_efficiency: float | None = None,
    latency_us: float | None = None,
) -> tuple[Cluster, int | None]:
    """Return the cluster, and its number of ranks if the name has it: h100-8x16 is 16 nodes of 8 ranks.

    The keywords are keys of --layout, which override the preset.
    """
    base, ranks, nodes = _named(name)
    machine = presets.CLUSTERS.get(base) if base else None
    if machine is None and base != presets.CPU:
        needed = {"peak_flops": peak_flops, "ranks_per_node": ranks_per_node, "intra": intra, "inter": inter}
        missing = [key for key, value in needed.items() if value is None]
        if missing:
            raise ValueError(f"no cluster: expected --cluster NAME, or --layout FILE with {', '.join(missing)}.")
    if ranks and ranks_per_node and ranks != ranks_per_node:
        raise ValueError(f"--cluster {name} has {ranks} ranks a node, ranks_per_node is {ranks_per_node}.")
    per_node = ranks_per_node or ranks or (machine.ranks if machine else 1)
    inside, inside_source = _link(intra or (machine.intra if machine else "pcie4"), "intra", link_efficiency)
    wire, wire_source = _link(inter or (machine.inter if machine else "ethernet-1g"), "inter", link_efficiency)
    cards = adapters or (min(machine.adapters, per_node) if machine and inter is None else per_node)
    links = [inside_source] if per_node > 1 else []
    if nodes != 1:
        links.append(f"{wire_source}; {cards} for the {per_node} ranks of a node" if per_node > 1 else wire_source)
    latency = None if latency_us is None else latency_us * 1e-6
    if base == presets.CPU:
        cluster = _core(name, peak_flops, efficiency, latency)
    else:
        pcie = "pcie" in (intra or (machine.intra if machine else ""))
        cluster = _gpus(name, machine.device if machine else None, peak_flops, efficiency, codec, latency, pcie)
    bytes_ = size(memory, "memory") if memory else cluster.memory
    cluster = replace(
        cluster, ranks_per_node=per_node, intra=inside, inter=wire * cards / per_node, memory=bytes_,
        sources=(*cluster.sources, *links),
    )  # fmt: skip
    return cluster, per_node * nodes if nodes else None


def _core(name: str | None, peak_flops: str | None, efficiency: float | None, latency: float | None) -> Cluster:
    """Return one core over gloo, as measured, without links."""
    peak = positive(peak_flops, "peak_flops", "1e12") * (efficiency or 1) if peak_flops else presets.CPU_FLOPS
    return Cluster(
        name or "", peak, presets.CPU_CODEC, 1, 0.0, 0.0, latency or 0.0, latency or 0.0, presets.CPU_START,
        transport=presets.CPU_TRANSPORT, backend="gloo",
        sources=("device: one core of the machine of docs/decide/benchmarks.md, measured; gloo",),
    )  # fmt: skip


def _gpus(
    name: str | None,
    device: str | None,
    peak_flops: str | None,
    efficiency: float | None,
    codec: str | None,
    latency: float | None,
    pcie: bool,
) -> Cluster:
    """Return a GPU's arithmetic, codec and memory, without links."""
    sheet = presets.DEVICES[device] if device else None
    peak = positive(peak_flops, "peak_flops", "312e12") if peak_flops else sheet.peak_flops if sheet else 0.0
    share = presets.EFFICIENCY if efficiency is None else efficiency
    said = "given" if peak_flops or sheet is None else sheet.source
    moved = speed(codec, "codec") if codec else sheet.copy.reached if sheet else presets.COPY * 1000e9
    shares: Mapping[int, Shares] = {} if codec else sheet.shares if sheet else presets.UNKNOWN
    host = presets.host()
    sources = (
        f"arithmetic: {share:g} of {peak / 1e12:g} TFLOPS ({said})",
        f"codec: {moved / 1e9:.0f} GB/s read and written ({_codec_source(shares, sheet is not None)})",
        f"host: {1e6 * host[0]:.0f} us a quantized call, {1e6 * host[1]:.0f} us each chunk after the first: measured "
        f"without a GPU (docs/trust/cuda.md), plus {presets.LAUNCHES} launches of {1e6 * presets.LAUNCH:g} us, assumed",
    )
    near = presets.LATENCY_PCIE if pcie else presets.LATENCY_NVLINK
    return Cluster(
        name or "the cluster given", share * peak, moved, 1, 0.0, 0.0,
        near if latency is None else latency, presets.LATENCY_NODES if latency is None else latency,
        3 * presets.LAUNCH, host, sources=sources, memory=sheet.memory if sheet else math.inf, shares=shares,
    )  # fmt: skip


def _codec_source(shares: Mapping[int, Shares], known: bool) -> str:
    """Return the source of the codec's speed. shares: empty if the speed was given. known: True for a known GPU."""
    if not shares:
        return "given"
    copy = "a copy" if known else "a copy, assumed"
    slowest = ", ".join(f"{min(astuple(shares[bits])):.2f} at {bits} bits" for bits in (8, 4))
    return f"{copy}; the slowest kernel {slowest} of it: measured on an H100, and inferred from that for other GPUs"


def _named(name: str | None) -> tuple[str | None, int | None, int | None]:
    """Return (preset, ranks a node, nodes) of h100, h100-8x16."""
    if name is None:
        return None, None, None
    match = re.fullmatch(r"(.+?)-(\d+)x(\d+)", name)
    base = match[1] if match else name
    if base not in presets.CLUSTERS and base != presets.CPU:
        raise nearest(base, [*presets.CLUSTERS, presets.CPU], "--cluster")
    if not match:
        return base, None, None
    if not int(match[2]) or not int(match[3]):
        raise ValueError(f"--cluster {name}: expected ranks a node and nodes above 0, such as {base}-8x16.")
    return base, int(match[2]), int(match[3])


def layout_of(a: dict[str, Any], ranks: int | None, given: Mapping[str, Any]) -> Layout:
    """Return the layout: given values, else Megatron's arguments `a`, else the defaults; dp from the number of ranks.

    given: the flags, and keys of --layout.
    """
    tp = given.get("tp") or megatron_number(a, "tensor_model_parallel_size", 1)
    pp = given.get("pp") or megatron_number(a, "pipeline_model_parallel_size", 1)
    cp = given.get("cp") or megatron_number(a, "context_parallel_size", 1)
    zero = given.get("zero", 1 if "use_distributed_optimizer" in a else 0)
    framework = given.get("framework") or ("deepspeed" if zero >= 2 else "megatron")
    if framework not in _BUCKETS:
        raise ValueError(f"--framework {framework}: expected {', '.join(_BUCKETS)}.")
    plain = "bf16" if framework != "megatron" or "grad_reduce_in_bf16" in a else "fp32"
    itemsize = _ITEMSIZE[given.get("gradients", plain)]
    overlap = "overlap_grad_reduce" in a if a else framework != "deepspeed" or zero == 3
    layout = Layout(
        tp=tp,
        dp=_data_parallel(ranks, {"tp": tp, "pp": pp, **({"cp": cp} if cp > 1 else {})}, given.get("dp")),
        pp=pp,
        cp=cp,
        ep=given.get("ep") or megatron_number(a, "expert_model_parallel_size", 1),
        cp_comm_type=_cp_comm_type(a, given, framework),
        sequence_parallel=given.get("sequence_parallel", "sequence_parallel" in a),
        zero=zero,
        framework=framework,  # type: ignore[arg-type]
        micro_batch=given.get("micro_batch") or megatron_number(a, "micro_batch_size", 1),
        accumulation=1 if pp == 1 else 4 * pp,
        gradient_itemsize=itemsize,
        overlap=given.get("overlap", overlap),
        recompute=given.get("recompute", a.get("recompute_granularity") == "full"),
        bucket=_BUCKETS[framework] // itemsize,
    )
    batch = global_batch(a, given)
    return replace(layout, accumulation=accumulation(layout, batch)) if batch else layout


def _cp_comm_type(a: dict[str, Any], given: Mapping[str, Any], framework: str) -> Literal["a2a", "p2p"]:
    """Return the exchange of attention. Megatron's default is the ring; DeepSpeed's Ulysses exchanges heads."""
    found = given.get("cp_comm_type") or a.get("cp_comm_type") or ("p2p" if framework == "megatron" else "a2a")
    if found not in ("a2a", "p2p"):
        raise ValueError(f"--megatron-args: --cp-comm-type {found} is not covered; expected a2a or p2p.")
    if found == "p2p" and framework == "deepspeed":
        raise ValueError('"cp_comm_type": "p2p" is Megatron\'s; DeepSpeed\'s Ulysses is "a2a".')
    return "a2a" if found == "a2a" else "p2p"


def _data_parallel(ranks: int | None, others: Mapping[str, int], dp: int | None) -> int:
    """Return the data-parallel ranks. ranks: of the cluster; None: not known. others: other parallel sizes by flag."""
    if ranks is None:
        return dp or 1
    product = math.prod(others.values())
    said = " x ".join(f"--{flag} {count}" for flag, count in others.items())
    if dp is None and ranks % product:
        raise ValueError(f"{said} = {product} does not divide the {ranks} ranks of --cluster.")
    if dp is not None and dp * product != ranks:
        raise ValueError(f"{said} x --dp {dp} = {dp * product} is not the {ranks} ranks of --cluster; leave --dp out.")
    return ranks // product


def global_batch(a: dict[str, Any], given: Mapping[str, Any]) -> int | None:
    """Return the sequences of a step, or None if not given."""
    if "global_batch" in given:
        return int(given["global_batch"])
    return megatron_number(a, "global_batch_size") if "global_batch_size" in a else None


def accumulation(layout: Layout, batch: int) -> int:
    """Return the micro-batches of a rank in a step of `batch` sequences."""
    if batch % (layout.micro_batch * layout.dp):
        raise ValueError(
            f"--global-batch {batch} is not a multiple of --micro-batch {layout.micro_batch} x --dp {layout.dp}; "
            "choose one that is."
        )
    return batch // (layout.micro_batch * layout.dp)


def whole_numbers(flag: str, text: str, low: int, high: int, example: str) -> list[int]:
    """Return the numbers of "8,6,4": all different, from low to high."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(low <= number <= high for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{flag} {text}: expected different whole numbers from {low} to {high} with commas between, like {example}."
        )
    return numbers
