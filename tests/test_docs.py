"""What the documents and messages say, where the code can be asked whether it is true."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from importlib.metadata import metadata
from pathlib import Path

import pytest

from flash_allreduce_plugin import FlashConfig
from flash_allreduce_plugin.config import refusals
from flash_allreduce_plugin.errors import install_command
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.deepspeed import section

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flash_allreduce_plugin", "docs", "examples", "scripts", "lab")
# Sources of other projects that comments and pages name, and names that an example gives to a reader's own file.
NOT_OURS = {
    "pretrain_gpt.py",
    "layers.py",
    "training/initialize.py",
    "megatron/training.py",
    "pretrain.py",
    "_strategy_lib.py",
    "bwc.py",
    "complete_nlp_example.py",
    "run_clm.py",
    "runtime/comm/coalesced_collectives.py",
    "csrc/includes/quantization_utils.h",
    "csrc/core/allreduce.h",
    "csrc/quickreduce/quick_reduce_impl.cuh",
    "aiter/ops/flydsl/kernels/quick_allreduce_codec.py",
    "flashinfer/comm/quantized_allreduce.py",
    "taco.cu",
    "torchft/quantization.py",
    "src/device/common_kernel.h",
    "CUDASymmetricMemoryUtils.cpp",
    "malloc.h",
    "try_it.py",
    "script.py",
    "sitecustomize.py",
}


def texts() -> dict[str, str]:
    """Everything that a user reads or that speaks to one, by its name."""
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".sh")]
    others = ("README.md", "SECURITY.md", "CHANGELOG.md", "Makefile", "noxfile.py", "setup.py")
    files += [ROOT / name for name in others]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def test_nobody_is_told_to_install_the_package_by_its_name() -> None:
    """No index has it, and a stranger could register the name."""
    found = [
        f"{name}: {line.strip()}"
        for name, text in texts().items()
        for line in text.splitlines()
        if re.search(r"install\b.*[\s'\"](flash[-_]allreduce[-_]plugin|{PACKAGE})(\[|['\"`]|$)", line)
    ]
    assert not found


def test_the_command_to_install_is_the_readmes_and_its_extras_exist() -> None:
    command, with_cli = (re.findall(r"`(.*)`", install_command(extras))[0] for extras in ("", "cli"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{command}`" in readme and f"`{with_cli}`" in readme
    declared = metadata("flash-allreduce-plugin").get_all("Provides-Extra") or []
    for name, text in texts().items():
        for extras in re.findall(r"\"\.\[([\w,]+)\]\"|install_command\('([\w,]+)'\)", text):
            assert set("".join(extras).split(",")) <= set(declared), name


def test_megatrons_start_line_has_the_number_of_seams() -> None:
    pytest.importorskip("megatron.core")
    [said] = re.findall(r"^flash all-reduce: (\d+) seams attached", texts()["docs/megatron.md"], flags=re.MULTILINE)
    seams = megatron.report()
    assert int(said) == len(seams) - len([name for name in seams if "transformer_engine" in name])


def test_deepspeeds_start_lines_have_the_default_of_min_bytes() -> None:
    """In their sections there is none."""
    said = [
        (name, int(number))
        for name, text in texts().items()
        if name.endswith(".md")
        for number in re.findall(r"^ *flash all-reduce: attached to .* buckets from (\d+) bytes$", text, re.MULTILINE)
    ]
    assert len(said) >= 4
    assert {number for _, number in said} == {FlashConfig().min_bytes}, said


def test_deepspeeds_keys_are_all_fields_that_act_there() -> None:
    keys = re.findall(r"^## Keys$(.*?)^## ", texts()["docs/deepspeed.md"], flags=re.MULTILINE | re.DOTALL)[0]
    fields, others = keys.split("An unknown key", 1)
    lacks = refusals.with_megatrons(section.LACKS, (*section.SENDS, *section.EXCHANGES, *section.OF_EXCHANGES))
    for field in FlashConfig.model_fields:
        assert (f"`{field}`" in fields) == (field not in lacks), field
    assert "`grad_bits`" in others


def test_the_readme_is_read_in_two_minutes_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 95
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)", readme)
    for page, anchor in links:
        text = (ROOT / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, f"{page}#{anchor}"
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == {
        page.removeprefix("docs/") for page, _ in links if page.startswith("docs/")
    }


def test_the_readmes_script_prints_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [(script, says)] = re.findall(r"^```python\n(.*?)^```\n+```\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "try_it.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "try_it.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == says


def prose(path: Path) -> str:
    """Return the comments and docstrings of a source, or the whole of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".h", ".cpp", ".cu"):
        return "\n".join(re.findall(r"//.*", text))
    if path.suffix != ".py":
        return text if path.suffix == ".md" else "\n".join(re.findall(r"#.*", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join([*comments, *docstrings])


def sources_named(text: str) -> list[str]:
    """Return every name of a source file in `text`, with the folders that are written before it."""
    return re.findall(r"(?<![\w/.*<>{}-])((?:[\w-]+/)*[\w-]+\.(?:py|h|cpp|cuh?))\b(?![(\w])", text)


def names_of(files: Iterable[str]) -> set[str]:
    """Return each path and each of its ends: "codec/ops.py" and "ops.py" name flash_allreduce_plugin/codec/ops.py."""
    return {"/".join(parts[start:]) for parts in (file.split("/") for file in files) for start in range(len(parts))}


def test_source_files_that_comments_and_docs_name_exist() -> None:
    assert sources_named("see codec/ops.py, ../csrc/a.h, x.cu.") == ["codec/ops.py", "x.cu"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split() if (ROOT / name).is_file()]
    known = names_of(str(file.relative_to(ROOT)) for file in files) | NOT_OURS
    endings = (".py", ".md", ".h", ".cpp", ".cu", ".sh")
    read = [file for file in files if file.suffix in endings or file.name == "Makefile"]
    read.remove(ROOT / "CHANGELOG.md")  # names files of their day
    suspects = [file for file in read if set(sources_named(file.read_text(encoding="utf-8"))) - known]
    missing = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in suspects
        if (found := {*sources_named(prose(file))} - known)
    }
    assert not missing
    assert sources_named(prose(ROOT / "csrc" / "ops.cpp")) == ["flash_allreduce_plugin/codec/ops.py"]


def test_targets_and_sessions_that_are_named_exist() -> None:
    """`make X` in the Makefile, `nox -s X` in noxfile.py."""
    made = set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets = {name for names in made for name in names.split()}
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r"^@(?:here|above|nox\.session.*)\ndef (\w+)", noxfile, flags=re.MULTILINE)
    names = {name.replace("_", "-") for name in sessions}
    assert len(names) > 10 and {"demo", "test", "test-all", "lint", "format", "bench"} <= targets
    files = {**texts(), ".ci/run": (ROOT / ".ci" / "run").read_text()}
    files |= {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    del files["CHANGELOG.md"]  # names targets of their day
    wrong = []
    for file, text in files.items():
        for command, known in ((r"(?:^|`)make ", targets), (r"nox -s ", names)):
            named = re.findall(command + "([a-z][a-z-]*)", text, flags=re.MULTILINE)
            wrong += [f"{file}: {name}" for name in named if name not in known]
    assert not wrong
