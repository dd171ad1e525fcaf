"""The scope of a collective: the module, the training step, and a request for full precision.

In the forward pass the module is the innermost running one. Global module hooks follow it, only while a configuration
needs names or evaluation. The backward pass has no modules: the seams on Megatron's autograd functions keep the `Scope`
of the forward call on its ctx (`remembers`) and restore it around the backward (`recalls`). So both directions of a
module get the same decision, on any thread of the backward.

A training step ends when a torch optimizer steps after at least one collective: that is once a step for
megatron-core's own optimizers (chained, distributed) and in a plain loop, however many micro-batches, recomputations
or inner optimizers there are, and it is the same on all tensor-parallel ranks.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import process_groups
from flash_allreduce_plugin.integrations.optimizer_steps import restored
from flash_allreduce_plugin.integrations.patching import Function
from flash_allreduce_plugin.policy import EVALUATION as EVALUATION
from flash_allreduce_plugin.policy import ONE_RANK, Collective, Role, Site, unmatched
from flash_allreduce_plugin.runtime.decision import ring_bytes
from flash_allreduce_plugin.telemetry import counters, notices
from flash_allreduce_plugin.telemetry.notices import FirstSteps, in_python

ON_REQUEST = "full_precision()"
OTHER_GROUP = "not the tensor-parallel group"
ROUTING = "routing of tokens to experts"
SWITCH = "--flash-allreduce"
# megatron-core's modules in which several files have seams
MAPPINGS = "megatron.core.tensor_parallel.mappings"
LAYERS = "megatron.core.tensor_parallel.layers"

EMBEDDING = Site("megatron.embedding.forward", Role.EMBEDDING)

CurrentConfig = Callable[[], FlashConfig]
Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Scope:
    """module: qualified name, "" outside of any; None where nobody asked for names.
    step: finished training steps. full_precision: the reason, if this call must not be quantized.
    embedding: inside VocabParallelEmbedding.forward. hidden_states: the seam by which a dispatcher of experts is
    moving hidden states now, if it is. dispatcher: that object.
    """

    module: str | None
    step: int
    full_precision: str | None
    embedding: bool
    hidden_states: str | None
    dispatcher: object = None


_recalled: ContextVar[Scope | None] = ContextVar("flash_allreduce_recalled", default=None)
_pass: ContextVar[Pass | None] = ContextVar("flash_allreduce_pass", default=None)
_running: ContextVar[tuple[torch.nn.Module, ...]] = ContextVar("flash_allreduce_running", default=())
_in_embedding: ContextVar[bool] = ContextVar("flash_allreduce_in_embedding", default=False)
_hidden_states: ContextVar[tuple[str | None, object]] = ContextVar(
    "flash_allreduce_hidden_states", default=(None, None)
)
_routing: ContextVar[bool] = ContextVar("flash_allreduce_routing", default=False)


def flag(key: str) -> str:
    """The launch flag of a field: backward_bits -> --flash-allreduce-backward-bits."""
    return f"{SWITCH}-{key.replace('_', '-')}"


def _raise(error: ConfigError) -> NoReturn:
    raise error


class Source(NamedTuple):
    """The source of the configuration: the spelling of its fields, and the words for its mistakes.

    spelled: names a field in an error. where: names a field to set, in a notice. plugin: the setting that turned the
    plugin on.
    """

    spelled: Callable[[str], str] = str
    where: Callable[[str], str] = in_python
    plugin: str = "flash_allreduce_plugin"
    refuse: Callable[[ConfigError], NoReturn] = _raise


class _State:
    """The state of this process between `start` and `stop`."""

    def __init__(self) -> None:
        self.config: FlashConfig | None = None
        self.step = 0
        self.told = False  # the count was set: by a checkpoint, or by the program
        self.collectives = False  # any since the last step
        self.requests = 0  # full_precision() blocks that are open
        self.lock = threading.Lock()
        self.optimizer_hook: Any = None
        self.module_hooks: list[Any] = []
        self.names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.looking = False  # which modules make a collective in the first step, for patterns that match none
        self.seen: set[str] = set()
        self.source = Source()
        self.judge: Callable[[], None] | None = None  # of the models that train; None: they were judged
        self.first_steps: FirstSteps | None = None


_state = _State()


def source() -> Source:
    """Return where the configuration comes from."""
    return _state.source


def judged() -> None:
    """A model that trains fits the configuration: its layout is not judged at the end of the first step again."""
    _state.judge = None


def start(config: FlashConfig, judge: Callable[[], None], source: Source) -> None:
    """Count steps, and follow the running modules if `config` needs them. A second call continues the count.

    judge: is called at the end of the next step, unless `judged` is called before.
    """
    _state.source = source
    if _state.first_steps is None:
        _state.first_steps = FirstSteps(config, source.where, framework="megatron", known=(OTHER_GROUP,))
    _state.first_steps.config = config
    if _state.optimizer_hook is None:
        _state.optimizer_hook = torch_optimizer.register_optimizer_step_post_hook(_optimizer_stepped)
    by_name = bool(config.include or config.exclude)
    follow = by_name or not config.quantize_evaluation
    if follow and not _state.module_hooks:
        _state.module_hooks = [
            torch_module.register_module_forward_pre_hook(_enter),
            torch_module.register_module_forward_hook(_leave, always_call=True),
        ]
    if not follow:
        _unhook()
    if config != _state.config:
        _state.looking, _state.judge = by_name, judge
        _state.seen = set()
    _state.config = config


def stop() -> None:
    """Undo `start`; the next one counts from 0."""
    if _state.optimizer_hook is not None:
        _state.optimizer_hook.remove()
    _unhook()
    _state.optimizer_hook = _state.config = _state.first_steps = _state.judge = None
    _state.source = Source()
    _state.step, _state.told, _state.collectives = 0, False, False


def step() -> int:
    """Training steps finished since `enable`."""
    return _state.step


def set_step(number: int) -> None:
    """Set the count that `warmup_steps` is compared with, equal on every rank.

    Call it after a restart from a checkpoint, or, in a loop without a torch.optim.Optimizer, at every step.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"the step is {number!r}; expected a whole number, 0 or more")
    _state.step, _state.told = number, True


@contextmanager
def full_precision() -> Iterator[None]:
    """Run every collective of Megatron that starts in the block in full precision, in all threads of this process.

    For evaluation, on all ranks. The configuration does not change. A backward pass follows its forward pass, inside or
    outside of the block.
    """
    with _state.lock:
        _state.requests += 1
    try:
        yield
    finally:
        with _state.lock:
            _state.requests -= 1


def requested() -> str | None:
    """The reason inside of `full_precision`, else None; unlike `current` it is no sign of a training step."""
    return ON_REQUEST if _state.requests else None


def current() -> Scope:
    """The scope of a collective, or of an autograd function's forward, that is being called now."""
    _state.collectives = True
    recalled = _recalled.get()
    if recalled is not None:
        return recalled
    module, reason = None, ROUTING if _routing.get() else requested()
    config = _state.config
    if config is not None and _state.module_hooks:
        running = _running.get()
        if reason is None and not config.quantize_evaluation and running and not running[-1].training:
            reason = EVALUATION
        if config.include or config.exclude:
            module = _state.names.get(running[-1], "") if running else ""
            if _state.looking:
                _state.seen.add(module)
    return Scope(module, _state.step, reason, _in_embedding.get(), *_hidden_states.get())


def running_pass() -> Pass | None:
    """Which half of an autograd function with seams (`remembers`, `recalls`) is running, if one is."""
    return _pass.get()


def remembers(forward: Function) -> Function:
    """The forward of an autograd function, keeping the scope for its backward (none comes where ctx is None)."""

    @functools.wraps(forward)
    def remembering(ctx: Any, *arguments: Any, **keywords: Any) -> Any:
        if ctx is not None:
            ctx.flash_allreduce_scope = current()
        running = _pass.set(_pass.get() or "forward")  # _AllToAll.backward applies its own forward
        try:
            return forward(ctx, *arguments, **keywords)
        finally:
            _pass.reset(running)

    return remembering


def recalls(backward: Function) -> Function:
    """The backward of an autograd function, in the scope that its forward kept (if it ran while enabled)."""

    @functools.wraps(backward)
    def recalling(ctx: Any, *gradients: Any) -> Any:
        recalled = _recalled.set(getattr(ctx, "flash_allreduce_scope", None))
        running = _pass.set("backward")
        try:
            return backward(ctx, *gradients)
        finally:
            _pass.reset(running)
            _recalled.reset(recalled)

    return recalling


@contextmanager
def inside_embedding() -> Iterator[None]:
    token = _in_embedding.set(True)
    try:
        yield
    finally:
        _in_embedding.reset(token)


@contextmanager
def moving_hidden_states(site: str, dispatcher: object = None) -> Iterator[None]:
    token = _hidden_states.set((site, dispatcher))
    try:
        yield
    finally:
        _hidden_states.reset(token)


@contextmanager
def routing() -> Iterator[None]:
    """Leave every call inside to Megatron: it moves routing maps, probabilities or counts of experts."""
    token = _routing.set(True)
    try:
        yield
    finally:
        _routing.reset(token)


def site_of(site: Site, scope: Scope) -> Site:
    """The site with its module. A forward reduction may be the embedding's: it reaches the same functions as the
    row-parallel layers.
    """
    if scope.embedding and site.role is Role.FORWARD:
        site = EMBEDDING
    return site if scope.module is None else Site(site.name, site.role, scope.module)


def left_alone(group: dist.ProcessGroup | None, scope: Scope) -> str | None:
    """Why Megatron's own function serves a call, or None if this plugin does."""
    return scope.full_precision if process_groups.is_tensor_parallel(group) else OTHER_GROUP


def record_original(
    site: Site, reason: str, collective: Collective, tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Count a call of Megatron's own function, where it is another than the doors can be given as `plain`."""
    world_size = dist.get_world_size(group)
    whole = tensor.numel() * tensor.element_size() * (world_size if collective == "all_gather" else 1)
    sent = ring_bytes(collective, whole, world_size)
    counters.record_full_precision(site, ONE_RANK if world_size == 1 else reason, sent, message=whole)


def _enter(module: torch.nn.Module, _arguments: Any) -> None:
    if module not in _state.names:
        # The outermost module comes first. A later one around modules with names renames them.
        for name, inner in module.named_modules():
            _state.names[inner] = re.sub(r"^(module(\.|$))+", "", name)  # wrappers: DDP, Float16Module
    _running.set((*_running.get(), module))


def _leave(module: torch.nn.Module, _arguments: Any, _output: Any) -> None:
    running = _running.get()
    for depth in range(len(running) - 1, -1, -1):
        if running[depth] is module:
            _running.set(running[:depth])
            return


def _optimizer_stepped(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    if not _state.collectives:
        return  # another part of the same step: chained optimizers, or one that is not Megatron's business
    _state.collectives = False
    _state.step += 1
    if _state.step == 1 and not _state.told and _state.config is not None:
        _say_what_is_lost(restored(optimizer), _state.config)
    if _state.judge is not None:
        judge, _state.judge = _state.judge, None
        judge()
    if _state.first_steps is not None:
        _state.first_steps.at(_state.step)
    if not _state.looking or _state.config is None:
        return
    for field, pattern in unmatched(_state.config, _state.seen):
        example = min(filter(None, _state.seen), default="none")
        warnings.warn(
            f"flash_allreduce: {field} pattern {pattern!r} matches no module of this rank that made a collective "
            f"in the first step; such modules are named like {example!r}.",
            stacklevel=2,
        )
    _state.looking, _state.seen = False, set()


def _say_what_is_lost(steps: int, config: FlashConfig) -> None:
    """Print a line if an attached program resumes from a checkpoint without our state. steps: of its optimizer."""
    attached = _state.source.plugin != Source().plugin  # else `enable` may have come after these steps
    lost = [f"warmup_steps={config.warmup_steps} counts from 0"] * bool(config.warmup_steps)
    lost += ["residuals of error_feedback begin with zeros"] * (config.error_feedback and config.grad_bits != "full")
    if attached and steps and lost:
        notices.say(
            f"the optimizer resumes from step {steps}, and no state of the plugin was loaded: {'; '.join(lost)}. "
            f"{environment.AUTOSAVE}=FOLDER:STEPS saves the state"
        )


def _unhook() -> None:
    for hook in _state.module_hooks:
        hook.remove()
    _state.module_hooks = []
    _running.set(())
