"""Integrations are enabled and disabled in any order, twice, and fail half way. Afterwards the replaced attributes are
the same objects as before.

Every row of the registry with an importable package takes part, and Megatron's launch flags (against a training
package of a few lines); apex is the stand-in. It runs in a separate rank, because other tests must not see this.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations import patching, registry
from tests.distributed import run_ranks

STUB = Path(__file__).parent / "apex_stub"
# Settings that every integration supports. The others refuse Megatron's own keys.
CONFIGS = (FlashConfig(bits=8), FlashConfig(bits=4, error_feedback=True, group_size=64))
ORDERS, WALKS, STEPS = 12, 4, 60

On = Callable[[FlashConfig], None]
Integrations = dict[str, tuple[On, Callable[[], None], list[tuple[Any, str]]]]


def launch_flags() -> None:
    """Define a training package of Megatron-LM's, as far as the flags and the scalars need one."""
    names = ("", ".arguments", ".global_vars", ".training")
    package, arguments, theirs, training = (types.ModuleType(f"megatron.training{name}") for name in names)
    package.__path__ = []
    exec("def add_megatron_arguments(parser): return parser", vars(arguments))
    exec("def set_args(args): pass\ndef get_args(): pass\ndef get_tensorboard_writer(): pass", vars(theirs))
    exec("def get_wandb_writer(): pass", vars(theirs))
    parameters = "loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, iteration, loss_scale"
    exec(f"def training_log({parameters}): pass", vars(training))
    for module in (package, arguments, theirs, training):
        sys.modules[module.__name__] = module


def owners(seams: Any) -> list[tuple[Any, str]]:
    """Return (class or module, name) of the attributes that seams replace."""
    found = []
    for seam in seams:
        owner: Any = importlib.import_module(seam.module)
        *path, name = seam.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        found.append((owner, name))
    return found


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even a parent package
        return False


def integrations() -> Integrations:
    """Return name: (enable, disable, replaced functions)."""
    sys.path.insert(0, str(STUB))
    found: Integrations = {}
    for row in registry.ROWS:
        if row.name == "megatron":
            launch_flags()
        if installed(row.probe):
            module = importlib.import_module(row.module)
            seams = [engine_constructor()] if row.name == "deepspeed" else module.seams()
            found[row.name] = (enabling(row, module), module.disable, owners(seams))
    if "megatron" in found:
        from flash_allreduce_plugin.integrations import megatron
        from flash_allreduce_plugin.integrations.megatron import arguments, fsdp_seams, monitor

        of_fsdp = fsdp_seams.every(megatron.core_fsdp()) if megatron.serves_fsdp() else []
        found["megatron"][2].extend(owners(seam for seam in of_fsdp if not seam.optional))
        found["megatron"][2].extend(owners(monitor.seams()))
        found["launch flags"] = (
            lambda config: arguments.attach(),
            arguments.detach,
            owners(arguments._patchset().seams),
        )
    return found


def enabling(row: registry.Row, module: Any) -> On:
    """Return the integration's enable, with a configuration that it accepts."""
    own = {name: 8 for name in row.acts if name.endswith("_bits")}
    if not row.elsewhere and row.name != "megatron_fsdp":  # which refuses to quantize nothing
        return lambda config: module.enable(config)
    return lambda config: module.enable(FlashConfig(bits=config.bits, group_size=config.group_size, **own))


def engine_constructor() -> patching.Seam:
    """Return the one function of DeepSpeed's that is replaced in the process; others are replaced on an engine."""
    from flash_allreduce_plugin.integrations.deepspeed import engine

    return engine.constructor()


def objects(places: list[tuple[Any, str]]) -> list[Any]:
    """Return the owner's own entry, a staticmethod as one, None where it has none."""
    return [vars(owner).get(name) for owner, name in places]


def torch_hooks() -> list[int]:
    hooks = [torch_optimizer._global_optimizer_post_hooks, torch_module._global_forward_pre_hooks]
    return [*map(len, hooks), len(torch_module._global_forward_hooks)]


class Frameworks:
    """All integrations, and the state of the frameworks before any was enabled."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")
        self.all = integrations()
        for _, disable, _ in self.all.values():
            disable()  # integrations that the entry point has attached, where the package is installed
        self.before = {name: objects(places) for name, (_, _, places) in self.all.items()}
        self.hooks, self.finders = torch_hooks(), list(sys.meta_path)
        self.on: set[str] = set()

    def enable(self, name: str, config: FlashConfig = CONFIGS[0]) -> None:
        self.all[name][0](config)
        self.on.add(name)

    def disable(self, name: str) -> None:
        self.all[name][1]()
        self.on.discard(name)

    def check(self) -> None:
        for name, (_, _, places) in self.all.items():
            same = [x is y for x, y in zip(objects(places), self.before[name], strict=True)]
            assert not any(same) if name in self.on else all(same), (name, sorted(self.on), same)
        if not self.on - {"apex", "deepspeed", "launch flags"}:  # the others count steps
            assert torch_hooks() == self.hooks
        assert sys.meta_path == self.finders

    @contextmanager
    def failing(self, at: int, error: BaseException) -> Iterator[list[int]]:
        """Let the at-th replacement fail, once; yield [how many there were]."""
        count = [0]
        replaced = [place for _, _, places in self.all.values() for place in places]

        def flaky(owner: Any, name: str, value: Any) -> None:
            count[0] += any(owner is place[0] and name == place[1] for place in replaced)
            if count[0] == at:
                count[0] += 1
                raise error
            setattr(owner, name, value)

        patching.setattr = flaky  # type: ignore[attr-defined]
        try:
            yield count
        finally:
            del patching.setattr  # type: ignore[attr-defined]


def every_order() -> list[str]:
    """Enable everything in many orders, disable it in many orders; each twice."""
    frameworks = Frameworks()
    names = sorted(frameworks.all)
    frameworks.check()
    draw = random.Random(0)
    orders = [names, names[::-1], *(draw.sample(names, len(names)) for _ in range(ORDERS))]
    for on, off in zip(orders, reversed(orders), strict=True):
        for order, change in ((on, frameworks.enable), (off, frameworks.disable)):
            for name in order:
                change(name)
                change(name)
                frameworks.check()
    for seed in range(WALKS):
        draw = random.Random(seed)
        for _ in range(STEPS):
            name = draw.choice(names)
            if draw.random() < 0.5:
                frameworks.enable(name, draw.choice(CONFIGS))
            else:
                frameworks.disable(name)
            frameworks.check()
    return names


def fails_half_way() -> dict[str, int]:
    """Let every replacement of every integration fail once, when it is put in place and when it is taken off."""
    frameworks = Frameworks()
    tried = {}
    names = list(frameworks.all)
    for number, name in enumerate(names):
        for other in (None, names[number - 1], names[(number + 1) % len(names)]):
            if other is not None:
                frameworks.enable(other)
            at = 1
            while True:
                wrong: BaseException = RuntimeError("sealed") if at % 2 else KeyboardInterrupt()
                with frameworks.failing(at, wrong) as count:
                    try:
                        frameworks.enable(name)
                    except (PatchError, KeyboardInterrupt):
                        pass
                    else:
                        assert count[0] < at
                        break
                frameworks.check()
                at += 1
            frameworks.check()
            with frameworks.failing(at // 2, RuntimeError("sealed")), pytest.raises(RuntimeError, match="sealed"):
                frameworks.disable(name)
            frameworks.disable(name)  # the rest
            frameworks.check()
            tried[name] = at - 1
            if other is not None:
                frameworks.disable(other)
    frameworks.check()
    return tried


def megatron_fails_later() -> None:
    """Check the steps before and after the replacing in megatron.enable."""
    from flash_allreduce_plugin.integrations import megatron
    from flash_allreduce_plugin.integrations.megatron import data_parallel, scopes

    frameworks = Frameworks()
    warned = FlashConfig(error_feedback=True)  # without grad_bits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="error_feedback"):
            frameworks.enable("megatron", warned)
    frameworks.check()
    assert not megatron.is_enabled()

    def wrong(*_: Any) -> None:
        raise RuntimeError("half way")

    for owner, name in ((scopes, "start"), (data_parallel.residuals, "configure")):
        original = getattr(owner, name)
        calls = itertools.count()
        setattr(owner, name, lambda *a, original=original, calls=calls: (original if next(calls) else wrong)(*a))
        with pytest.raises(RuntimeError, match="half way"):
            frameworks.enable("megatron")
        setattr(owner, name, original) if owner is scopes else delattr(owner, name)
        frameworks.check()
        assert not megatron.is_enabled() and megatron.feedback() is None
    frameworks.enable("megatron")
    frameworks.check()
    frameworks.disable("megatron")
    frameworks.check()


def test_integrations_attach_and_detach_in_every_order() -> None:
    (names,) = run_ranks(1, every_order)
    assert "apex" in names


def test_an_integration_that_fails_half_way_leaves_nothing_attached() -> None:
    (tried,) = run_ranks(1, fails_half_way)
    assert tried["apex"] == 2
    assert all(tried.values())


def test_megatron_fails_before_and_after_it_has_replaced_its_functions() -> None:
    pytest.importorskip("megatron.core")
    run_ranks(1, megatron_fails_later)


def test_a_patch_of_another_library_in_between_stays() -> None:
    run_ranks(1, patched_by_others)


def patched_by_others() -> None:
    """Check that a function patched before ours is restored, and that one patched after ours blocks disabling."""
    frameworks = Frameworks()
    for name, (_, disable, places) in frameworks.all.items():
        owner, attribute = places[0]
        original = vars(owner)[attribute]
        if isinstance(original, staticmethod):
            continue
        theirs = types.FunctionType(
            original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
        )
        theirs.__kwdefaults__ = original.__kwdefaults__
        setattr(owner, attribute, theirs)
        frameworks.enable(name)
        ours = vars(owner)[attribute]
        assert ours is not theirs
        setattr(owner, attribute, lambda *a, **k: None)
        with pytest.raises(PatchError, match="replaced again after us"):
            disable()
        setattr(owner, attribute, ours)
        frameworks.disable(name)
        assert vars(owner)[attribute] is theirs
        setattr(owner, attribute, original)
        frameworks.check()
