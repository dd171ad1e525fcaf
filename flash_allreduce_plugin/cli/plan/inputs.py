"""From what the user typed to a Model, a Cluster and a Layout; every mistake is one sentence (ValueError)."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli.plan import presets as presets
from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Model
from flash_allreduce_plugin.config import strict_json

_SPEED = re.compile(r"([0-9.]+(?:e[+-]?\d+)?)\s*([kKMGTmgt]?)(bit|b|B|byte|bytes)(?:/s|ps)?")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
#: Model types of Hugging Face whose MLP has two matrices; those of the others are gated.
_PLAIN_MLP = ("gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2")


def positive(text: str, what: str, example: str) -> float:
    """A number such as 312e12, 312T or 8k."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([kKmMgGtT]?)", text.strip())
    try:
        value = float(match[1]) * _SCALE[match[2].lower()] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{what} {text}: expected a number above 0, such as {example}.")
    return value


def speed(text: str, what: str) -> float:
    """Bytes a second of 450GB/s, 400gbit, 100Gb/s: B is bytes, b and bit are bits."""
    match = _SPEED.fullmatch(text.strip())
    try:
        value = float(match[1]) * _SCALE[match[2].lower()] if match else 0.0
    except ValueError:
        value = 0.0
    if match is None or not 0 < value < math.inf:
        raise ValueError(
            f"{what} {text}: expected a speed such as 450GB/s (bytes) or 400gbit (bits), or one of "
            f"{', '.join(presets.LINKS)}."
        )
    return value if match[3] in ("B", "byte", "bytes") else value / 8


def nearest(name: str, known: Iterable[str], what: str) -> ValueError:
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return ValueError(f"{what} {name} is not known; the nearest is {close} (flash-allreduce plan --list has them all).")


def model_of(
    name: str | None,
    megatron: dict[str, Any] | None,
    numbers: dict[str, int | None],
    gated: bool,
    untied: bool,
    sequence: int | None,
) -> tuple[Model, str, str]:
    """The model, its name and its source. Numbers given one by one replace those of a preset or a file."""
    given = {key: value for key, value in numbers.items() if value is not None}
    if name is not None and megatron is not None:
        raise ValueError("--model and --megatron-args both describe the model; give one of them.")
    if megatron is not None:
        model, title, source = model_of_megatron(megatron), "the model of --megatron-args", "--megatron-args"
    elif name is None:
        missing = [f"--{key}" for key in ("layers", "hidden", "heads") if key not in given]
        if missing:
            raise ValueError(
                f"no model: expected --model NAME or config.json, --megatron-args, or {', '.join(missing)} too."
            )
        hidden = given["hidden"]
        model = Model(
            given["layers"], hidden, given["heads"], given.get("kv_heads", given["heads"]),
            given.get("ffn", 4 * hidden), given.get("vocabulary", 50304), 2048, gated=gated, tied=not untied,
        )  # fmt: skip
        title, source, given = "the model given", "the command line", {}
    elif name in presets.MODELS:
        preset = presets.MODELS[name]
        model, title, source = preset.model, name, preset.source
    elif name.endswith(".json") or os.path.exists(name):
        model, title, source = model_of_hf(Path(name)), name, "Hugging Face's config.json"
    else:
        raise nearest(name, presets.MODELS, "--model")
    model = replace(model, **given, gated=model.gated or gated, tied=model.tied and not untied)
    if sequence is not None:
        model = replace(model, sequence=sequence)
    return model, title, source


def model_of_hf(path: Path) -> Model:
    """From a config.json (or its folder): LLaMA's keys, or GPT-2's."""
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
    if c.get("num_local_experts") or c.get("n_routed_experts") or c.get("num_experts"):
        raise ValueError(f"--model {file}: a mixture of experts is not covered; expected a dense transformer.")

    def number(*keys: str, default: int | None = None) -> int:
        value = next((c[key] for key in keys if c.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"--model {file}: expected a whole number above 0 under {' or '.join(keys)}.")
        return value

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    kind = str(c.get("model_type", ""))
    longest = number("max_position_embeddings", "n_positions", default=2048)
    return Model(
        layers=number("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        ffn=number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocabulary=number("vocab_size"),
        sequence=min(4096, longest),
        gated=kind not in _PLAIN_MLP,
        tied=bool(c.get("tie_word_embeddings", kind in ("gpt2", "opt", "bloom"))),
        positions=longest if kind in ("gpt2", "opt") else 0,
        head_size=number("head_dim", default=hidden // heads),
    )


def megatron_arguments(text: str) -> dict[str, Any]:
    """{"num_layers": "32", "swiglu": True, ...} of a Megatron-LM command line; what is no flag is left out."""
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
    if a.get("num_experts"):
        raise ValueError("--megatron-args: --num-experts: a mixture of experts is not covered.")
    hidden, heads = megatron_number(a, "hidden_size"), megatron_number(a, "num_attention_heads")
    gated = "swiglu" in a
    ffn = int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden  # Megatron's own default
    sequence = megatron_number(a, "seq_length")
    return Model(
        layers=megatron_number(a, "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=megatron_number(a, "num_query_groups", 1) if "group_query_attention" in a else heads,
        ffn=megatron_number(a, "ffn_hidden_size", ffn),
        vocabulary=megatron_number(a, "vocab_size", 50304),
        sequence=sequence,
        gated=gated,
        tied="untie_embeddings_and_output_weights" not in a,
        positions=0
        if a.get("position_embedding_type") in ("rope", "none")
        else megatron_number(a, "max_position_embeddings", sequence),
        head_size=megatron_number(a, "kv_channels", hidden // heads if hidden >= heads else 1),
    )


def _link(text: str, what: str, share: float | None) -> tuple[float, str]:
    """Reached bytes a second, and where from. A speed given as a number is taken as reached."""
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
    codec: str | None = None,
    ranks_per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    adapters: int | None = None,
    link_efficiency: float | None = None,
    latency: float | None = None,
) -> tuple[Cluster, int | None]:
    """The cluster, and its number of ranks if the name says it: h100-8x16 is 16 nodes of 8 ranks.

    What is given replaces what the preset has.
    """
    base, ranks, nodes = _named(name)
    machine = presets.CLUSTERS.get(base) if base else None
    if machine is None and base != presets.CPU:
        needed = {"--peak-flops": peak_flops, "--ranks-per-node": ranks_per_node, "--intra": intra, "--inter": inter}
        missing = [flag for flag, value in needed.items() if value is None]
        if missing:
            raise ValueError(f"no cluster: expected --cluster NAME, or {', '.join(missing)} too.")
    per_node = ranks_per_node or ranks or (machine.ranks if machine else 1)
    if ranks and ranks_per_node and ranks != ranks_per_node:
        raise ValueError(f"--cluster {name} has {ranks} ranks a node, --ranks-per-node says {ranks_per_node}.")
    inside, inside_source = _link(intra or (machine.intra if machine else "pcie4"), "--intra", link_efficiency)
    wire, wire_source = _link(inter or (machine.inter if machine else "ethernet-1g"), "--inter", link_efficiency)
    cards = adapters or (min(machine.adapters, per_node) if machine and inter is None else per_node)
    sources = [inside_source] if per_node > 1 else []
    if nodes != 1:
        sources.append(f"{wire_source}; {cards} for the {per_node} ranks of a node" if per_node > 1 else wire_source)
    if base == presets.CPU:
        flops = positive(peak_flops, "--peak-flops", "1e12") * (efficiency or 1) if peak_flops else presets.CPU_FLOPS
        device = "one core of the machine of docs/benchmarks.md, measured; gloo"
        cluster = Cluster(
            name or "", flops, presets.CPU_CODEC, per_node, inside, wire * cards / per_node,
            latency or 0.0, latency or 0.0, presets.CPU_START, presets.CPU_TRANSPORT, "gloo",
            (f"device: {device}", *sources),
        )  # fmt: skip
    else:
        sheet = presets.DEVICES[machine.device] if machine else None
        peak = positive(peak_flops, "--peak-flops", "312e12") if peak_flops else sheet.peak_flops if sheet else 0.0
        share = presets.EFFICIENCY if efficiency is None else efficiency
        said = "given" if peak_flops or sheet is None else sheet.source
        sources.insert(0, f"arithmetic: {share:g} of {peak / 1e12:g} TFLOPS ({said})")
        moved = presets.CODEC * (sheet.copy.reached if sheet else presets.COPY * 1000e9)
        about = f"{presets.CODEC:g} of a copy's {sheet.copy.reached / 1e9:.0f} GB/s" if sheet else "of 1 TB/s, assumed"
        if codec:
            moved, about = speed(codec, "--codec"), "given"
        sources.insert(1, f"codec: {moved / 1e9:.0f} GB/s read and written ({about}); kernels not yet measured")
        pcie = "pcie" in (intra or (machine.intra if machine else ""))
        assumed = presets.LATENCY_PCIE if pcie else presets.LATENCY_NVLINK
        cluster = Cluster(
            name or "the cluster given", share * peak, moved, per_node, inside, wire * cards / per_node,
            assumed if latency is None else latency, presets.LATENCY_NODES if latency is None else latency,
            3 * presets.LAUNCH, sources=tuple(sources),
        )  # fmt: skip
    return cluster, per_node * nodes if nodes else None


def _named(name: str | None) -> tuple[str | None, int | None, int | None]:
    """(preset, ranks a node, nodes) of h100, h100-8x16."""
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
