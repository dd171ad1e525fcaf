"""Statements of the documents and messages, checked against the code where possible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

from flash_allreduce_plugin import FlashConfig
from flash_allreduce_plugin.errors import install_command
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.deepspeed import section

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flash_allreduce_plugin", "docs", "examples", "scripts", "lab")


def texts() -> dict[str, str]:
    """Return every text that a user reads, by its name."""
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".sh")]
    others = ("README.md", "SECURITY.md", "CHANGELOG.md", "Makefile", "noxfile.py", "setup.py")
    files += [ROOT / name for name in others]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def test_no_message_installs_the_package_by_its_name() -> None:
    """Check the texts: no index has the package, and a stranger could register its name."""
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
    [said] = re.findall(r"^flash all-reduce: (\d+) seams attached", texts()["docs/use/megatron.md"], flags=re.MULTILINE)
    seams = megatron.report()
    assert int(said) == len(seams) - len([name for name in seams if "transformer_engine" in name])


def test_deepspeeds_start_lines_have_the_default_of_min_bytes() -> None:
    """Check the start lines; their sections set no min_bytes."""
    said = [
        (name, int(number))
        for name, text in texts().items()
        if name.endswith(".md")
        for number in re.findall(r"^ *flash all-reduce: attached to .* buckets from (\d+) bytes$", text, re.MULTILINE)
    ]
    assert len(said) >= 4
    assert {number for _, number in said} == {FlashConfig().min_bytes}, said


def test_deepspeeds_keys_are_all_fields_that_act_there() -> None:
    keys = re.findall(r"^## Keys$(.*?)^## ", texts()["docs/use/deepspeed.md"], flags=re.MULTILINE | re.DOTALL)[0]
    fields, others = keys.split("An unknown key", 1)
    lacks = section.lacking({}, splits=True)
    for field in FlashConfig.model_fields:
        assert (f"`{field}`" in fields) == (field not in lacks), field
    assert "`grad_bits`" in others


def test_the_readme_is_read_in_two_minutes_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90 and max(map(len, readme.splitlines())) <= 120
    links = re.findall(r"(?<!!)\[[^\]]+\]\((?!http)([^)#]+)(?:#([^)]+))?\)", readme)  # not its picture
    for page, anchor in links:
        text = (ROOT / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, f"{page}#{anchor}"
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages == {page for page, _ in links if page.startswith("docs/")}


def test_the_readmes_script_prints_the_readmes_output(tmp_path: Path) -> None:
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


def test_targets_and_sessions_that_are_named_exist() -> None:
    """Check `make X` against the Makefile, `nox -s X` against noxfile.py."""
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
