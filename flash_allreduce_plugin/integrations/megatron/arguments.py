"""Megatron-LM's launch flags: `--flash-allreduce` and one flag for each field of FlashConfig.

    torchrun pretrain_gpt.py ... --flash-allreduce --flash-allreduce-bits 8 --flash-allreduce-backward-bits 8

`attach` wraps two functions of Megatron-LM's training package: the one that fills the argument parser, and
`set_args`, through which every rank passes with its final arguments before anything is built. A mistake is refused
there, on every rank, with the ConfigError that Python users get.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from flash_allreduce_plugin import autoload, environment
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.fields import GROUPS
from flash_allreduce_plugin.config.refusals import by_hand, for_megatron, without
from flash_allreduce_plugin.config.wording import printable, variable
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import scopes
from flash_allreduce_plugin.integrations.megatron.refusals import (
    OTHER_GRADIENTS,
    nothing_to_quantize,
    of_attention,
    of_experts,
    of_fields,
    of_parameters,
    of_pipeline,
    of_ring_exchange,
    only_tensor_parallel,
    other_buffers,
    refusals,
)
from flash_allreduce_plugin.integrations.megatron.scopes import SWITCH, flag
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from flash_allreduce_plugin.telemetry import counters, notices
from flash_allreduce_plugin.telemetry.report import sends

FILE = "--flash-allreduce-config"
_ABOUT = (
    f"Quantized collectives of flash_allreduce_plugin. {SWITCH} turns them on; a setting comes from its flag, else "
    f"from {FILE}, else from the environment (FLASH_ALLREDUCE_BITS and so on), else from the preset, else it is the "
    "default."
)

started = False  # `start` has enabled the seams


def attach() -> None:
    """Wrap Megatron-LM's functions; nothing happens to a training that does not use the flags.

    Raises PatchError, changing nothing, if they are not as this version knows them.
    """
    _patchset().apply()


def detach() -> None:
    """Put Megatron-LM's own functions back."""
    _patchset().restore()


@functools.cache
def _patchset() -> Patchset:
    seams = [
        Seam(
            "megatron.launch.flags",
            "megatron.training.arguments",
            "add_megatron_arguments",  # parse_args looks it up in its module
            ("parser",),
            _with_flags,
            "adds the flags to Megatron-LM's argument parser",
        ),
        Seam(
            "megatron.launch.start",
            "megatron.training.global_vars",
            "set_args",  # the same for set_global_variables; validate_args is bound elsewhere already
            ("args",),
            _with_start,
            "reads the flags and enables the seams, on every rank",
        ),
    ]
    return Patchset("megatron launch flags", seams, "Megatron-LM core_v0.13 to core_v0.19")


def _with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return with_nearest(add_arguments(original(parser)))

    return add_megatron_arguments


def _with_start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_args(args: argparse.Namespace) -> None:
        start(args)
        original(args)

    return set_args


def with_nearest(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`parser`, which answers a mistake in one of our flags in a line, with the nearest flag, not with its usage."""
    usual = parser.error

    def error(message: str) -> NoReturn:
        _, unrecognized, words = message.partition("unrecognized arguments:")
        lines = [_unknown(word) for word in _ours_in(words.split()) if word not in _flags()]
        if lines or (not unrecognized and any(message.startswith(f"argument {name}:") for name in _flags())):
            parser.exit(2, f"{parser.prog}: error: {' '.join(lines) or message}\n")
        usual(message)

    parser.error = error  # type: ignore[method-assign]
    return parser


def _flags() -> list[str]:
    return [SWITCH, FILE, *map(flag, FlashConfig.model_fields)]


def _ours_in(words: Iterable[str]) -> list[str]:
    """The flags with our prefix among words of a command line, without their values."""
    return [word.partition("=")[0] for word in words if word.replace("_", "-").startswith(SWITCH)]


def _unknown(word: str) -> str:
    nearest = difflib.get_close_matches(word.replace("_", "-"), _flags(), n=1, cutoff=0.0)[0]
    return f"{printable(word)} is not a known flag; the nearest is {nearest}."


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "flash all-reduce" and one for each group of fields to `parser`, and return it.

    Values stay text until `config_from`: argparse would answer a bad one with Megatron's whole usage.
    """
    switches = parser.add_argument_group("flash all-reduce", _ABOUT)
    switches.add_argument(SWITCH, action="store_true", help="quantize Megatron's collectives")
    switches.add_argument(FILE, metavar="FILE", help="a JSON file with settings, keys as in FlashConfig")
    groups = {name: parser.add_argument_group(f"flash all-reduce: {name}") for name in GROUPS}
    for key, field in FlashConfig.model_fields.items():
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(field.default, bool) else {}
        name = key.rpartition("_")[2].upper()
        groups[FlashConfig.group_of(key)].add_argument(
            flag(key), metavar=name, help=FlashConfig.describe(key).replace("%", "%%"), **bare
        )
    return parser


def config_from(args: Any) -> FlashConfig | None:
    """The configuration that the flags ask for; None without --flash-allreduce and FLASH_ALLREDUCE_ATTACH=megatron.

    Raises ConfigError for a bad value, for a setting without --flash-allreduce, and for flags that never reached
    `args` (--yaml-cfg replaces the parsed ones).
    """
    unknown = [_unknown(word) for word in _ours_in(sys.argv[1:]) if word not in _flags()]
    if unknown and getattr(args, "ignore_unknown_args", False):  # else argparse has refused them
        raise ConfigError("\n".join(unknown))
    given = {key: getattr(args, _destination(flag(key)), None) for key in FlashConfig.model_fields}
    texts = {
        key: value if isinstance(value, str) else _as_json(value) for key, value in given.items() if value is not None
    }
    file = getattr(args, _destination(FILE), None)
    if not hasattr(args, _destination(SWITCH)):
        lost = sorted({word.partition("=")[0] for word in sys.argv[1:] if word.startswith(SWITCH)})
        if lost and getattr(args, "yaml_cfg", None) is not None:
            raise ConfigError(
                f"{', '.join(lost)}: --yaml-cfg replaces the command line; write the settings into the "
                f"YAML file, at its top level, as {_destination(SWITCH)}: true and {_destination(flag('bits'))}: 8."
            )
    if not getattr(args, _destination(SWITCH), False) and "megatron" not in autoload.attached():
        stray = [FILE] * (file is not None) + [flag(key) for key in texts]
        if stray:
            raise ConfigError(f"{', '.join(stray)} without {SWITCH}: add {SWITCH}, or leave the rest out.")
        return None
    config = FlashConfig.from_env()
    if file is not None and not isinstance(file, str):
        raise ConfigError(f"{FILE} {file!r}: expected the name of a JSON file.")
    if file is not None:
        config = FlashConfig.from_file(file, base=config)
    return FlashConfig.from_texts(texts, spelled=flag, base=config)


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # a YAML file has dates too, which no field takes
        return str(value)


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def start(args: Any) -> None:
    """Enable the plugin by `args`, Megatron-LM's validated arguments; rank 0 prints a line about it.

    Raises ConfigError or PatchError on every rank alike, before Megatron-LM has started anything.
    """
    config = config_from(args)
    if config is None:
        return
    left_out = []
    if options := other_buffers(args):
        keys = ("grad_bits", "param_bits", "quantize_layernorm", "error_feedback")
        asked, config = config, without(config, keys)  # a preset's
        if asked.grad_bits != config.grad_bits:
            left_out = [f"{_option(name)}: {OTHER_GRADIENTS}." for name in options]
    config, source = for_megatron(config), _source(args)
    refuse_incompatible(args, config, source)
    megatron.enable_from(config, source)
    global started
    started = True
    if getattr(args, "rank", 0) == 0:
        for line in (start_line(config), *left_out, *doubts(args, config, source)):
            print(f"flash all-reduce: {line}", flush=True)
        atexit.unregister(_print_summary)  # Megatron-LM may restart in this process
        atexit.register(_print_summary)


def _source(args: Any) -> scopes.Source:
    """Name a field by its flag if flags turned the plugin on, or if the field has a flag; else by its variable."""
    if getattr(args, _destination(SWITCH), False):
        return _BY_FLAGS

    def spelled(key: str) -> str:
        return variable(key) if getattr(args, _destination(flag(key)), None) is None else flag(key)

    return scopes.Source(spelled, spelled, f"{environment.ATTACH}=megatron")


_BY_FLAGS = scopes.Source(flag, flag, SWITCH)


def refuse_incompatible(args: Any, config: FlashConfig, source: scopes.Source = _BY_FLAGS) -> None:
    """ConfigError, one line each, for Megatron's options that replace or bypass the collectives we quantize, and for
    fields that have no effect in Megatron.
    """
    ours = source.spelled
    lines = refusals(args, _option, source.plugin) + of_fields(config, ours)
    if config.grad_bits != "full":
        for name in other_buffers(args):
            lines.append(
                f"{_option(name)} and {ours('grad_bits')} exclude each other: the gradients do not "
                f"pass through Megatron's own data-parallel buffers; leave {ours('grad_bits')} at full."
            )
    for key in by_hand(config, "param_bits"):
        lines += of_parameters([args], _option, ours(key))
    for key in by_hand(config, "attention_bits"):
        lines += of_attention(args, _option, ours(key))
    lines += of_experts(args, config, _option, ours)
    lines += of_pipeline(config, getattr(args, "pipeline_model_parallel_size", None), ours)
    lines += of_ring_exchange(args, config, _option, ours)
    if lines:
        raise ConfigError("\n".join(lines))


def _option(name: str, value: Any = None) -> str:
    """An option of Megatron-LM's as it stands on the command line."""
    return f"--{name.replace('_', '-')}" + ("" if value is None else f" {value}")


def start_line(config: FlashConfig) -> str:
    """Return one line: the attached model, its bits, and every other setting that is not at its default."""
    return f"{in_place()} seams attached, {settings(config)}"


def in_place() -> int:
    """How many seams are attached."""
    return sum(entry["in_place"] for entry in megatron.report().values())


def settings(config: FlashConfig) -> str:
    """The widths, and every other setting that is not at its default."""
    if not config.enabled or environment.is_on(environment.DISABLE):
        return "but switched off: every call runs in full precision"
    said = ("bits", "backward_bits", "group_size", "min_bytes")
    return (
        f"{notices.preset(config)}forward {_bits(config.bits)}, backward {_bits(config.backward_bits)}, "
        f"groups of {config.group_size}, from {config.min_bytes} bytes{notices.settings(config, said)}"
    )


def _bits(bits: int | str) -> str:
    return "full precision" if bits == "full" else f"{bits} bits"


def doubts(args: Any, config: FlashConfig, source: scopes.Source = _BY_FLAGS) -> list[str]:
    """Warnings where little or nothing will be quantized with these arguments."""
    lines = []
    if getattr(args, "tensor_model_parallel_size", 1) == 1 and only_tensor_parallel(config):
        lines.append(nothing_to_quantize("--tensor-model-parallel-size", source.where))
    lines += _too_small(args, config, source)
    reached = any(entry["target"].startswith("transformer_engine") for entry in megatron.report().values())
    if getattr(args, "transformer_impl", None) == "transformer_engine" and not reached:
        lines.append(
            "--transformer-impl is transformer_engine, whose layers communicate on their own, and no Transformer "
            "Engine that this version knows was found: they are not reached; --transformer-impl local is."
        )
    return lines


def _too_small(args: Any, config: FlashConfig, source: scopes.Source) -> list[str]:
    """Return a line if the hidden states of a micro-batch, in the collectives of every layer, stay below min_bytes."""
    names = ("seq_length", "micro_batch_size", "hidden_size")
    counts = [count for name in names if isinstance(count := getattr(args, name, None), int)]
    known = getattr(args, "tensor_model_parallel_size", 1) > 1 and len(counts) == len(names)
    if not known or not config.enabled or environment.is_on(environment.DISABLE):
        return []
    ranks = getattr(args, "context_parallel_size", 1) or 1
    itemsize = getattr(getattr(args, "params_dtype", None), "itemsize", 4)
    message = math.prod(counts) * itemsize // ranks
    if message >= config.min_bytes:
        return []
    options = " x ".join(f"{_option(name)} {count}" for name, count in zip(names, counts, strict=True))
    return [
        f"a layer's collective carries {notices.size(message)} ({options} x {itemsize} bytes"
        + (f" / {_option('context_parallel_size')} {ranks}" if ranks > 1 else "")
        + f"), below min_bytes {notices.size(config.min_bytes)}: none will be quantized; "
        f"set {source.where('min_bytes')}."
    ]


def summary() -> str:
    """Per site: calls, quantized calls, reasons for full precision, bytes; then the sites that sent nothing, and other
    traffic of torch.distributed. The first line is about all of it.
    """
    stats = counters.stats()
    sites = stats["sites"]
    sent = full = sum(one["bytes_sent"] for one in stats["beside"].values())
    lines, silent = [], []
    for seam, entry in megatron.report().items():
        if not sends(entry):
            silent.append(seam)
            continue
        site = sites[seam]
        sent, full = sent + site["bytes_sent"], full + site["bytes_full_precision"]
        reasons = ", ".join(f"{count} {reason}" for reason, count in entry["full_precision"].items())
        lines.append(
            f"  {seam}: {entry['calls']} calls, {entry['quantized']} quantized, "
            f"{_megabytes(site['bytes_sent'])} of {_megabytes(site['bytes_full_precision'])} sent"
            + (f"; in full precision: {reasons}" if reasons else "")
        )
    if silent:
        lines.append(f"  nothing sent: {', '.join(silent)}")
    lines += [f"  {line}" for line in counters.beside_us()]
    saved = f"{_megabytes(full - sent)} saved of {_megabytes(full)}"
    if full:
        saved += f" ({100 * (full - sent) / full:.1f} %)"
    return "\n".join([f"flash all-reduce, rank 0, whole run: {saved}", *lines])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _print_summary() -> None:
    print(summary(), flush=True)
