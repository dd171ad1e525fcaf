"""The package's use of the machine: every use of a dangerous name is on a list, with its reason.

The syntax trees of the package are walked for modules and calls that run code, start processes, open connections,
unpickle or write files. The uses must equal `ALLOWED`: an entry that is not used fails too.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_allreduce_plugin as fap

ROOT = Path(fap.__file__).parent
REPOSITORY = Path(__file__).parents[1]

# Modules that unpickle, run code, call into C or speak a protocol: not even imported.
BANNED = re.compile(
    r"(c?_?pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve|dbm|yaml|code|codeop|runpy|ctypes|cffi|pty|urllib3?|http"
    r"|ftplib|smtplib|poplib|imaplib|telnetlib|xmlrpc|socketserver|asyncio|ssl|requests|httpx|aiohttp|webbrowser|xml"
    r"|huggingface_hub|pip|setuptools|torch\.hub|torch\.package|torch\.jit|torch\.distributed\.rpc)(\..*)?"
)
BANNED_BUILTINS = ("eval", "exec", "compile", "__import__", "breakpoint")
# Collectives of objects: they unpickle the bytes of another rank.
PICKLING = re.compile(r"\w+_object(_list)?|allow_pickle|\w*_pickled?")
# To be used where ALLOWED says so; torch.load is looked at where it is called.
WATCHED = re.compile(
    r"os\.(system|popen|forkp?t?y?|startfile|exec\w+|spawn\w+|posix_spawnp?|kill|killpg|set\w+id|chroot|open|write|remove"
    r"|unlink|renames?|replace|mkdir|makedirs|rmdir|removedirs|chmod|chown|link|symlink|truncate|mkfifo|mknod)"
    r"|subprocess\.(?!DEVNULL|PIPE|STDOUT|TimeoutExpired|CalledProcessError|CompletedProcess).*"
    r"|(socket|multiprocessing|tempfile)\..*|shutil\.(?!which|get_terminal_size).*"
    r"|importlib\.(import_module|reload)|torch\.save|torch\.(ops|classes)\.load_library\w*"
)
WRITING_METHODS = ("write_text", "write_bytes", "mkdir", "unlink", "rmdir", "touch", "rename", "chmod", "savefig")
WRITING_METHODS += ("symlink_to", "hardlink_to", "symlink", "hardlink", "tofile", "to_file")

_GIVEN = "the file that an option of the command names"
_OWN_NAME = "of a module of this package or of a framework, written in the code: no name comes from outside"
_CHILD = "of this package, by the parent's command line"
ALLOWED: dict[str, dict[str, str]] = {
    "__init__.py": {"importlib.import_module": _OWN_NAME},
    "aliases.py": {"importlib.import_module": _OWN_NAME},
    "autoload.py": {"importlib.import_module": _OWN_NAME},
    "api/operators.py": {"importlib.import_module": _OWN_NAME},
    "integrations/patching.py": {"importlib.import_module": _OWN_NAME},
    "integrations/megatron/__main__.py": {
        "import runpy": "the launcher runs the script that its command line names, as `python script.py` would",
        "runpy.run_path": "the same",
    },
    "integrations/megatron/attention.py": {"importlib.import_module": _OWN_NAME},
    "integrations/megatron/checkpoints.py": {"importlib.import_module": _OWN_NAME},
    "integrations/megatron/monitor.py": {"importlib.import_module": _OWN_NAME},
    "integrations/megatron/transformer_engine.py": {"importlib.import_module": _OWN_NAME},
    "integrations/deepspeed/engine.py": {"importlib.import_module": _OWN_NAME},
    "policy/topology.py": {"socket.gethostname": "the name of the host, to tell which ranks share one"},
    "codec/ops.py": {"torch.ops.load_library": "the compiled libraries, from the package's own folder"},
    "collectives/two_shot.py": {
        "import ctypes": "an integer that the kernel counts up in memory of this process's own workspace",
        "ctypes.c_uint32.from_address": "the same",
        "ctypes.c_uint32": "the same",
    },
    "telemetry/run_log.py": {
        "socket.gethostname": "the name of the host, for the log",
        "multiprocessing.util.Finalize": "the last line at the end of a process; starts none",
        "os.open": "the file that FLASH_ALLREDUCE_LOG names",
        "os.write": "the same",
        "os.unlink": "that file, where `run` has made it to see whether it can be written",
    },
    "runtime/checkpoint.py": {
        "os.makedirs": "flash_allreduce/ in the folder of a framework's checkpoint, or of the one that is given",
        "torch.save": "this rank's state, into it; what is read there is read with weights_only=True",
        "os.replace": "the state under its name when it is whole",
    },
    "integrations/autosave.py": {
        "os.unlink": "this rank's states before the last two, by their names, where FLASH_ALLREDUCE_AUTOSAVE says"
    },
    "cli/launch.py": {
        "subprocess.Popen": "the ranks of a command: a list of arguments, no shell",
        "os.killpg": "ranks that it started",
        "socket.create_server": "a free port of 127.0.0.1",
        "tempfile.TemporaryFile": "what a rank prints",
    },
    "cli/output.py": {"write_text": "the file that --json names"},
    "cli/plan/plot.py": {"savefig": _GIVEN},
    "cli/report/command.py": {"write_text": _GIVEN},
    "cli/report/plot.py": {
        "savefig": "into memory",
        "import xml.etree.ElementTree": "reads the drawing that matplotlib has just made, and no other text",
        **dict.fromkeys((f"xml.etree.ElementTree.{name}" for name in ("fromstring", "SubElement", "tostring")), "it"),
    },
    "cli/tune/command.py": {"write_text": _GIVEN, "savefig": _GIVEN},
    "cli/demo/report.py": {"savefig": "demo.png, in the folder that --output names"},
    "cli/ranks.py": {"importlib.import_module": _CHILD},
    "cli/demo/command.py": {
        "multiprocessing.get_context": "the ranks of the demo: processes of this one, which it speaks with by pickle",
        "multiprocessing.parent_process": "a rank ends with its parent",
        "socket.if_nameindex": "whether there is a loopback interface",
        "tempfile.TemporaryDirectory": "where the ranks meet",
        "mkdir": "the folder that --output names",
        "write_text": "inside it, or the file that --json names",
    },
    "cli/doctor/command.py": {"tempfile.TemporaryDirectory": "what the checks write, and where the ranks meet"},
    "cli/doctor/child.py": {
        "subprocess.Popen": "this Python with a check of this package, no shell",
        "os.killpg": "that check, and itself when its parent is gone",
        "importlib.import_module": _CHILD,
        "open for writing": "the findings of a check, in the folder that command.py made",
    },
    "cli/doctor/environment.py": {
        "importlib.import_module": _OWN_NAME,
        "socket.gethostname": "which address the host name has,",
        "socket.gethostbyname": "as gloo asks for it: the host's resolver may ask a name server",
    },
    "cli/doctor/frameworks.py": {"importlib.import_module": _OWN_NAME},
    "cli/doctor/quick.py": {"tempfile.TemporaryDirectory": "what the checks write"},
    "cli/run/command.py": {
        "tempfile.TemporaryDirectory": "the log of a run that names none",
        "os.posix_spawn": "the command that its user has typed: a list of arguments, no shell",
        "os.kill": "signals that it was sent, to that command",
    },
    "cli/doctor/selftest.py": {"socket.if_nameindex": "whether there is a loopback interface"},
    "cli/doctor/versions.py": {"importlib.import_module": _OWN_NAME},
}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything in a source that is dangerous or watched."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in [alias.name for alias in node.names]:
                if BANNED.fullmatch(name):
                    yield node.lineno, f"import {name}"
        elif isinstance(node, ast.ImportFrom):
            # A name taken out of a module is a use of it, under whatever name.
            for name in [f"{node.module}.{alias.name}" for alias in node.names]:
                if BANNED.fullmatch(name):
                    yield node.lineno, f"import {name}"
                elif WATCHED.fullmatch(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Name) and node.id in BANNED_BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            name = _dotted(node, names)
            if name is not None and (WATCHED.fullmatch(name) or BANNED.fullmatch(name)):
                yield node.lineno, name
            if PICKLING.fullmatch(node.attr):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            yield from _call(node, names)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the meaning of a file's names: "sp" for subprocess, "run" for subprocess.run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, names)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _call(node: ast.Call, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    given = {keyword.arg: keyword.value for keyword in node.keywords}

    def is_constant(value: ast.AST | None, wanted: object) -> bool:
        return isinstance(value, ast.Constant) and value.value is wanted

    function = node.func
    name = _dotted(function, names)
    if "shell" in given and not is_constant(given["shell"], False):
        yield node.lineno, "shell=True"
    if name == "torch.load" and not is_constant(given.get("weights_only"), True):
        yield node.lineno, "torch.load without weights_only=True"
    method = function.attr if isinstance(function, ast.Attribute) else None
    if method in WRITING_METHODS and not (name or "").startswith("os."):
        yield node.lineno, method
    builtin = isinstance(function, ast.Name) and function.id == "open"
    if builtin or (method == "open" and name is None):
        mode = given.get("mode") or next(iter(node.args[1 if builtin else 0 :]), None)
        known = isinstance(mode, ast.Constant)
        if (builtin and mode is not None and not known) or (known and not re.fullmatch("[rbt]*", str(mode.value))):
            yield node.lineno, "open for writing"


SOURCES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.parametrize("file", SOURCES)
def test_a_file_has_exactly_its_listed_calls(file: str) -> None:
    found: dict[str, int] = {}
    for line, what in uses(SOURCES[file].read_text(encoding="utf-8")):
        found.setdefault(what, line)
    allowed = ALLOWED.get(file, {})
    assert not (new := {what: line for what, line in found.items() if what not in allowed}), (
        f"{file} uses {new} (line): find another way, or give the reason in ALLOWED and in SECURITY.md"
    )
    assert not (gone := set(allowed) - set(found)), f"{file} does not use {gone} any more: take it off the list"


def test_the_list_names_files_that_are_there() -> None:
    assert set(ALLOWED) <= set(SOURCES)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle.loads"),
        ("import urllib.request", "import urllib.request"),
        ("def f():\n    import requests", "import requests"),
        ("from torch.distributed import rpc", "import torch.distributed.rpc"),
        ("import torch\ntorch.hub.load('a', 'b')", "torch.hub.load"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os as o\no.popen('ls')", "os.popen"),
        ("from os import system as s", "os.system"),
        ("import os\nos.unlink('x')", "os.unlink"),
        ("import subprocess as sp\nsp.run(['ls'])", "subprocess.run"),
        ("from subprocess import check_output", "subprocess.check_output"),
        ("f('ls', shell=True)", "shell=True"),
        ("f('ls', shell=x)", "shell=True"),
        ("import socket\ns = socket.socket()", "socket.socket"),
        ("import torch\ntorch.load('x')", "torch.load without weights_only=True"),
        ("import torch\ntorch.load('x', weights_only=False)", "torch.load without weights_only=True"),
        ("from torch import load\nload('x')", "torch.load without weights_only=True"),
        ("import torch.distributed as dist\ndist.all_gather_object([], 1)", "all_gather_object"),
        ("import torch.distributed as dist\ndist.broadcast_object_list([])", "broadcast_object_list"),
        ("import torch\ntorch.ops.load_library('x')", "torch.ops.load_library"),
        ("import multiprocessing\nmultiprocessing.Pool()", "multiprocessing.Pool"),
        ("import shutil\nshutil.rmtree('x')", "shutil.rmtree"),
        ("open('x', 'w')", "open for writing"),
        ("open('x', mode='ab')", "open for writing"),
        ("open('x', mode)", "open for writing"),
        ("path.open('w')", "open for writing"),
        ("path.write_text('x')", "write_text"),
        ("figure.savefig('x')", "savefig"),
    ],
)
def test_the_walk_sees(source: str, what: str) -> None:
    assert what in {name for _, name in uses(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ.get('X'); os.path.join('a', 'b'); os.getpid()",
        "import subprocess\nx: int = subprocess.DEVNULL",
        "import torch\ntorch.load('x', map_location='cpu', weights_only=True)",
        "open('x'); open('x', 'rb'); path.open(); path.read_text()",
        "import shutil\nshutil.which('ls')",
        "feedback.open(layout, site); model.eval(); re.compile('x')",
        "f('ls', shell=False)",
    ],
)
def test_the_walk_lets_pass(source: str) -> None:
    assert list(uses(source)) == []


def test_the_compiled_code_asks_the_system_for_nothing() -> None:
    """Check csrc for files, processes and connections: it includes torch's stable ABI and the language's library."""
    headers = set()
    for path in sorted((REPOSITORY / "csrc").rglob("*.*")):
        headers |= set(re.findall(r"#include <([^>]+)>", path.read_text(encoding="utf-8")))
    assert headers
    system = {"fstream", "iostream", "filesystem", "cstdio", "stdio.h", "unistd.h", "dlfcn.h", "fcntl.h", "spawn.h"}
    refused = {name for name in headers if name in system or name.startswith(("sys/", "arpa/", "netinet/"))}
    assert not refused


# The entry point: torch calls it in every program of the environment, whatever is left of the package.


def _partly_installed(folder: Path, files: list[str]) -> str:
    """Make a folder with the entry point, these files of the package, and stubs of Megatron-LM and DeepSpeed."""
    for file in files:
        target = folder / ROOT.name / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / file).read_bytes())
    info = folder / "flash_allreduce_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    for module in ("megatron/training/arguments", "megatron/training/global_vars", "deepspeed/runtime/engine"):
        (folder / f"{module}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{module}.py").write_text("imported = True\n")
    for package in ("deepspeed", "deepspeed/runtime"):  # else an installed DeepSpeed hides a folder without it
        (folder / package / "__init__.py").touch()
    return str(folder)


@pytest.mark.parametrize(
    ("files", "hidden", "count"),
    [
        (
            ["__init__.py", "aliases.py", "autoload.py", "integrations/__init__.py", "integrations/registry.py"],
            [],
            3,
        ),  # the rest of the package is missing, torch.ops' operators included
        (list(SOURCES), ["pydantic"], 2),  # a requirement is missing
    ],
    ids=["half the package", "no pydantic"],
)
def test_the_entry_point_is_harmless_when_anything_is_missing(
    files: list[str], hidden: list[str], count: int, tmp_path: Path
) -> None:
    """Check that torch and the frameworks import, and that a line of the log names each part that is not attached."""
    script = (
        # An editable installation would provide the missing parts here.
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"for name in {hidden}: sys.modules[name] = None\n"
        "import torch, megatron.training.arguments as a, megatron.training.global_vars, deepspeed.runtime.engine as e\n"
        "print(a.imported, e.imported, sum(type(f).__name__ == 'AfterImport' for f in sys.meta_path))"
    )
    path = _partly_installed(tmp_path, files)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ALLREDUCE_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "0"]
    lines = [line for line in done.stderr.splitlines() if "plugin is not attached: ModuleNotFoundError" in line]
    assert len(lines) == count, done.stderr


def test_every_exception_is_in_the_security_page() -> None:
    text = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    harmless = {"importlib.import_module", "socket.gethostname"}
    for file, allowed in ALLOWED.items():
        if set(allowed) - harmless:
            assert f"`{file}`" in text, f"SECURITY.md does not name {file}, which uses {', '.join(allowed)}"
