"""The presets: the best measured setting for each purpose.

        bits an   validation loss against full precision
        element   gradients, ZeRO stage 0 / 2 / 3               tensor parallelism
int8    8.25      +0.003 / +0.000 / +0.001 %                    +0.000 %
int4    4.75      -0.003 / -0.001 / +0.003 %                    +0.030 %, at 6 bits
thin    2.75      +0.026 / -0.005 / -0.001 %                    as int4

Means of three seeds, 400 steps, gradients or tensor-parallel sums alone (docs/decide/benchmarks.md). The sums of int4
and thin had no spikes then. Spikes are for pretrained models, whose tensors have heavy tails (docs/decide/accuracy.md):

    python -m lab.benchmarks.deepspeed_training --sections '{"bits": 8}' '{"preset": "int4"}' '{"preset": "thin"}'
    python -m lab.benchmarks.training --steps 400 --bits 8
    python -m lab.benchmarks.training --steps 400 --bits 6 \
        --options '{"codebook": true, "backward_rounding": "stochastic"}'

In tensor parallelism int4 and thin have 6 bits, and rounding without bias in the backward pass: every layer adds to the
error, and no feedback corrects it. int8 has the codebook and spikes there, in groups of 256: 8.375 bits. With 4 bits in
both directions and the codebook the loss of a model of 10.7 M parameters was 1.6 % higher ("Pretraining with everything
on").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_allreduce_plugin.codec.format import MIN_CODEBOOK_GROUP_SIZE

_SPIKES = {"codebook": True, "spike_reserving": True}
_FINE = {**_SPIKES, "error_feedback": True}
_BACKWARD = {"backward_bits": 6, "backward_rounding": "stochastic"}


#: Activations and their gradients, in all their collectives.
_ACTIVATIONS = (
    "sequence_parallel_gather_bits",
    "expert_bits",
    "attention_bits",
    "pipeline_bits",
    "pipeline_backward_bits",
)
#: param_bits: for gathers of values.
_EVERYWHERE = {"param_bits": 8, "quantize_embedding": True, "quantize_layernorm": True}

PRESETS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "backward_bits": 8, "grad_bits": 8, **dict.fromkeys(_ACTIVATIONS, 8), **_EVERYWHERE},
    "int4": {"bits": 4, **_BACKWARD, "grad_bits": 4, **dict.fromkeys(_ACTIVATIONS, 6), **_EVERYWHERE, **_FINE},
    "thin": {"bits": 2, **_BACKWARD, "grad_bits": 2, **dict.fromkeys(_ACTIVATIONS, 6), **_EVERYWHERE, **_FINE},
}
# These replace a preset's keys where every rank keeps the parameters and gathers differences.
OF_DIFFERENCES: dict[str, dict[str, Any]] = {"int4": {"param_bits": 4}, "thin": {"param_bits": 4}}
# These replace a preset's keys in Megatron, where `bits` is the width of activations.
IN_MEGATRON: dict[str, dict[str, Any]] = {
    "int8": {**_SPIKES, "group_size": 256},
    "int4": {"bits": 6, **OF_DIFFERENCES["int4"]},
    "thin": {"bits": 6, **OF_DIFFERENCES["thin"]},
}

# A preset's key -> given keys and values that exclude it: it stays at its default then.
_OTHER_SCALES = (("symmetric", True), ("compact", True), ("rounding", "stochastic"))
_YIELDS: dict[str, tuple[tuple[str, Any], ...]] = {
    "codebook": _OTHER_SCALES,
    "spike_reserving": _OTHER_SCALES,
    "backward_rounding": (("backward_bits", "full"),),
    "quantize_layernorm": (("grad_bits", "full"),),
}


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the preset's values of the keys that are not given.

    A key of the preset that a given one excludes is left out. An unknown preset is kept, and refused later.
    """
    preset = values.get("preset")
    filled = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {**compatible(filled, values), **values}


def compatible(filled: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a preset that the given `values` do not exclude."""
    filled = dict(filled)
    for key, others in _YIELDS.items():
        if any(values.get(other) == value for other, value in others):
            filled.pop(key, None)
    group_size = values.get("group_size")
    if isinstance(group_size, int) and group_size < MIN_CODEBOOK_GROUP_SIZE:
        for key in _SPIKES:
            filled.pop(key, None)
    if values.get("hierarchical", "off") != "off":
        filled.pop("error_feedback", None)
    return filled


def changed(preset: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the preset's: of keys that were given, or that do not apply."""
    return {key: values[key] for key, value in PRESETS.get(preset or "", {}).items() if values[key] != value}
