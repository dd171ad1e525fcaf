"""torch's tensor parallelism (torch.distributed.tensor.parallel): the sums and gathers of activations.

    fap.tensor_parallel.enable(fap.FlashConfig(preset="int8"))

ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, and all that is built on
`DTensor.redistribute` and `from_local` in a module: forward and backward, models that exist already among them.

    forward    row-parallel layer -> sum          bits                             (Megatron's g)
    backward   column-parallel layer -> sum       backward_bits                    (Megatron's f)
    both       gathers along the sequence         sequence_parallel_gather_bits
    forward    vocabulary-parallel embedding      bits, if quantize_embedding

Every other redistribution stays torch's: parameters, state dicts, optimizers, norms, loss_parallel, and those that
operators make implicitly. Replaced are methods of torch.distributed.tensor's modules _redistribute, _api and
placement_types, read in torch 2.11 to 2.14.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import for_megatron
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations.contract import Integration
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.integrations.tensor_parallel import activations, placements, transformers
from flash_allreduce_plugin.integrations.tensor_parallel.activations import Activation
from flash_allreduce_plugin.policy import Site, unmatched
from flash_allreduce_plugin.telemetry import notices
from flash_allreduce_plugin.telemetry.report import Report

_TENSOR = "torch.distributed.tensor"
_ROW = BY_NAME["tensor_parallel"]


def enable(config: FlashConfig | None = None) -> None:
    """Quantize the activations of torch's tensor parallelism from the next call on, the same on every rank.

    config: default `FlashConfig.from_env()`; a preset has the widths that it has for Megatron's activations.
    warmup_steps counts the steps of the optimizer; a program that only evaluates has none. Enabled already: only the
    configuration changes. A graph that torch.compile has made keeps its configuration: call torch.compiler.reset().
    Raises TypeError where config is no FlashConfig; ConfigError for keys that have no effect here; PatchError, changing
    nothing, if this torch's functions are not as this version knows them.
    """
    integration.enable(config)


def by_environment() -> None:
    """Enable by FLASH_ALLREDUCE_ATTACH, once the program has imported torch's styles. A configuration that is refused
    ends the program.
    """
    integration.by_environment()


def disable() -> None:
    """Put torch's own functions back. Does nothing if not enabled.

    Raises PatchError, changing nothing, if one of them was replaced again since.
    """
    integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return integration.is_on


def report() -> Report:
    """Return the coverage and the counts of each site since `reset_stats`; empty counts if there were no calls."""
    return integration.report()


class _TensorParallel(Integration):
    def __init__(self) -> None:
        where = f"{_TENSOR}.placement_types"
        super().__init__("tensor_parallel", _patchset, {s.name: (where, c) for s, c in placements.COVERS.items()})
        self._met = self._traced = False  # an activation, and one in a graph, since `started`
        self._tag: str | None = None  # of torch.compile's caches, before ours
        self._transformers: Patchset | None = None  # once it is imported

    def disable(self) -> None:
        if self._transformers is not None:
            self._transformers.refuse_replaced()
        super().disable()
        if self._transformers is not None:
            self._transformers.restore()
            self._transformers = None

    def started(self, config: FlashConfig) -> None:
        super().started(config)
        self.config = for_megatron(config)
        self.watch(self.config, known=(placements.OTHER, placements.LAST_DIMENSION))
        self._met = self._traced = False
        self._mark_graphs(self.config)

    def stopped(self) -> None:
        activations.seen.clear()
        if self._tag is not None:
            torch.compiler.config.cache_key_tag, self._tag = self._tag, None

    def how(self, site: Site, activation: Activation) -> dict[str, Any]:
        """Return the arguments of a call at `site`."""
        config = self.served()
        if not self._met:
            self._met = True
            notices.say(_attached(config))
        if activations.tracing():
            self._say_of_graphs(config)
            return {"config": config, "site": site, "full_precision": activation.full_precision}
        # Before the first step of an optimizer evaluation may be all that the program does: it has no steps to warm up.
        steps = optimizer_steps.finished
        step = None if activation.evaluates and not steps else steps
        if self._transformers is None and transformers.is_loaded():
            self._serve_transformers()
        if self.first_steps is not None and not self.first_steps.over:
            self.first_steps.at(steps)
            if self.first_steps.over:
                _warn_of_patterns(config)
        site = Site(site.name, site.role, activation.module) if activation.module is not None else site
        return {"config": config, "site": site, "step": step, "full_precision": activation.full_precision}

    def served(self) -> FlashConfig:
        """Return the configuration of the calls."""
        assert self.config is not None, "a seam is in place only between enable and disable"
        return self.config

    def _say_of_graphs(self, config: FlashConfig) -> None:
        """Print once the fields that a graph of torch.compile does not honour."""
        if self._traced:
            return
        self._traced = True
        if config.include or config.exclude:
            notices.say("include and exclude keep activations exact in a graph of torch.compile: it knows no modules")
        elif config.warmup_steps or config.enabled == "auto":
            notices.say("a graph of torch.compile is quantized without warm-up and without a trial: it knows no steps")

    def _serve_transformers(self) -> None:
        """Replace the function of transformers too. One that differs stays, with a line."""
        self._transformers = transformers.patchset(self.how, self.served)
        try:
            self._transformers.apply()
        except PatchError as error:
            notices.say(f"sums of transformers' tp_plan without gradients stay exact: {error}")

    def _mark_graphs(self, config: FlashConfig) -> None:
        """Separate graphs of this configuration in torch.compile's caches, which do not see the seams."""
        if self._tag is None:
            self._tag = torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = f"{self._tag} flash_allreduce {config.text}"


def _attached(config: FlashConfig) -> str:
    fields = "bits", "backward_bits", "sequence_parallel_gather_bits"
    sums, back, gathers = (
        "exactly" if (bits := getattr(config, field)) == "full" else f"in {bits} bits" for field in fields
    )
    gives = f"sums {sums}, their gradients {back}, gathers of sequence parallelism {gathers}"
    return notices.attached("torch's tensor parallelism", gives, config, said=_ROW.acts)


def _warn_of_patterns(config: FlashConfig) -> None:
    for field, pattern in unmatched(config, activations.seen):
        example = min(filter(None, activations.seen), default="none")
        warnings.warn(
            f"flash_allreduce: {field} pattern {pattern!r} matches no module whose activations were sent in "
            f"the first steps; such modules are named like {example!r}.",
            stacklevel=2,
        )


def seams() -> list[Seam]:
    """Every function of torch's that is replaced; reads nothing of it."""

    def seam(name: str, module: str, path: str, signature: tuple[Any, ...], replacement: Any, covers: str) -> Seam:
        return Seam(f"tensor_parallel.{name}", f"{_TENSOR}.{module}", path, signature, replacement, covers)

    def tells(asynchronous: bool) -> Any:
        return activations.forwards(lambda: integration.served(), asynchronous)

    def how(site: Site, activation: Activation) -> dict[str, Any]:
        return integration.how(site, activation)

    kept, shards = "tells activations from other tensors", ("self", "tensor", "mesh", "mesh_dim", "shard_spec")
    redistribute = ("ctx", "input", "device_mesh", "placements", "async_op", ...)
    placement, back = "placement_types", activations.backwards
    embedding = "sum of a vocabulary-parallel embedding"
    reduce = placements.all_reduces(how)
    return [
        seam("redistribute", "_redistribute", "Redistribute.forward", redistribute, tells(True), kept),
        seam("redistribute.back", "_redistribute", "Redistribute.backward", ("ctx", "grad_output"), back, kept),
        seam(
            "from_local",
            "_api",
            "_FromTorchTensor.forward",
            ("ctx", "input", "device_mesh", "placements", ...),
            tells(False),
            kept,
        ),
        seam("from_local.back", "_api", "_FromTorchTensor.backward", ("ctx", "grad_output"), back, kept),
        seam("full_tensor", "_api", "DTensor.full_tensor", ("self", ...), activations.exactly, "stays exact"),
        seam("reduce", placement, "Partial._reduce_value", shards[:-1], reduce, "all-reduce of activations"),
        seam(
            "reduce_scatter",
            placement,
            "Shard._reduce_shard_tensor",
            ("self", "tensor", "mesh", "reduce_op", "mesh_dim"),
            placements.reduce_scatters(how),
            "reduce-scatter of activations",
        ),
        seam(
            "gather",
            placement,
            "Shard._to_replicate_tensor",
            ("self", "local_tensor", "mesh", "mesh_dim", "current_logical_shape"),
            placements.all_gathers(how),
            "all-gather of activations",
        ),
        seam(
            "embedding",
            placement,
            "_MaskPartial._reduce_value",
            shards[:-1],
            lambda original: activations.embeds(reduce(original)),
            embedding,
        ),
        seam("embedding.scatter", placement, "_MaskPartial._reduce_shard_value", shards, activations.embeds, embedding),
    ]


def _patchset() -> Patchset:
    return Patchset("tensor_parallel", seams(), f"{_ROW.fits} (installed: {torch.__version__})")


integration = _TensorParallel()
