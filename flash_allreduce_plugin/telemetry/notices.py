"""The lines that rank 0 prints: what is attached and, after the first steps, which site has quantized nothing and why.

An integration has a `FirstSteps` and tells it the step at its calls; no communication.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.config import FlashConfig, presets
from flash_allreduce_plugin.config.refusals import OF_MEGATRON
from flash_allreduce_plugin.telemetry import counters, run_log

Where = Callable[[str], str]

_FEW = 6  # bits of parameters
# The transformer of examples/deepspeed, two ranks, stage 3, gradients in 8 bits; all matrices, in groups of 128.
_MEASURED = (
    "at 4 bits the values of weights are off by 10 % (8 bits: 0.6 %), and validation loss was by +0.13 % (+0.01 %; "
    "0.7 M parameters, 400 steps, one seed)"
)
_STEPS = 3  # the last of which is not over: the first are not like those that follow (DDP rebuilds its buckets)
# These have been said, or pass.
_KNOWN = (policy.DISABLED, policy.WARM_UP, policy.LOW_SQNR, policy.EMPTY, environment.DISABLE)
# The field that a reason is about.
_FIELDS = {
    policy.SMALL: "min_bytes",
    policy.BACKWARD_FULL: "backward_bits",
    policy.GATHER_FULL: "sequence_parallel_gather_bits",
    policy.GRADIENT_FULL: "grad_bits",
    policy.PARAMETER_FULL: "param_bits",
    policy.PARAMETER_BACKWARD_FULL: "param_backward_bits",
    policy.EXPERT_FULL: "expert_bits",
    policy.EXPERT_COMBINE_FULL: "expert_combine_bits",
    policy.ATTENTION_FULL: "attention_bits",
    policy.PIPELINE_FULL: "pipeline_bits",
    policy.PIPELINE_BACKWARD_FULL: "pipeline_backward_bits",
    policy.EMBEDDING: "quantize_embedding",
    policy.LAYER_NORM: "quantize_layernorm",
}


def say(line: str) -> None:
    """Print it, on rank 0."""
    ranks = run_log.rank_and_world()
    if ranks is None or ranks[0] == 0:
        print(f"flash all-reduce: {line}", flush=True)


def attached(to: str, gives: str, config: FlashConfig, *, said: tuple[str, ...] = ("bits",)) -> str:
    """One line: what is attached, and every setting that is not at its default.

    to: the framework's part. gives: what it does there, with the fields in `said`.
    """
    if not config.enabled or environment.is_on(environment.DISABLE):
        why = "enabled is false" if not config.enabled else f"{environment.DISABLE} is set"
        return f"attached to {to}, but switched off ({why}): every call goes in full precision"
    line = f"attached to {to}: {preset(config, OF_MEGATRON)}{gives}, "
    line += f"groups of {config.group_size}, buckets from {config.min_bytes} bytes"
    line += settings(config, (*said, "enabled", "group_size", "min_bytes", *OF_MEGATRON))
    ranks = run_log.rank_and_world()
    return line + ("; there is one rank and nothing to reduce" if ranks is not None and ranks[1] == 1 else "")


def preset(config: FlashConfig, without: tuple[str, ...] = ()) -> str:
    """The name of the preset and what the configuration has instead, but for `without`: begins a line; or nothing."""
    if config.preset is None:
        return ""
    changed = presets.changed(config.preset, config.to_dict())
    but = ", ".join(f"{key}={json.dumps(value)}" for key, value in changed.items() if key not in without)
    return f"preset {config.preset}{' but ' * bool(but)}{but}, "


def settings(config: FlashConfig, said: tuple[str, ...]) -> str:
    """The fields that are not at their defaults and not in `said`."""
    defaults = FlashConfig().to_dict()
    changed = {key: value for key, value in config.to_dict().items() if key not in said and value != defaults[key]}
    return "".join(f", {key}={json.dumps(value)}" for key, value in changed.items())


def few_bits(key: str, bits: int) -> str | None:
    """A warning where parameters, gathered by values, have so few bits that the training notices; else None."""
    return None if bits >= _FEW else f"{key} is {bits}: {_MEASURED}; take 8."


class FirstSteps:
    """The first steps of an integration: says once what is attached, and once which sites have quantized nothing."""

    def __init__(self, prefix: str, where: Where | None = None, attached_to: str | None = None) -> None:
        """prefix: of its sites' names. where: how its users set a field. attached_to: None: that has been said."""
        self._prefix, self._where, self._attached_to = prefix, where or in_python, attached_to
        self._steps, self._last = 0, -1
        self.over = False

    def at(self, step: int, config: FlashConfig) -> None:
        """A call, or the end of a step. step: finished steps, the same throughout one."""
        if self.over or step == self._last:
            return
        self._last, self._steps = step, self._steps + 1
        if self._steps == 1 and self._attached_to is not None:
            say(attached(self._attached_to, f"gradients in {config.bits} bits", config))
        if self._steps >= _STEPS and step > config.warmup_steps:
            self.over = True
            for line in without_quantized(self._prefix, config, self._where):
                say(line)


class FirstPasses:
    """FirstSteps where nobody counts the steps: those are the backward passes in which `at` is called."""

    def __init__(self, prefix: str, attached_to: str | None) -> None:
        self._steps = FirstSteps(prefix, attached_to=attached_to)
        self._finished, self._running = 0, False

    def at(self, config: FlashConfig) -> None:
        """A gradient is about to be reduced."""
        self._steps.at(self._finished, config)
        self._running = True
        if not self._steps.over:
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._over)
            except RuntimeError:  # called by hand, in no backward pass
                return

    def _over(self) -> None:
        self._finished += self._running
        self._running = False


def without_quantized(prefix: str, config: FlashConfig, where: Where) -> list[str]:
    """A sentence for each site below `prefix` that was called and has quantized nothing."""
    lines = []
    for site, counted in counters.totals().items():
        reasons = [reason for reason in counted.full_precision if reason not in _KNOWN]
        if site.startswith(f"{prefix}.") and not counted.quantized and reasons:
            why = "; ".join(_why(site, reason, config, where) for reason in reasons)
            lines.append(f"{site} has quantized none of its {counted.calls} calls: {why}")
    return lines


def in_python(key: str) -> str:
    return f"FlashConfig({key}=...) or {environment.PREFIX}{key.upper()}"


def _why(site: str, reason: str, config: FlashConfig, where: Where) -> str:
    if reason == policy.ONE_RANK:
        return f"{reason}, there is nothing to reduce"
    if reason not in _FIELDS:
        return reason
    key, about = _FIELDS[reason], ""
    if reason == policy.SMALL:
        largest = counters.largest(site, reason)
        about = "" if largest is None else f"largest {size(largest)}, min_bytes {size(config.min_bytes)}; "
    return f"{reason} ({about}set {where(key)})"


def size(count: int) -> str:
    """Bytes, in powers of 1024 where they are whole or large."""
    for unit, length in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.4g} {unit}"
    return f"{count} bytes"
