"""Megatron-LM / megatron-core: quantized tensor-parallel and sequence-parallel reductions.

    import flash_allreduce_plugin as fap
    fap.megatron.enable(fap.FlashConfig(bits=8, backward_bits=8))

`enable` replaces functions of megatron-core in this process (docs/use/megatron.md lists them), `disable` restores
them, `report` returns their counts. The import of this module changes nothing and does not import Megatron. Every rank
must enable the same.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

from flash_allreduce_plugin.collectives.error_feedback import Feedback
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import for_megatron
from flash_allreduce_plugin.config.wording import variable
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations.megatron import (
    attention,
    checkpoints,
    data_parallel,
    expert_parallel,
    fsdp,
    fsdp_gradients,
    fsdp_parameters,
    fsdp_seams,
    grouped_queries,
    monitor,
    parameters,
    pipeline_parallel,
    refusals,
    scopes,
    sequence_parallel,
    shared_gradients,
    tensor_parallel,
    transformer_engine,
)
from flash_allreduce_plugin.integrations.megatron.scopes import full_precision as full_precision
from flash_allreduce_plugin.integrations.megatron.scopes import set_step as set_step
from flash_allreduce_plugin.integrations.megatron.scopes import step as step
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.telemetry import other_traffic, run_log
from flash_allreduce_plugin.telemetry.report import Report, of_sites

_config: FlashConfig | None = None
_patchset: Patchset | None = None  # the patches of `enable`


def enable(config: FlashConfig | None = None) -> None:
    """Quantize Megatron's tensor-parallel reductions from the next call on.

    config: default `FlashConfig.from_env()`. Enabled already: only the configuration changes.
    Raises PatchError, changing nothing, if this megatron-core does not have the functions this version knows, and
    ConfigError for fields that have no effect in Megatron, if Transformer Engine overlaps its collectives with its
    GEMMs, or if FLASH_ALLREDUCE_LOG cannot be written. A Transformer Engine that does not have the functions this
    version knows is warned about and left alone: it may be installed and not be used. So is a training package of
    Megatron-LM, which gets our scalars in its monitors and our state in its checkpoints.
    """
    if config is not None and not isinstance(config, FlashConfig):
        raise TypeError(
            f"config must be a FlashConfig, got {type(config).__name__}; FlashConfig.from_dict reads a dict"
        )
    if config is None:
        enable_from(FlashConfig.from_env(), scopes.Source(variable, variable))
    else:
        enable_from(config, scopes.Source())


def enable_from(config: FlashConfig, source: scopes.Source) -> None:
    """Do as `enable` does, with a configuration from `source`."""
    global _config, _patchset
    config = for_megatron(config)
    lines = refusals.of_fields(config, source.spelled) + refusals.of_wrapped_models(config, source.spelled)
    if lines:
        raise ConfigError("\n".join(lines))
    run_log.start(config, lambda: scopes.step() if is_enabled() else None)
    fresh: Patchset | None = None
    if _patchset is None:
        transformer_engine_seams, misfit = _transformer_engine()
        if misfit is not None:
            warnings.warn(
                f"flash_allreduce: layers of Transformer Engine communicate in full precision: {misfit}", stacklevel=3
            )
        if transformer_engine_seams:
            transformer_engine.refuse_userbuffers()
        its_attention, misfit = _attention_of_transformer_engine()
        if misfit is not None and config.attention_bits != "full":
            warnings.warn(
                f"flash_allreduce: attention of Transformer Engine exchanges in full precision: {misfit}", stacklevel=3
            )
        monitors, saving = monitor.seams(), checkpoints.seams()
        without = _misfit(monitors)
        if without is not None:
            warnings.warn(f"flash_allreduce: Megatron-LM's monitors get no scalars: {without}", stacklevel=3)
        optional = transformer_engine_seams + its_attention + ([] if without else monitors) + _of_fsdp()
        without = _misfit(saving)
        if without is not None:
            warnings.warn(f"flash_allreduce: Megatron-LM's checkpoints have no state of it: {without}", stacklevel=3)
        fresh = _made(optional + ([] if without else saving))
    if config.given().get("error_feedback") and config.grad_bits == "full":
        warnings.warn(
            "flash_allreduce: error_feedback is of the data-parallel gradients, which are not quantized while "
            'grad_bits is "full"; set grad_bits, or leave error_feedback out.',
            stacklevel=3,
        )
    try:
        if fresh is not None:
            fresh.apply()
        scopes.start(config, lambda: refusals.judge_models(current_config()), source)
        _configure(config)
        checkpoints.start()
    except BaseException:
        if fresh is not None:
            fresh.restore()
            _stop()
        raise
    _patchset, _config = fresh or _patchset, config
    other_traffic.attach(_patchset)


def disable() -> None:
    """Put Megatron's own functions back. Does nothing if not enabled.

    Raises PatchError, changing nothing, if one of them was replaced since.
    """
    global _config, _patchset
    if _patchset is not None:
        _patchset.restore()
        other_traffic.detach(_patchset)
    _stop()
    _config = _patchset = None


def _stop() -> None:
    scopes.stop()
    checkpoints.stop()
    data_parallel.reduced.forget()
    fsdp_gradients.reduced.forget()
    _configure(None)


def _configure(config: FlashConfig | None) -> None:
    data_parallel.residuals.configure(config)
    parameters.buckets.configure(config)
    fsdp_parameters.configure(config)


def _misfit(seams: list[Seam]) -> str | None:
    """Why seams do not fit the training package of Megatron-LM that is loaded; None if they do, or if none is."""
    try:
        Patchset("megatron", seams, "Megatron-LM core_v0.13 to core_v0.19").verify()
    except PatchError as error:
        return str(error)
    return None


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return _config is not None


def feedback() -> Feedback | None:
    """The residuals of the data-parallel gradients of this process, None without `error_feedback`.

    fap.state_dict has them, and so have the checkpoints of Megatron-LM's training package.
    """
    return data_parallel.residuals.feedback


def report() -> Report:
    """Return the coverage and the counts of each seam since `reset_stats`; empty counts without a call."""
    optional = _transformer_engine()[0] + _attention_of_transformer_engine()[0]
    found = (_patchset or _made(optional + fsdp_seams.every(core_fsdp()))).report()
    helpers = {helper.id for helper in _helpers()}  # they move nothing that could be counted
    own = {seam.id: found[seam.id] for seam in seams() if seam.id not in helpers}
    own |= fsdp_seams.rows(found, core_fsdp())
    return of_sites({**own, **attention.rows(found), **pipeline_parallel.rows(found), **transformer_engine.rows(found)})


def seams() -> tuple[Seam, ...]:
    """Every place in Megatron that `enable` replaces; reads nothing of Megatron."""
    found = tensor_parallel.seams(current_config) + sequence_parallel.seams(current_config)
    found += grouped_queries.seams(current_config)
    found += data_parallel.seams(current_config) + parameters.seams(current_config)
    found += shared_gradients.seams(current_config)
    return tuple(found + expert_parallel.seams() + _helpers())


def _made(optional: list[Seam]) -> Patchset:
    """optional: seams of functions that may be missing."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        installed = "of unknown version"
    supported = f"{BY_NAME['megatron'].fits} (installed: {installed})"
    return Patchset("megatron", (*seams(), *optional), supported)


def _transformer_engine() -> tuple[list[Seam], str | None]:
    """Transformer Engine's seams if Megatron runs with one and they fit it, else why they do not."""
    if not transformer_engine.in_use():
        return [], None
    found = transformer_engine.seams(current_config)
    misfit = transformer_engine.misfit(found)
    return ([], misfit) if misfit else (found, None)


def _attention_of_transformer_engine() -> tuple[list[Seam], str | None]:
    """The same of the exchanges of its attention."""
    if not transformer_engine.in_use():
        return [], None
    found = attention.of_transformer_engine(attention.te_module(), current_config)
    misfit = transformer_engine.misfit(found)
    return ([], misfit) if misfit else (found, None)


def _of_fsdp() -> list[Seam]:
    """Return the seams of Megatron-FSDP; none if this megatron-core has none that this version knows."""
    return fsdp_seams.every(core_fsdp()) if serves_fsdp() else []


@functools.cache
def core_fsdp() -> fsdp.Host:
    """Return the Megatron-FSDP inside of megatron-core."""
    return fsdp.Host(
        fsdp_seams.CORE,
        "megatron.fsdp",
        current_config,
        scopes.step,
        scopes.requested,
        scopes.current,
        data_parallel.residuals,
    )


@functools.cache
def serves_fsdp() -> bool:
    """Return True if the seams fit the Megatron-FSDP of this megatron-core."""
    try:
        Patchset("megatron", fsdp_seams.every(core_fsdp())).verify()
    except PatchError:
        return False
    return True


def _helpers() -> list[Seam]:
    found = tensor_parallel.helpers() + sequence_parallel.helpers() + expert_parallel.helpers(current_config)
    found += parameters.helpers(current_config) + pipeline_parallel.helpers(current_config)
    return found + refusals.helpers(current_config)


def current_config() -> FlashConfig:
    """Return the configuration of the seams, while enabled."""
    assert _config is not None, "a seam is in place only between enable and disable"
    return _config
