"""apex.parallel, of NVIDIA's and of AMD's apex: gradients of its DistributedDataParallel and of its Reducer.

    import flash_allreduce_plugin as fap
    fap.apex.enable(fap.FlashConfig(bits=8))

`enable` replaces two methods of apex in this process, also for models that were wrapped before. `disable` restores
them, `report` returns their counts. apex's own code still runs, with another `dist.all_reduce` (`patching.rebound`):
buckets, divisors, dtypes, streams and copies stay apex's. The import of this module changes nothing
and does not import apex. Every rank must enable the same thing.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import weakref
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives.error_feedback import Feedback, Slot
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations.contract import Integration
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam, rebound
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry.notices import FirstSteps
from flash_allreduce_plugin.telemetry.report import Report
from flash_allreduce_plugin.telemetry.unreduced import Reductions

GRADIENTS = Site("apex.gradients")
REDUCER = Site("apex.reducer")

_MODULE = "apex.parallel.distributed"
_ALL_REDUCE = "dist.all_reduce"

# Reductions that were begun since `enable`, of each DistributedDataParallel (one a backward pass) and each Reducer.
_begun: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_first_steps: WeakKeyDictionary[Any, FirstSteps] = WeakKeyDictionary()
_reductions: WeakKeyDictionary[Any, Reductions] = WeakKeyDictionary()
_feedback: WeakKeyDictionary[Any, Feedback] = WeakKeyDictionary()


def enable(config: FlashConfig | None = None) -> None:
    """Quantize the gradients that apex.parallel reduces from the next call on.

    config: default `FlashConfig.from_env()`. Enabled already: only the configuration changes.
    Raises PatchError, changing nothing, if the package `apex` is absent, another project's, or one without these
    functions. Raises ConfigError for `include`, `exclude` and the keys of Megatron's.
    """
    integration.enable(config)


def disable() -> None:
    """Put apex's own methods back. Does nothing if not enabled.

    Raises PatchError, changing nothing, if one of them was replaced again since.
    """
    integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return integration.is_on


def feedback(reducing: Any) -> Feedback | None:
    """The residuals of a DistributedDataParallel or a Reducer of apex's, None without `error_feedback`.

    Save them next to the model on every rank, with state_dict and load_state_dict.
    """
    config = integration.config
    if config is None or not config.error_feedback:
        return None
    if reducing not in _feedback:
        _feedback[reducing] = Feedback.from_config(config)
    return _feedback[reducing]


def report() -> Report:
    """Return the coverage and the counts of each site since `reset_stats`; empty counts if there were no calls."""
    return integration.report()


class _Apex(Integration):
    counts_steps = False  # of the optimizer: reductions are counted

    def check(self, config: FlashConfig) -> None:
        if not self.patchset.applied:
            _refuse_other_packages()
        super().check(config)

    def stopped(self) -> None:
        _begun.clear()
        _first_steps.clear()
        for noted in _reductions.values():
            noted.forget()
        _reductions.clear()
        _feedback.clear()


def _of_buckets(original: Function) -> Function:
    """`original` (DistributedDataParallel.allreduce_bucket) with our all-reduce."""
    rebound(original, _ALL_REDUCE, None)  # PatchError if it does not call it

    @functools.wraps(original)
    def allreduce_bucket(self: Any, bucket: list[Tensor], bucket_idx: int, force_default_stream: bool) -> Tensor:
        # apex reduces its buckets in order: the first one begins a backward pass.
        step, slot = _step(self, begins=bucket_idx == 0), _slot(self, begins=bucket_idx == 0)
        site = _steps_of(self).of(GRADIENTS)

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
            reductions.all_reduce(tensor, op, group, integration.config, site=site, step=step, feedback=slot)

        reduced: Tensor = rebound(original, _ALL_REDUCE, all_reduce)(self, bucket, bucket_idx, force_default_stream)
        return reduced

    return allreduce_bucket


def _of_reducer(original: Function) -> Function:
    """`original` (Reducer.reduce) with our all-reduce.

    It hands the function on to code that divides by the number of ranks only where it was given
    `torch.distributed.all_reduce` itself. The function that it is given here divides.
    """
    rebound(original, _ALL_REDUCE, None)

    @functools.wraps(original)
    def reduce(self: Any) -> None:
        step, begins = _step(self, begins=True), iter((True,))
        site = _steps_of(self).of(REDUCER)

        def all_reduce_mean(tensor: Tensor) -> None:
            slot = _slot(self, begins=next(begins, False))
            reductions.all_reduce(tensor, config=integration.config, site=site, step=step, feedback=slot)
            tensor /= dist.get_world_size()

        rebound(original, _ALL_REDUCE, all_reduce_mean)(self)

    return reduce


def _step(reducing: Any, *, begins: bool) -> int:
    """How many reductions `reducing` has begun before this one; `begins`: this call begins it."""
    _begun[reducing] = max(1, _begun.get(reducing, 0) + begins)
    if reducing not in _reductions:
        alive = weakref.ref(reducing)
        _reductions[reducing] = Reductions(f"apex.parallel.{type(reducing).__name__}", lambda: _with_gradients(alive()))
    _reductions[reducing].noted()
    _steps_of(reducing).at(_begun[reducing] - 1)
    return _begun[reducing] - 1


def _steps_of(reducing: Any) -> FirstSteps:
    """Return the notices about the reductions of `reducing`; the first one prints the attached settings."""
    assert integration.config is not None, "a seam is in place only between enable and disable"
    found = _first_steps.get(reducing)
    if found is None:
        found = FirstSteps(integration.config, attached_to=None if _first_steps else "apex.parallel")
        _first_steps[reducing] = found
    return found


def _with_gradients(reducing: Any) -> list[Tensor]:
    """Return the parameters of a module that have gradients now; a Reducer of a list of gradients has none."""
    module = getattr(reducing, "module", None)
    return [] if module is None else [one for one in module.parameters() if one.grad is not None]


def _slot(reducing: Any, *, begins: bool) -> Slot | None:
    """Return the slot of the next reduction of `reducing`."""
    residuals = feedback(reducing)
    if residuals is None:
        return None
    if begins:
        residuals.begin()
    return residuals.slot()


_SEAMS = (
    Seam(
        GRADIENTS.name,
        _MODULE,
        "DistributedDataParallel.allreduce_bucket",
        ("self", "bucket", "bucket_idx", "force_default_stream"),
        _of_buckets,
        "all-reduce of a gradient bucket of apex.parallel.DistributedDataParallel",
    ),
    Seam(
        REDUCER.name,
        _MODULE,
        "Reducer.reduce",
        ("self",),
        _of_reducer,
        "all-reduce of the gradients of an apex.parallel.Reducer",
    ),
)


def seams() -> tuple[Seam, ...]:
    """Return every function of apex that `enable` replaces; reads nothing of apex."""
    return _SEAMS


integration = _Apex(
    "apex",
    lambda: Patchset("apex", _SEAMS, BY_NAME["apex"].fits),
    {seam.id: (seam.target, seam.covers) for seam in _SEAMS},
)


class Missing(enum.Enum):
    """Why an apex that is found cannot be patched."""

    ABSENT = "not installed"
    WITHOUT_PARALLEL = "without apex.parallel"
    OTHER_PROJECT = "another project"


def missing() -> tuple[Missing, str] | None:
    """Why the apex that `import apex` would find cannot be patched, and a sentence; None if it can. Imports nothing."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # a module without a spec, made by hand: patching checks its contents
        return None
    if spec is None:
        return (
            Missing.ABSENT,
            "not installed; install it from the source of NVIDIA's apex (release 25.05 or earlier) or of AMD's",
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "parallel" / "distributed.py").is_file() for folder in folders):
        return None
    where = spec.origin or ", ".join(map(str, folders))
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return (
            Missing.WITHOUT_PARALLEL,
            f"{where} has no apex.parallel, which NVIDIA removed after release 25.05; take torch's "
            "DistributedDataParallel with fap.ddp_hook",
        )
    return (
        Missing.OTHER_PROJECT,
        f"{where} is not NVIDIA's apex nor AMD's but another package of that name (the package index has one); "
        "uninstall it and install apex from its source",
    )


def _refuse_other_packages() -> None:
    """PatchError if `import apex` would find nothing, another project or an apex without the functions."""
    found = missing()
    if found is not None:
        raise PatchError(f"apex: {found[1]}")
