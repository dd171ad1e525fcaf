"""The entry point: cheap, silent, off on request, and an import hook that leaves importlib unchanged."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import pytest

from flash_allreduce_plugin import autoload, environment
from flash_allreduce_plugin.autoload import AfterImport

ROOT = Path(__file__).parents[1]
MODULES = ("stub_room.first", "stub_room.second")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a package of two modules on sys.path; sys.modules and sys.meta_path are put back afterwards."""
    package = tmp_path / "stub_room"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("first", "second"):
        (package / f"{name}.py").write_text("value = 1\nprint('ran as', __name__)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield package
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("stub_room")]:
        del sys.modules[name]


def python(script: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]\nflash_allreduce = "flash_allreduce_plugin.autoload:load"\n' in text


def test_torch_calls_it_through_the_entry_point(tmp_path: Path) -> None:
    info = tmp_path / "flash_allreduce_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    script = "import sys, torch; print([type(f).__name__ for f in sys.meta_path].count('AfterImport'))"
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    assert python(script, PYTHONPATH=path).split() == ["2"]
    assert python(script, PYTHONPATH=path, FLASH_ALLREDUCE_AUTOLOAD="0").split() == ["0"]


def test_it_imports_nothing_of_the_package_but_itself() -> None:
    loaded = python(
        "import sys; before = set(sys.modules); from flash_allreduce_plugin import autoload; autoload.load(); "
        "print(*set(sys.modules) - before)"
    ).split()
    own = {name for name in loaded if name.startswith("flash_allreduce_plugin")}
    tables = {"flash_allreduce_plugin.aliases", "flash_allreduce_plugin.integrations"}  # names, and nothing else
    tables.add("flash_allreduce_plugin.integrations.registry")
    assert own == {"flash_allreduce_plugin", "flash_allreduce_plugin.autoload", *tables}
    assert not {"torch", "pydantic", "numpy", "megatron", "deepspeed"} & set(loaded)


def test_it_costs_under_a_part_in_250_of_torchs_own_import() -> None:
    """Compare processor time in one process, best of three. A bound in milliseconds failed on a slow machine."""
    script = (
        "import time; start = time.process_time(); import torch; torchs = time.process_time() - start; "
        "start = time.process_time(); from flash_allreduce_plugin import autoload; autoload.load(); "
        "print((time.process_time() - start) / torchs)"
    )
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # byte code as pip leaves it
    assert min(float(python(script, **compiled)) for _ in range(3)) < 1 / 250


def test_the_hook_costs_a_tenth_of_a_search_of_the_path(room: Path) -> None:
    """Compare, alternately, with the finder that every import of a file asks."""
    finder = AfterImport(MODULES, lambda: None)
    finder.install()

    def seconds(find_spec: Callable[[str], object]) -> float:
        start = time.perf_counter()
        for _ in range(1000):
            find_spec("anything_else")
        return time.perf_counter() - start

    assert statistics.median(seconds(finder.find_spec) / seconds(PathFinder.find_spec) for _ in range(7)) < 0.1


@pytest.mark.parametrize("value", ["0", "false", "off", "no", " OFF "])
def test_a_switch_turns_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.AUTOLOAD, value)
    monkeypatch.setattr(autoload, "install", lambda: pytest.fail("installed"))
    autoload.load()


def test_load_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ImportError("something\nis missing")

    monkeypatch.delenv(environment.AUTOLOAD, raising=False)
    monkeypatch.setattr(autoload, "install", broken)
    autoload.load()
    assert [record.getMessage() for record in caplog.records] == [
        "flash_allreduce_plugin is not attached: ImportError: something is missing"
    ]


def test_install_twice_waits_once(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoload, "_waiting", {})
    monkeypatch.delenv(environment.AUTOLOAD, raising=False)
    autoload.load()
    autoload.load()
    waiting = list(autoload._waiting.values())
    assert len(waiting) == 2  # for Megatron-LM, for DeepSpeed
    assert [finder in waiting for finder in sys.meta_path].count(True) == 2


@pytest.mark.parametrize("order", [MODULES, MODULES[::-1]])
def test_the_action_runs_once_after_both_and_the_finder_is_removed(room: Path, order: tuple[str, str]) -> None:
    seen: list[bool] = []

    def action() -> None:
        seen.append(all(hasattr(sys.modules[name], "value") for name in MODULES))

    before = list(sys.meta_path)
    finder = AfterImport(MODULES, action)
    finder.install()
    importlib.import_module(order[0])
    assert seen == [] and finder in sys.meta_path
    importlib.import_module(order[1])
    assert seen == [True]
    assert sys.meta_path == before


def test_modules_look_as_if_there_had_been_no_hook(room: Path) -> None:
    AfterImport(MODULES, lambda: None).install()
    module = importlib.import_module("stub_room.first")
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert "exec_module" not in vars(module.__spec__.loader)
    assert module.__file__ == str(room / "first.py") and module.__spec__.cached


def test_reload_works_while_waiting_and_after(room: Path) -> None:
    ran: list[int] = []
    AfterImport(MODULES, lambda: ran.append(1)).install()
    first = importlib.import_module("stub_room.first")
    first.value = 2
    assert importlib.reload(first) is first and first.value == 1
    importlib.import_module("stub_room.second")
    importlib.reload(first)
    assert ran == [1]


def test_find_spec_and_run_as_main_while_waiting(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[int] = []
    AfterImport(MODULES, lambda: ran.append(1)).install()
    spec = importlib.util.find_spec("stub_room.first")
    assert spec is not None and isinstance(spec.loader, SourceFileLoader)
    assert spec.loader.get_code("stub_room.first") is not None
    runpy.run_module("stub_room.first", run_name="__main__")
    assert "ran as __main__" in capsys.readouterr().out
    assert ran == []


def test_modules_imported_before(room: Path) -> None:
    ran: list[int] = []
    for name in MODULES:
        importlib.import_module(name)
    finder = AfterImport(MODULES, lambda: ran.append(1))
    finder.install()
    assert ran == [1] and finder not in sys.meta_path


def test_a_module_being_imported_while_the_hook_comes(room: Path) -> None:
    """Import a module like Megatron-LM's arguments.py, when it is the one that imports torch."""
    (room / "first.py").write_text(
        "import sys\nfrom tests import test_autoload\ntest_autoload.install_for_test()\nvalue = 1\n"
    )
    importlib.import_module("stub_room.first")
    assert _seen == [] and _finder in sys.meta_path
    importlib.import_module("stub_room.second")
    assert _seen == [True] and _finder not in sys.meta_path


_seen: list[bool] = []
_finder = AfterImport(MODULES, lambda: _seen.append(sys.modules["stub_room.first"].value == 1))


def install_for_test() -> None:
    _finder.install()


def test_leaving_the_list_hides_no_finder(room: Path) -> None:
    """Let the hook leave sys.meta_path while importlib walks over it; the finder behind it is still asked."""
    (room / "third.py").write_text("")
    finder = AfterImport(["stub_room.first"], lambda: None)
    finder.install()
    sys.modules["stub_room.first"] = type(sys)("stub_room.first")  # executed by a foreign loader

    class Behind:
        asked: list[str] = []  # noqa: RUF012

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            self.asked.append(name)

    sys.meta_path.insert(1, Behind())
    importlib.import_module("stub_room.third")
    assert finder not in sys.meta_path and Behind.asked == ["stub_room", "stub_room.third"]


def test_a_failing_action_is_one_line_and_the_import_succeeds(room: Path, caplog: pytest.LogCaptureFixture) -> None:
    def action() -> None:
        raise RuntimeError("no\nluck")

    AfterImport(MODULES, action).install()
    with caplog.at_level(logging.WARNING):
        for name in MODULES:
            assert importlib.import_module(name).value == 1
    assert [r.getMessage() for r in caplog.records] == ["flash_allreduce_plugin is not attached: RuntimeError: no luck"]


def test_a_module_that_fails_is_tried_again(room: Path) -> None:
    ran: list[int] = []
    AfterImport(MODULES, lambda: ran.append(1)).install()
    importlib.import_module("stub_room.second")
    text = (room / "first.py").read_text()
    (room / "first.py").write_text("raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("stub_room.first")
    assert ran == []
    (room / "first.py").write_text(text + "# longer, so that no stale byte code is taken\n")
    importlib.invalidate_caches()
    importlib.import_module("stub_room.first")
    assert ran == [1]


def test_two_hooks_for_one_module(room: Path) -> None:
    ran: list[str] = []
    for name in ("a", "b"):
        AfterImport(["stub_room.first"], lambda name=name: ran.append(name)).install()
    importlib.import_module("stub_room.first")
    assert sorted(ran) == ["a", "b"]


def test_a_framework_that_was_not_imported_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ["megatron.core.parallel_state", "megatron.core.transformer.module"]
    for name in missing:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert autoload._why_nothing("megatron") == f"this program has not imported {' or '.join(missing)}"
    importlib.import_module("torch.nn.parallel.distributed")  # imported whichever tests ran before
    assert autoload._why_nothing("megatron,ddp") == "this program has built no such model"
