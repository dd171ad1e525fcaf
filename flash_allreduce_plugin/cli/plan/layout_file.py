"""The file of `plan --layout FILE`: one JSON object with the settings that have no flag."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.config import strict_json
from flash_allreduce_plugin.config.wording import printable


@dataclass(frozen=True, slots=True)
class _Kind:
    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*words: Any) -> _Kind:
    return _Kind(", ".join(map(json.dumps, words)), lambda value: type(value) in (str, int) and value in words)


_WHOLE = _Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
_FROM_0_WHOLE = _Kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
_SHARE = _Kind("a number above 0 and up to 1, such as 0.5", lambda value: _is_number(value) and 0 < value <= 1)
_FROM_0 = _Kind("a number, 0 or more", lambda value: _is_number(value) and value >= 0)
_BOOL = _Kind("true or false", lambda value: type(value) is bool)
_FLOPS = _Kind('a text such as "312T"', lambda value: type(value) is str)
_SPEED = _Kind('a text such as "450GB/s" or "400gbit"', lambda value: type(value) is str)
_SIZE = _Kind('a text such as "80GB"', lambda value: type(value) is str)

#: Section -> key -> kind, an example, meaning.
KEYS: dict[str, dict[str, tuple[_Kind, Any, str]]] = {
    "model": {
        "layers": (_WHOLE, 40, "transformer layers"),
        "hidden": (_WHOLE, 6144, "hidden size"),
        "heads": (_WHOLE, 48, "attention heads"),
        "kv_heads": (_WHOLE, 48, "heads of keys and values; default: heads"),
        "ffn": (_WHOLE, 24576, "inner size of the MLP; default: 4 x hidden"),
        "vocabulary": (_WHOLE, 50304, "entries of the vocabulary; default: 50304"),
        "sequence": (_WHOLE, 2048, "tokens of a sequence; default: 2048"),
        "gated": (_BOOL, False, "the MLP has three matrices (SwiGLU)"),
        "tied": (_BOOL, True, "input and output share one embedding"),
        "experts": (_FROM_0_WHOLE, 0, "experts of a layer; 0: dense"),
        "experts_per_token": (_WHOLE, 1, "experts that compute a token"),
    },
    "cluster": {
        "peak_flops": (_FLOPS, "312T", "peak of a GPU"),
        "efficiency": (_SHARE, 0.5, "share of the peak that training reaches; default: 0.5"),
        "memory": (_SIZE, "80GB", "memory of a GPU"),
        "codec": (_SPEED, "1650GB/s", "bytes that the codec's kernels read and write a second"),
        "ranks_per_node": (_WHOLE, 8, "GPUs of a node"),
        "intra": (_SPEED, "240GB/s", "link inside a node, one direction, or the name of a link"),
        "inter": (_SPEED, "200gbit", "one adapter to other nodes, or the name of a link"),
        "adapters": (_WHOLE, 1, "adapters of a node; default: one a GPU"),
        "link_efficiency": (_SHARE, 1.0, "share of the links' peak that is reached"),
        "latency_us": (_FROM_0, 10, "microseconds of one exchange"),
    },
    "training": {
        "tp": (_WHOLE, 1, "tensor-parallel ranks"),
        "dp": (_WHOLE, 64, "data-parallel ranks"),
        "pp": (_WHOLE, 1, "pipeline stages"),
        "cp": (_WHOLE, 1, "ranks that share a sequence: context parallelism, Ulysses"),
        "cp_comm_type": (_one_of("a2a", "p2p"), "a2a", "the exchanges of their attention: heads, or keys and values"),
        "ep": (_WHOLE, 1, "ranks that share out the experts"),
        "sequence_parallel": (_BOOL, False, "Megatron's sequence parallelism"),
        "zero": (_one_of(0, 1, 2, 3), 3, "ZeRO stage"),
        "framework": (_one_of("megatron", "deepspeed", "torch"), "deepspeed", "the framework"),
        "micro_batch": (_WHOLE, 1, "sequences of a micro-batch"),
        "global_batch": (_WHOLE, 64, "sequences of a step"),
        "gradients": (_one_of("fp32", "bf16", "fp16"), "bf16", "dtype; default: fp32 with megatron, else bf16"),
        "recompute": (_BOOL, True, "all activations are computed again in the backward pass"),
        "overlap": (_BOOL, True, "gradients and parameters are sent while others are computed"),
    },
}


def example() -> str:
    """Return a file with every key."""
    return json.dumps({key: value for keys in KEYS.values() for key, (_, value, _) in keys.items()}, indent=1)


def meanings() -> list[str]:
    """Return a line a key with its meaning."""
    return [f"{key}: {what}" for keys in KEYS.values() for key, (_, _, what) in keys.items()]


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return {"model": {key: value}, "cluster": ..., "training": ...} of the file; all are empty without a path.

    Raises ValueError, one sentence, for a file that cannot be read, is no JSON object, or has an unknown key or a value
    of the wrong kind.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in KEYS}
    if path is None:
        return found
    try:
        values = strict_json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--layout {path}: cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--layout {path}: expected a JSON object ({error}).") from None
    if not isinstance(values, dict):
        raise ValueError(f"--layout {path}: expected a JSON object; plan --layout-example prints one.")
    owner = {key: name for name, keys in KEYS.items() for key in keys}
    for key, value in values.items():
        if key not in owner:
            close = difflib.get_close_matches(key.lower(), owner, n=1, cutoff=0.0)[0]
            raise ValueError(f"--layout {path}: {printable(key)} is not known; the nearest is {close}.")
        kind = KEYS[owner[key]][key][0]
        if not kind.fits(value):
            raise ValueError(f"--layout {path}: {key} is {_shown(value)}; expected {kind.expected}.")
        found[owner[key]][key] = value
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
