"""DeepSpeedEngine.__init__: read the section, refuse a bad one before anything is built, and replace the reductions of
the finished engine.

The constructor is the only function replaced in DeepSpeed for all engines; PipelineEngine and DeepSpeedHybridEngine
call it too. Functions that reduce gradients are replaced on the engine and its optimizer only: two engines of one
process may have different configurations, or none. For an engine with quantized parameter gathers two functions of the
process are replaced too, which do not change other gathers (gathering.py); for one with Ulysses' attention, experts or
AutoTP a few more (exchanges.py, tensor_parallel.py). A function with a seam in its source (source.py) looks up the
replacement there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import types
import weakref
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import by_hand
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations.deepspeed import (
    attention,
    exchanges,
    experts,
    gathering,
    inference,
    pipeline,
    section,
    tensor_parallel,
)
from flash_allreduce_plugin.integrations.deepspeed.engine_seams import places
from flash_allreduce_plugin.integrations.deepspeed.gathering import Gathering
from flash_allreduce_plugin.integrations.deepspeed.parameters import parameters
from flash_allreduce_plugin.integrations.deepspeed.reduction import EXPERTS, TIED, Reduction, gradients
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam, below_mark, is_in_source
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.telemetry import notices, other_traffic, run_log

CONSTRUCTOR = "deepspeed.engine"

_engines: WeakSet[Any] = WeakSet()
# On an engine: its Reduction, its Gathering or None, and the replaced attributes: (owner, name, new value, old value).
# Stored on the engine, so that they end with it.
_BOUND = "_flash_allreduce"
# On an engine or its optimizer: seam -> replacement, for functions with a seam in their source.
_IN_SOURCE = "_flash_allreduce_in_source"
_Bound = tuple[Any, str, Any, Any]
_NOTHING = object()
_attached = False
_for_all: FlashConfig | None = None
_by_environment = False  # `_for_all` was not given by the program


def attach(config: FlashConfig | None = None, *, by_environment: bool = False) -> None:
    """Quantize engines that are built from now on: those with a section, and with `config` all others too.

    by_environment: True if the environment gave `config`. Raises PatchError, changing nothing, for an unknown form of
    DeepSpeedEngine.__init__.
    """
    global _attached, _for_all, _by_environment
    _patchset().apply()
    if config is not None:
        attach_inference(config)
        _for_all, _by_environment = config, by_environment
    _attached = True


def attach_inference(config: FlashConfig) -> None:
    """Quantize engines of deepspeed.init_inference from now on. Raises PatchError, changing nothing."""
    _of_inference().apply()
    inference.configure(config)


def attached_by_source() -> None:
    """Note that the constructor has a seam in its source: sections work without a replacement."""
    global _attached
    _attached = True


def detach() -> None:
    """Restore DeepSpeed's constructor and every engine's functions.

    Raises PatchError, changing nothing, if one of them was replaced since.
    """
    global _attached, _for_all
    for engine in list(_engines):
        _refuse_replaced(engine)
    patchsets = _patchset(), _of_process(), _of_attention(), _of_experts(), of_tensors(), _of_inference()
    for patchset in patchsets:
        patchset.refuse_replaced()
    for patchset in patchsets:
        patchset.restore()
    _attached = False
    _for_all = None
    inference.configure(None)
    for engine in list(_engines):
        release(engine)


def is_attached() -> bool:
    return _attached


def verify() -> None:
    """Raise PatchError for an unknown form of a function that reduces gradients or gathers parameters.

    Functions of attention, experts and AutoTP are checked when they are needed.
    """
    Patchset("deepspeed", [*places(None), *gathering.of_engine(None)], _supported()).verify()
    _of_process().verify()


def seams() -> list[Seam]:
    """Return the seams of all replaced functions, in the process and on an engine. Imports no part of DeepSpeed."""
    of_process = (*_of_process().seams, *_of_attention().seams, *_of_experts().seams, *of_tensors().seams)
    return [*_patchset().seams, *places(None), *gathering.of_engine(None), *of_process]


def sites_in_place() -> set[str]:
    """Return the sites of the living engines at which a call may be quantized."""
    engines = list(_engines)
    reductions: list[Reduction] = [getattr(engine, _BOUND)[0] for engine in engines]
    sites = {gradients(reduction.stage).name for reduction in reductions}
    sites |= {parameters(reduction.stage).name for reduction in reductions if reduction.parameters is not None}
    for engine, reduction in zip(engines, reductions, strict=True):
        if (own := getattr(engine, _BOUND)[1]) is not None:
            sites |= own.sites()
        if attention.wanted(reduction.config) and attention.is_there(engine):
            sites |= {attention.FORWARD.name, attention.BACKWARD.name}
        if experts.wanted(reduction.config) and experts.is_there(engine):
            sites |= {site.name for site in experts.SITES}
        if pipeline.widths(reduction.config) and pipeline.has_stages(engine):
            sites |= {site.name for site in pipeline.COVERS}
        if reduction.sums is not None:
            sites |= {site.name for site in tensor_parallel.COVERS}
        if reduction.has_tied_weights():
            sites.add(TIED.name)
    if inference.is_served():
        sites |= {tensor_parallel.FORWARD.name, tensor_parallel.EMBEDDING.name}
    return sites | {EXPERTS.name for engine in engines if getattr(engine, "has_moe_layers", False)}


def bind(engine: Any, config: FlashConfig) -> None:
    """Replace the reductions of a finished engine and its optimizer, and its gathers; feed its monitor."""
    reduction = Reduction(engine, config)
    own = Gathering(engine, reduction) if gathering.wanted(engine, config) else None
    run_log.start(config, _steps(engine))
    bound: list[_Bound] = []
    setattr(engine, _BOUND, (reduction, own, bound))
    _engines.add(engine)
    other_traffic.attach(reduction)
    try:
        if own is not None:
            _of_process().apply()
        for patchset in _of_layers(config):
            patchset.apply()
            exchanges.own(engine, reduction)
        if tensor_parallel.is_there(engine):
            of_tensors().apply()
            reduction.sums = _sums(engine, reduction)
            reduction.sums.own(engine.module)
        _count_exchanges(engine, reduction)
        _put_on(engine, reduction, own, bound)
    except BaseException:
        release(engine)
        raise


def _sums(engine: Any, reduction: Reduction) -> tensor_parallel.Sums:
    alive = weakref.proxy(reduction)  # as long as the engine lives
    return tensor_parallel.Sums(engine, reduction.config, lambda site: alive.site(site), lambda: alive.finished_steps())


def _count_exchanges(engine: Any, reduction: Reduction) -> None:
    """Count the exchanges of the model's layers that stay DeepSpeed's own: a field would quantize them."""
    ways = {
        attention: ((attention.FORWARD,), (attention.BACKWARD,)),
        experts: ((experts.DISPATCH, experts.COMBINE), (experts.COMBINE_BACKWARD, experts.DISPATCH_BACKWARD)),
    }
    for layers, sites in ways.items():
        if not layers.wanted(reduction.config):
            for group in layers.groups(engine):
                other_traffic.exchanges_of(group, exchanges.counted(reduction, *sites))


def _put_on(engine: Any, reduction: Reduction, own: Gathering | None, bound: list[_Bound]) -> None:
    def put(owner: Any, name: str, new: Any) -> None:
        bound.append((owner, name, new, vars(owner).get(name, _NOTHING)))
        setattr(owner, name, new)

    owners = [engine, getattr(engine, "optimizer", None), getattr(engine, "monitor", None)]
    seams = places(reduction)
    if own is not None or gathering.counts(engine, reduction.config):
        owners.append(gathering.coordinator_of(engine))
        seams += gathering.of_engine(reduction if own is None else own)
    for place in seams:
        class_name, name = place.attribute.split(".")
        owner = getattr(importlib.import_module(place.module), class_name)
        for candidate in owners:
            if not isinstance(candidate, owner):
                continue
            function = getattr(type(candidate), name)
            if is_in_source(function, place.id):
                if _IN_SOURCE not in vars(candidate):
                    put(candidate, _IN_SOURCE, {})
                replacements(candidate)[place.id] = place.replacement(below_mark(function))
            else:
                put(candidate, name, types.MethodType(place.replacement(function), candidate))
    if pipeline.has_stages(engine):
        put(engine, "_INSTRUCTION_MAP", pipeline.instructions(engine))


def _steps(engine: Any) -> run_log.StepSource:
    """Return a function of an engine's finished steps, which does not keep the engine alive."""
    own = weakref.ref(engine)
    return lambda: None if (alive := own()) is None else int(alive.global_steps)


def replacements(owner: Any) -> dict[str, Function]:
    """Return the replacements of an owner's functions with a seam in their source, by seam; empty without one."""
    found: dict[str, Function] = vars(owner).get(_IN_SOURCE, {})
    return found


def reduction_of(engine: Any) -> Reduction:
    """Return the Reduction of an engine. Raises ValueError if it has none."""
    if not hasattr(engine, _BOUND):
        raise ValueError(f"this {type(engine).__name__} has no flash_allreduce section and was not built after enable.")
    reduction: Reduction = getattr(engine, _BOUND)[0]
    return reduction


def release(engine: Any) -> None:
    """Undo `bind` on an engine: restore its class's functions, or the attributes before."""
    reduction, own, bound = getattr(engine, _BOUND)
    other_traffic.detach(reduction)
    reduction.released = True
    reduction.reductions.forget()
    exchanges.disown(reduction)
    if reduction.sums is not None:
        reduction.sums.disown()
    if own is not None:
        own.close()
    delattr(engine, _BOUND)
    _engines.discard(engine)
    for owner, name, new, before in reversed(bound):
        if vars(owner).get(name) is not new:
            continue
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _refuse_replaced(engine: Any) -> None:
    for owner, name, new, before in getattr(engine, _BOUND)[2]:
        found = vars(owner).get(name, _NOTHING)
        if found is not new and found is not before:
            raise PatchError(
                f"deepspeed: {name} of a {type(owner).__name__} was replaced again after us by {found!r}; undo that "
                "first, nothing was restored"
            )


@functools.cache
def _patchset() -> Patchset:
    return Patchset("deepspeed", [constructor()], _supported())


@functools.cache
def _of_process() -> Patchset:
    return Patchset("deepspeed", gathering.of_process(), _supported())


@functools.cache
def _of_attention() -> Patchset:
    return Patchset("deepspeed", attention.of_process(), _supported())


@functools.cache
def _of_experts() -> Patchset:
    return Patchset("deepspeed", experts.of_process(), _supported())


@functools.cache
def of_tensors() -> Patchset:
    """Return the functions that are replaced while a model with AutoTP is quantized."""
    return Patchset("deepspeed", tensor_parallel.of_process(), _supported())


@functools.cache
def _of_inference() -> Patchset:
    """Return the seams of init_inference, not among `seams`: `enable` always replaces them."""
    return Patchset("deepspeed", [inference.seam(of_tensors())], _supported())


def _of_layers(config: FlashConfig) -> list[Patchset]:
    """Return the functions of the process that are replaced for the exchanges of a model's layers."""
    wanted = (attention.wanted(config), _of_attention), (experts.wanted(config), _of_experts)
    return [patchset() for is_wanted, patchset in wanted if is_wanted]


def constructor() -> Seam:
    """Return the seam of DeepSpeedEngine.__init__."""
    parameters = (
        *("self", "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "mpu"),
        *("dist_init_required", "collate_fn", "config", "config_class", "mesh_device", "dont_change_device"),
    )
    return Seam(
        CONSTRUCTOR,
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.__init__",
        parameters,
        _with_section,
        "reads the section, and gives the engine its reductions",
    )


def _supported() -> str:
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        installed = "of unknown version"
    return f"{BY_NAME['deepspeed'].fits} (installed: {installed})"


def _with_section(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        deepspeed = given.get("config_class")
        useless: dict[str, str] = {}
        try:
            config, splits = _config_for(deepspeed), tensor_parallel.is_wanted(deepspeed)
            if config is not None:
                trained = _is_trained(given, deepspeed)
                without = section.useless_gathers(deepspeed, config)
                if config is _for_all:
                    without.update(_useless_sums(config, splits, f" without tensor parallelism ({section.AUTOTP})"))
                config, useless = section.of_preset(config, without)
                if trained:
                    _refuse_useless(config, useless)
                verify()
                for patchset in _of_layers(config):
                    patchset.verify()
                if splits:
                    of_tensors().verify()
        except Exception:
            # DeepSpeed's __del__ looks for attributes, and before Module.__init__ its __getattr__ recurses until
            # Python ends the process.
            torch.nn.Module.__init__(self)
            raise
        original(self, *args, **kwargs)
        if config is not None:
            config, more = section.of_preset(config, _useless(self, config))
            useless.update(more)
            if not trained and not by_hand(config, "param_bits"):  # a preset rounds no frozen parameters
                config = config.model_copy(update={"param_bits": "full"})
            if trained:
                _refuse_useless(config, useless)
            elif useless:
                config, keys = section.leave_out(config, useless)
                name, stage = type(self).__name__, int(self.zero_optimization_stage())
                notices.say(
                    f"{name}, ZeRO stage {stage}, was given nothing to train (an optimizer, or model_parameters for "
                    f"the JSON's optimizer). It leaves out {keys}."
                )
            bind(self, config)
            sums = reduction_of(self).sums
            doubts = *gathering.doubts(self, config), *(() if sums is None else sums.unmatched())
            for line in (start_line(self, config, trained), *doubts):
                notices.say(line)

    return __init__


def _is_trained(given: Mapping[str, Any], deepspeed: Any) -> bool:
    """True if an engine is built to train: it is given an optimizer, or the parameters for the configuration's.

    A reference model is given neither, though a copy of the policy's JSON may name an optimizer (TRL).
    """
    parameters = given.get("model_parameters") is not None
    return given.get("optimizer") is not None or (parameters and deepspeed.optimizer_name is not None)


def _refuse_useless(config: FlashConfig, useless: Mapping[str, str]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        section.refuse_useless(config, useless)
    except ConfigError as error:
        raise DeepSpeedConfigError(str(error)) from error


def _useless_sums(config: FlashConfig, split: bool, why: str) -> dict[str, str]:
    by_environment = config is _for_all and _by_environment
    return section.useless_sums(config, split=split, why=why, by_environment=by_environment)


def _useless(engine: Any, config: FlashConfig) -> dict[str, str]:
    """Given widths that a finished engine has no use for: key -> reason, after "no effect"."""
    found = {}
    if tensor_parallel.is_wanted(engine._config):
        found = _useless_sums(config, tensor_parallel.is_there(engine), ": AutoTP has split no layer of this model")
    if not pipeline.has_stages(engine):
        widths = [key for key in pipeline.widths(config) if key in config.given()]  # not by a preset
        found.update(dict.fromkeys(widths, ": there is no pipeline here"))
    if attention.wanted(config) and not attention.is_there(engine):
        found["attention_bits"] = (
            ": no attention of this model spans several ranks (Ulysses' DistributedAttention, or UlyssesSPAttentionHF)"
        )
    if experts.wanted(config) and not experts.is_there(engine):
        widths = [key for key in ("expert_bits", "expert_combine_bits") if getattr(config, key) not in (None, "full")]
        why = ": no experts of this model lie on several ranks (deepspeed.moe.layer.MoE with ep_size 2 or more)"
        found.update(dict.fromkeys(widths, why))
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    gathers = hasattr(optimizer, "update_lp_params") and getattr(optimizer, "using_real_optimizer", True)
    if config.param_bits != "full" and stage < 3 and not gathers:
        found["param_bits"] = f" {_with(optimizer)} at zero_optimization.stage {stage}, which gathers no parameters"
    return found


def _config_for(deepspeed: Any) -> FlashConfig | None:
    """The configuration of an engine that is being built with a DeepSpeedConfig, or None.

    Raises DeepSpeedConfigError if it is wrong.
    """
    from deepspeed.runtime.config import DeepSpeedConfigError

    for line in section.nearly(deepspeed._param_dict):
        notices.say(line)
    try:
        config = section.parse(deepspeed._param_dict)
        if config is None:
            config = _for_all
        if config is not None:
            section.refuse_incompatible(deepspeed)
            config = section.of_gathers(deepspeed, config)
            run_log.start(config)
    except ConfigError as error:
        raise DeepSpeedConfigError(str(error)) from error
    return config


def start_line(engine: Any, config: FlashConfig, trained: bool) -> str:
    """Return one line: the attached engine, its bits, and every other setting that is not at its default.

    trained: False for an engine that was given nothing to train, as a reference model is.
    """
    stage = int(engine.zero_optimization_stage())
    to = f"{type(engine).__name__} {_with(getattr(engine, 'optimizer', None))}, ZeRO stage {stage}"
    gives = f"gradients{'' if trained else ', if it reduces any,'} in {config.bits} bits"
    if config.param_bits != "full":
        what = "parameters" if stage == 3 else "differences of parameters"
        gives += f", {what} in {config.param_bits}"
    if attention.wanted(config):
        back = "exactly" if config.backward_bits == "full" else "too"
        gives += f", attention's exchanges in {config.attention_bits} (their gradients {back})"
    if experts.wanted(config):
        back = "exactly" if config.backward_bits == "full" else "too"
        combine = config.expert_bits if config.expert_combine_bits is None else config.expert_combine_bits
        gives += f", tokens to experts in {config.expert_bits}, back in {combine} (their gradients {back})"
    sums = getattr(engine, _BOUND)[0].sums if hasattr(engine, _BOUND) else None
    if sums is not None:
        back = "exactly" if sums.config.backward_bits == "full" else f"in {sums.config.backward_bits}"
        gives += f", sums of tensor parallelism in {sums.config.bits} (their gradients {back})"
    return notices.attached(to, gives, config, said=("bits", "param_bits"))


def _with(optimizer: Any) -> str:
    return "without an optimizer" if optimizer is None else f"with {type(optimizer).__name__}"
