"""The lines that rank 0 prints: the attached models, and after the first steps the sites that send in full precision
or have a poor quality at few bits.

An integration has a `FirstSteps` for each attachment, calls at the sites that it returns, and tells it the step; no
communication.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import replace

from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.codec.format import MAX_BITS, MIN_CODEBOOK_GROUP_SIZE
from flash_allreduce_plugin.config import FlashConfig, presets
from flash_allreduce_plugin.config.refusals import OF_MEGATRON
from flash_allreduce_plugin.config.wording import variable
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters, run_log
from flash_allreduce_plugin.telemetry.passes import Passes

Where = Callable[[str], str]

_FEW = 6  # bits of parameters
# The transformer of examples/deepspeed, two ranks, stage 3, gradients in 8 bits; all matrices, in groups of 128.
_MEASURED = (
    "at 4 bits the values of weights are off by 10 % (8 bits: 0.6 %), and validation loss was by +0.13 % (+0.01 %; "
    "0.7 M parameters, 400 steps, one seed)"
)
_STEPS = 3  # the last of which is not over: the first are not like those that follow (DDP rebuilds its buckets)
_STEPS_OF_A_TRIAL = 10  # with enabled "auto", which quantizes some steps of them (runtime/auto.py)
# The first line names these reasons, or they end by themselves, or there was nothing to send.
# A site with so few dB at its width is poor: Gaussian values have 20, 13 and 6. (tests/telemetry/test_notices.py)
_POOR = {4: 17.0, 3: 10.0, 2: 3.0}
_GAIN_DB = 4.0  # of the codebook with spikes; on Gaussian values it gains less
_KNOWN = {
    policy.DISABLED,
    policy.NOT_ENABLED,
    policy.WARM_UP,
    policy.TRIAL,
    policy.SLOWER,
    policy.LOW_SQNR,
    policy.EMPTY,
    policy.ONE_RANK,
    environment.DISABLE,
}
# Of a site that quantizes, some calls may be so without a notice.
_IN_PART = (policy.SMALL, policy.EVALUATION)
_without_slot: set[str] = set()  # sites that `without_slot` has printed
# The field that a reason is about.
_FIELDS = {
    policy.SMALL: "min_bytes",
    policy.is_full("backward_bits"): "backward_bits",
    policy.is_full("sequence_parallel_gather_bits"): "sequence_parallel_gather_bits",
    policy.is_full("grad_bits"): "grad_bits",
    policy.is_full("param_bits"): "param_bits",
    policy.is_full("param_backward_bits"): "param_backward_bits",
    policy.is_full("expert_bits"): "expert_bits",
    policy.is_full("expert_combine_bits"): "expert_combine_bits",
    policy.is_full("attention_bits"): "attention_bits",
    policy.is_full("pipeline_bits"): "pipeline_bits",
    policy.is_full("pipeline_backward_bits"): "pipeline_backward_bits",
    policy.EMBEDDING: "quantize_embedding",
    policy.LAYER_NORM: "quantize_layernorm",
    policy.FROZEN: "quantize_frozen",
    policy.EVALUATION: "quantize_evaluation",
}


def say(line: str) -> None:
    """Print it, on rank 0."""
    ranks = run_log.rank_and_world()
    if ranks is None or ranks[0] == 0:
        print(f"flash all-reduce: {line}", flush=True)


def attached(to: str, gives: str, config: FlashConfig, *, said: tuple[str, ...] = ("bits",)) -> str:
    """Return one line: the attached model, and every setting that is not at its default.

    to: the framework's part. gives: its quantized tensors, with the fields in `said`.
    """
    if not config.enabled or environment.is_on(environment.DISABLE):
        why = "enabled is false" if not config.enabled else f"{environment.DISABLE} is set"
        return f"attached to {to}, but switched off ({why}): every call runs in full precision"
    name = preset(config, (*OF_MEGATRON, "param_bits"))  # `gives` has the parameters
    line = f"attached to {to}: {name}{gives}, "
    line += f"groups of {config.group_size}, buckets from {config.min_bytes} bytes"
    line += settings(config, (*said, "group_size", "min_bytes", *OF_MEGATRON))
    ranks = run_log.rank_and_world()
    return line + ("; there is one rank and nothing to reduce" if ranks is not None and ranks[1] == 1 else "")


def preset(config: FlashConfig, without: tuple[str, ...] = ()) -> str:
    """Return the start of a line: the preset and the fields that differ from it, except `without`; or nothing."""
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


def without_slot(site: str) -> None:
    """Print once for each site that error_feedback has no effect there."""
    if site not in _without_slot:
        _without_slot.add(site)
        say(
            f"error_feedback=true has no effect at {site}: the call has no slot; keep one owner = "
            "flash_allreduce_plugin.Feedback.from_config(config) and pass feedback=owner.slot(name) to each call"
        )


class FirstSteps:
    """The first steps of an attachment: an engine, a model, or all that a framework of this process sends.

    It prints one line about the attached model. When the third step starts, it prints once which sites send in full
    precision or lose much at few bits, with the fields to set. A process that only infers makes no steps: there the
    sites are looked at after 1000 calls, 2000, and so on.
    """

    def __init__(
        self,
        config: FlashConfig,
        where: Where | None = None,
        attached_to: str | None = None,
        framework: str | None = None,
        known: Iterable[str] = (),
    ) -> None:
        """where: how its users set a field. None: by a variable, or in Python. attached_to: None: that has been said.

        framework: the first part of the names of sites whose calls all count here; None: only those at sites that `of`
        returned count. known: reasons that no field changes.
        """
        self.config = config
        self.over = False
        self._where = where or (variable if environment.ATTACH in os.environ else in_python)
        self._attached_to, self._known = attached_to, _KNOWN.union(known)
        self._steps, self._last = 0, -1
        self._tally = counters.Tally(self._look)
        self._sites: dict[Site, Site] = {}
        self._named: set[tuple[str, str]] = set()
        if framework is not None:
            counters.watch(framework, self._tally)

    def of(self, site: Site) -> Site:
        """Return the site whose calls count here: always the same object, by which api/reductions.py caches plans."""
        if self.over:
            return site
        own = self._sites.get(site)
        if own is None:
            own = self._sites[site] = replace(site, tally=self._tally)
        return own

    def at(self, step: int) -> None:
        """A call, or the end of a step. step: finished steps, the same throughout one."""
        if self.over or step == self._last:
            return
        self._last, self._steps = step, self._steps + 1
        if self._steps == 1 and self._attached_to is not None:
            say(attached(self._attached_to, f"gradients in {self.config.bits} bits", self.config))
        least = _STEPS_OF_A_TRIAL if self.config.enabled == "auto" else _STEPS
        if self._steps >= least and step > self.config.warmup_steps:
            self.over = True
            self._say()
            self._tally.clear()

    def _look(self) -> None:
        """Many calls were made in few steps: name the reasons that a field changes; others may pass."""
        if not self.over:
            self._say(passing=False)

    def _say(self, *, passing: bool = True) -> None:
        lines = in_full_precision(self._tally, self.config, self._where, self._known, passing)
        for key, line in {**lines, **better_at_few_bits(self._tally, self.config, self._where)}.items():
            if key not in self._named:
                self._named.add(key)
                say(line)


class FirstPasses:
    """FirstSteps where nothing counts the steps: those are the backward passes in which `at` is called."""

    def __init__(self, config: FlashConfig, attached_to: str | None = None) -> None:
        self._steps = FirstSteps(config, attached_to=attached_to)
        self._passes = Passes()

    def of(self, site: Site) -> Site:
        return self._steps.of(site)

    def at(self, config: FlashConfig, module: Hashable) -> None:
        """The gradient of `module` is about to be reduced."""
        self._steps.config = config
        if not self._steps.over:
            self._passes.begins(module)
            self._steps.at(self._passes.begun - 1)


def in_full_precision(
    tally: counters.Tally, config: FlashConfig, where: Where, known: Container[str] = _KNOWN, passing: bool = True
) -> dict[tuple[str, str], str]:
    """Return a sentence for each site that has quantized nothing, or that a field keeps in full precision in part.

    By site and reasons. passing: False leaves out the reasons that no field changes.
    """
    lines = {}
    for site, (quantized, found) in tally.kept().items():
        calls = quantized + sum(kept.calls for kept in found.values())
        reasons = {
            reason: kept
            for reason, kept in found.items()
            if reason not in known
            and (passing or reason in _FIELDS)
            and (not quantized or (reason in _FIELDS and reason not in _IN_PART))
        }
        if reasons:
            why = "; ".join(_why(reason, kept, config, where) for reason, kept in reasons.items())
            many = "none" if not quantized else str(quantized)
            lines[site, ", ".join(reasons)] = f"{site} has quantized {many} of its {calls} calls: {why}"
    return lines


def better_at_few_bits(tally: counters.Tally, config: FlashConfig, where: Where) -> dict[tuple[str, str], str]:
    """Return a sentence for each site whose few bits are poor, and that the codebook with spikes would serve better."""
    wanted = {
        **{"codebook": True, "spike_reserving": True, "group_size": max(config.group_size, MIN_CODEBOOK_GROUP_SIZE)},
        **{"compact": False, "symmetric": False},  # these exclude the codebook
    }
    changed = {key: value for key, value in wanted.items() if getattr(config, key) != value}
    lines = {}
    for site, trial in tally.trials().items():
        own, better = counters.sqnr_db(*trial.own), counters.sqnr_db(*trial.better)
        if changed and trial.own[0] and own < _POOR[trial.bits] and better >= own + _GAIN_DB:
            fields = " and ".join(f"{key}={json.dumps(value)}" for key, value in changed.items())
            lines[site, "codebook"] = (
                f"{site} has {own:.0f} dB at {trial.bits} bits; {fields} would have {better:.0f} dB "
                f"(set {' and '.join(map(where, changed))})"
            )
    return lines


def in_python(key: str) -> str:
    return f"FlashConfig({key}=...) or {variable(key)}"


def _why(reason: str, kept: counters.Kept, config: FlashConfig, where: Where) -> str:
    if reason not in _FIELDS:
        return reason
    about = ""
    if reason == policy.SMALL and kept.largest is not None:
        about = f"largest {size(kept.largest)}, min_bytes {size(config.min_bytes)}; "
    return f"{reason} ({about}set {' and '.join(map(where, _to_set(reason, kept, config)))})"


def _to_set(reason: str, kept: counters.Kept, config: FlashConfig) -> list[str]:
    """Return every field to set before a call that was kept for `reason` is quantized: a gradient may need two."""
    keys = [_FIELDS[reason]]
    while True:
        if keys[-1] != "min_bytes":
            config = config.model_copy(update={keys[-1]: keys[-1].startswith("quantize_") or MAX_BITS})
        answer = policy.bits_of(kept.role, config)
        if not isinstance(answer, policy.FullPrecision) or _FIELDS[answer.reason] in keys:
            break
        keys.append(_FIELDS[answer.reason])
    return keys


def size(count: int) -> str:
    """Bytes, in powers of 1024 where they are whole or large."""
    for unit, length in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.4g} {unit}"
    return f"{count} bytes"
