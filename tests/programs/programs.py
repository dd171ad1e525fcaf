"""Programs without a reference to the plugin, run as users run them: without it, served by FLASH_ALLREDUCE_ATTACH,
and with the same hook registered by hand.

Two ranks on gloo and the CPU, started by torchrun. Nothing of a program is changed: "by hand" is a sitecustomize. After
the wrapper's constructor it does the steps that docs/use/torch.md tells a user to write there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import flash_allreduce_plugin as fap

ROOT = Path(fap.__file__).parents[1]
PREFIX = "flash all-reduce: "

SETTINGS = {"FLASH_ALLREDUCE_BITS": "8", "FLASH_ALLREDUCE_MIN_BYTES": "0"}
OFF = {"FLASH_ALLREDUCE_AUTOLOAD": "0"}
# 8 bits, 4 bytes of metadata for each group of 128, of float32; ends of buckets are a little more.
MOST_SENT = 0.27

# For FSDP2 the module and the name by which programs import it. A list of modules is one group of parameters.
BY_HAND = """
import functools, os, sys
from flash_allreduce_plugin.autoload import AfterImport

def ddp():
    from torch.nn.parallel.distributed import DistributedDataParallel
    theirs = DistributedDataParallel.__init__

    @functools.wraps(theirs)
    def __init__(self, *arguments, **keywords):
        import flash_allreduce_plugin as fap
        theirs(self, *arguments, **keywords)
        self.register_comm_hook(None, fap.ddp_hook())

    DistributedDataParallel.__init__ = __init__

def fsdp():
    module = sys.modules["torch.distributed.fsdp"]  # no attribute of its parent yet
    theirs = module.fully_shard

    @functools.wraps(theirs)
    def fully_shard(model, *arguments, **keywords):
        import flash_allreduce_plugin as fap
        result = theirs(model, *arguments, **keywords)
        for each in model if isinstance(model, list) else [model]:
            each.set_custom_reduce_scatter(fap.FlashReduceScatter())
        return result

    module.fully_shard = fully_shard

WAITS = {"ddp": ("torch.nn.parallel.distributed", ddp), "fsdp": ("torch.distributed.fsdp", fsdp)}
if "RANK" in os.environ:
    module, action = WAITS[os.environ["BY_HAND"]]
    AfterImport([module], action).install()
"""


@dataclass
class Run:
    """A program's output on both streams, and rank 0's counts by site; folder: where it ran."""

    folder: Path
    printed: str
    sites: dict[str, Counter[str]]

    @property
    def lines(self) -> list[str]:
        """Return the plugin's lines, in the order in which they came."""
        return [line[line.index(PREFIX) :] for line in self.printed.splitlines() if PREFIX in line]

    @property
    def attached(self) -> list[str]:
        return [line for line in self.lines if line.startswith(f"{PREFIX}attached to")]


def without(folder: Path, *words: str) -> Run:
    """Run `torchrun --nproc-per-node 2 <words>` in `folder`, with the plugin installed and switched off."""
    run = torchrun(folder, words, OFF)
    assert run.lines == [] and run.sites == {}
    return run


def attached(folder: Path, kind: str, *words: str) -> Run:
    """Run the same with FLASH_ALLREDUCE_ATTACH=kind, in 8 bits."""
    return torchrun(folder, words, {"FLASH_ALLREDUCE_ATTACH": kind, **SETTINGS})


def by_hand(folder: Path, kind: str, *words: str) -> Run:
    """Run the same with the hook registered by hand."""
    extra = folder / "by-hand"
    extra.mkdir(exist_ok=True)
    (extra / "sitecustomize.py").write_text(BY_HAND)
    return torchrun(folder, words, {"BY_HAND": kind, **OFF, **SETTINGS}, extra)


def torchrun(folder: Path, words: tuple[str, ...], variables: dict[str, str], *path: Path) -> Run:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1")
    return start(folder, ("-m", *launcher, *words), variables, *path)


def start(folder: Path, words: tuple[str, ...], variables: dict[str, str], *path: Path, timeout: float = 600) -> Run:
    """Run `python <words>` in `folder`; path: on PYTHONPATH, too. Raise AssertionError if it fails or is too slow."""
    # As pip installs it, whatever is installed here.
    info = folder / "plugin" / "flash_allreduce_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    log, printed = folder / "flash.jsonl", folder / "printed.txt"
    log.unlink(missing_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_ALLREDUCE_") and k != "RANK"}
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(info.parent), *map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "FLASH_ALLREDUCE_LOG": str(log),
        **variables,
    }
    with printed.open("w") as file:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=file, stderr=file, env=environment)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process.pid)
            process.wait()
    text = printed.read_text()
    assert status == 0, f"{'no end in time' if status is None else f'exit status {status}'}:\n{text[-6000:]}"
    return Run(folder, text, _counted(log))


def _kill(pid: int) -> None:
    """Kill a process and its children, ranks in sessions of their own too; none of them if it has ended."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        _kill(child)


def _counted(log: Path) -> dict[str, Counter[str]]:
    """Return the sums of a log's numbers, without gathers of parameters that no width quantizes."""
    sites: dict[str, Counter[str]] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        for name, counts in json.loads(line).get("sites", {}).items():
            numbers = {key: counts[key] for key in ("calls", "quantized", "bytes_sent", "bytes_full_precision")}
            sites.setdefault(name, Counter()).update(numbers)
    return {name: counts for name, counts in sites.items() if name != "fsdp.parameters" or counts["quantized"]}


# fmt: off
WORDS = ["the", "a", "red", "green", "old", "small", "cat", "dog", "bird", "house", "sees", "likes", "finds", "over"]
# fmt: on


def text(lines: int) -> str:
    """Return lines of twelve words."""
    chance = random.Random(1)
    return "\n".join(" ".join(chance.choices(WORDS, k=12)) for _ in range(lines))


def same_bits_for_less(served: Run, hand: Run, site: str) -> None:
    """Check that the attached hook gave the same counts as the one by hand, and sent a quarter of the bytes."""
    assert served.sites == hand.sites and list(served.sites) == [site]
    counts = served.sites[site]
    assert counts["quantized"] == counts["calls"] > 0
    assert counts["bytes_sent"] < MOST_SENT * counts["bytes_full_precision"]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where a package cannot be imported."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}: nox -s test-programs")


def source(repository: str, tag: str, variable: str, path: str, folder: Path) -> Path:
    """Return a file that no package has: of the checkout that `variable` names, else from GitHub, else skip.

    repository: "owner/name". path: in the repository. folder: where a file from GitHub is put.
    """
    checkout = os.environ.get(variable)
    if checkout:
        found = Path(checkout).absolute() / path
        assert found.is_file(), f"{variable}={checkout} has no {path}"
        return found
    url = f"https://raw.githubusercontent.com/{repository}/{tag}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            text = answer.read()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"{url} cannot be read ({error}), and {variable} names no checkout")
    found = folder / Path(path).name
    found.write_bytes(text)
    return found
