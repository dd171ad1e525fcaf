"""Gates of the repository: sizes, words, names and links. They read text, import no torch, and take seconds.

A ceiling is the number of the day it was set; the comment behind it is the design's goal. Lower a ceiling when the
number falls. Do not raise it.
"""

from __future__ import annotations

import ast
import os.path
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flash_allreduce_plugin"
COUNTED = (PACKAGE, "lab", "scripts", "csrc")  # folders whose docstrings and comments are counted
CODE = (".py", ".h", ".cpp", ".cu")
TEXT = (*CODE, ".md", ".sh", ".toml", ".yaml", "Makefile", ".ci/run", "MANIFEST.in")

CEILINGS = {
    "files at the top": 13,
    "folders at the top": 10,
    "files at the top of the package": 7,  # 6
    "words of the README": 500,
    "words of docs": 24000,
    "words of the changelog": 600,
}

#: Per 1,000 words of docstrings and comments.
HABITS = {
    # habit: (pattern, ceiling)  # goal: as few as torchtitan has
    "what": (r"what", 0.3),  # 0.1
    "of which, whose": (r"of which|whose", 0.5),
    "go, travel": (r"go|goes|going|gone|travel\w*", 0.1),
    "anew, alike, at once, by itself": (r"anew|alike|at once|by itself", 0.2),
    "beside": (r"beside", 0.1),
    "somebody, nobody": (r"somebody|nobody", 0.1),
}
#: First words of a docstring that make a riddle of it, and how many such docstrings there are. Goal: 0.
RIDDLES = ("What", "Whether", "Of", "Where", "Those", "As")
RIDDLES_CEILING = 0

MOST_LINES_OF_A_FILE = 600
#: Longer files. They may shrink. Split one when you add to it.
LONG_FILES = {
    "csrc/codec_math.h": 674,
    "csrc/cuda/codec_warp.h": 1104,
    "flash_allreduce_plugin/codec/reference.py": 771,
    "tests/api/test_sends.py": 629,
    "tests/cli/test_cost_model.py": 656,
    "tests/integrations/megatron/test_data_parallel.py": 612,
    "tests/integrations/megatron/test_megatron_parameters.py": 604,
    "tests/integrations/megatron/test_transformer_engine.py": 658,
}
MOST_LINES_OF_A_FUNCTION = 60
#: Longer functions. They may shrink.
LONG_FUNCTIONS = {
    "flash_allreduce_plugin/api/reductions.py:all_reduce": 62,
    "flash_allreduce_plugin/api/reductions.py:reduce_scatter": 63,
    "flash_allreduce_plugin/api/reductions.py:all_gather": 64,
    "flash_allreduce_plugin/cli/main.py:demo": 70,
    "flash_allreduce_plugin/collectives/all_to_all.py:all_to_all": 70,
    "flash_allreduce_plugin/collectives/broadcast.py:broadcast": 71,
    "flash_allreduce_plugin/policy/plan.py:make_plan": 67,
    "lab/benchmarks/pretraining.py:train": 61,
    "tests/collectives/test_replicated_params.py:reduced_among": 65,
    "tests/integrations/fsdp/test_fsdp2.py:with_replicas": 67,
}

#: Files of other projects that comments and pages name, and files that a reader makes.
NOT_OURS = {
    # Megatron-LM
    *("pretrain_gpt.py", "layers.py", "megatron/training.py", "training/initialize.py"),
    # DeepSpeed
    *("runtime/comm/coalesced_collectives.py", "csrc/includes/quantization_utils.h", "bwc.py"),
    # torch, NCCL, glibc, Python
    *("CUDASymmetricMemoryUtils.cpp", "src/device/common_kernel.h", "malloc.h", "sitecustomize.py"),
    # codecs of others
    *("csrc/core/allreduce.h", "csrc/quickreduce/quick_reduce_impl.cuh", "taco.cu", "torchft/quantization.py"),
    *("aiter/ops/flydsl/kernels/quick_allreduce_codec.py", "flashinfer/comm/quantized_allreduce.py"),
    # examples of transformers, Accelerate, Lightning and NeMo
    *("run_clm.py", "complete_nlp_example.py", "_strategy_lib.py", "pretrain.py"),
    # a reader's
    *("try_it.py", "script.py", "FILE.png", "demo.png", "sweep.png"),
}


@cache
def tracked() -> tuple[str, ...]:
    """Return the paths of the repository's files, including uncommitted ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(sorted(name for name in set(listed.splitlines()) if (ROOT / name).is_file()))


def of_folders(*folders: str, ending: str | tuple[str, ...] = CODE) -> list[str]:
    return [name for name in tracked() if name.split("/")[0] in folders and name.endswith(ending)]


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def definitions(name: str) -> tuple[tuple[str, int, str], ...]:
    """Return (name, lines, docstring) of a Python file, its classes and its functions. Lines are those of functions."""

    def walk(body: list[ast.stmt], inside: str) -> Iterator[tuple[str, int, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = 0 if isinstance(node, ast.ClassDef) else (node.end_lineno or 0) - node.lineno + 1
                yield f"{inside}{node.name}", lines, ast.get_docstring(node) or ""
                yield from walk(node.body, f"{inside}{node.name}.")
                continue
            for part in ("body", "orelse", "finalbody"):
                yield from walk(getattr(node, part, []), inside)
            for handler in getattr(node, "handlers", []):
                yield from walk(handler.body, inside)

    tree = ast.parse(text_of(name))
    return (("", 0, ast.get_docstring(tree) or ""), *walk(tree.body, ""))


def prose(name: str) -> str:
    """Return the comments and docstrings of a source, or the whole of a page."""
    if name.endswith(".md"):
        return text_of(name)
    if name.endswith((".h", ".cpp", ".cu")):
        return "\n".join(re.findall(r"//.*", text_of(name)))
    comments = re.findall(r"(?:^|(?<=\s))#[ :!].*", text_of(name), flags=re.MULTILINE)
    docstrings = [docstring for *_, docstring in definitions(name)] if name.endswith(".py") else []
    return "\n".join([*comments, *docstrings])


def words(text: str) -> int:
    """Count as wc does."""
    return len(text.split())


# ---- sizes ----


def test_files_and_folders_at_the_top() -> None:
    count = {
        "files at the top": sum("/" not in name for name in tracked()),
        "folders at the top": len({name.split("/")[0] for name in tracked() if "/" in name}),
        "files at the top of the package": sum(name.split("/")[:-1] == [PACKAGE] for name in tracked()),
    }
    above = {what: (number, CEILINGS[what]) for what, number in count.items() if number > CEILINGS[what]}
    assert not above, f"(now, ceiling): {above}: find a folder for the new one"


def test_words_of_the_documents() -> None:
    count = {
        "words of the README": words(text_of("README.md")),
        "words of docs": sum(words(text_of(page)) for page in of_folders("docs", ending=".md")),
        "words of the changelog": words(text_of("CHANGELOG.md")),
    }
    above = {what: (number, CEILINGS[what]) for what, number in count.items() if number > CEILINGS[what]}
    assert not above, f"(now, ceiling): {above}: take away as much as you add"


def _held(found: dict[str, int], known: dict[str, int], most: int) -> list[str]:
    """Return a sentence for each thing that is too long, grew, or is on the list of long things without need."""
    longer = [
        f"{name} has {lines} lines; at most {known.get(name, most)}: split it"
        for name, lines in found.items()
        if lines > known.get(name, most)
    ]
    return longer + [f"{name} is short enough: take it off the list" for name in known if found.get(name, 0) <= most]


def test_files_have_at_most_600_lines() -> None:
    found = {name: text_of(name).count("\n") for name in tracked() if name.endswith(CODE)}
    assert not (bad := _held(found, LONG_FILES, MOST_LINES_OF_A_FILE)), "\n".join(bad)


def test_functions_have_at_most_60_lines() -> None:
    found = {
        f"{name}:{function}": lines
        for name in (name for name in tracked() if name.endswith(".py"))
        for function, lines, _ in definitions(name)
    }
    assert not (bad := _held(found, LONG_FUNCTIONS, MOST_LINES_OF_A_FUNCTION)), "\n".join(bad)


# ---- style ----


def habits_of(text: str) -> dict[str, float]:
    """Count each habit in a text, per 1,000 words of letters."""
    text = text.lower()
    total = len(re.findall(r"[a-z']+", text))
    return {habit: 1000 * len(re.findall(rf"\b(?:{one})\b", text)) / total for habit, (one, _) in HABITS.items()}


def test_the_style_guides_words_become_fewer() -> None:
    assert habits_of("What it says goes to nobody beside us")["what"] == 125
    found = habits_of("\n".join(map(prose, of_folders(*COUNTED))))
    above = {habit: f"{found[habit]:.2f} > {most}" for habit, (_, most) in HABITS.items() if found[habit] > most}
    assert not above, f"per 1,000 words of docstrings and comments: {above}"


def test_docstrings_that_begin_with_a_riddle_become_fewer() -> None:
    found = [
        f"{name}:{of} {docstring.splitlines()[0]}"
        for name in of_folders(*COUNTED, ending=".py")
        for of, _, docstring in definitions(name)
        if docstring and re.split(r"\W", docstring, maxsplit=1)[0] in RIDDLES
    ]
    assert len(found) <= RIDDLES_CEILING, f"{len(found)}, at most {RIDDLES_CEILING}: begin with a verb or the thing"


def test_no_formatter_touches_a_drawing() -> None:
    assert "\nReflowComments: false\n" in text_of(".clang-format")
    layout = prose("csrc/wire_format.h").splitlines()
    rows = [number for number, line in enumerate(layout) if re.match(r"//   \w+ +\| .* \|$", line)]
    assert len(rows) >= 4, "the layouts of a record are drawn at the top of csrc/wire_format.h"
    widths = [line for line in layout if re.match(r"//  {14,}\d bytes? ", line)]
    assert len(widths) >= 3, "each field of the drawing has its bytes below it"
    assert all(f"//   {layout}\n" in text_of("csrc/codec_math.h") for layout in ("asymmetric", "symmetric", "compact"))


# ---- names and links ----

ENDINGS = "py|h|cpp|cuh?|md|sh|patch|toml|yaml|png"
FOLDERS = f"{PACKAGE}|lab|scripts|csrc|tests|docs|patches|examples"


def files_named(text: str) -> set[str]:
    """Return every name of a file in a text, with the folders that are written before it."""
    return set(re.findall(rf"(?<![\w/.*<>{{}}$~-])((?:[\w-]+/)*[\w-]+\.(?:{ENDINGS}))\b(?![(\w/*])", text))


def folders_named(text: str) -> set[str]:
    """Return every path in a text that begins with a folder of the repository, without the ending of a file."""
    return set(re.findall(rf"(?<![\w/.<{{-])((?:{FOLDERS})/(?:[\w-]+/)*[\w-]*)(?![\w/]|\.\w)", text))


def commands_named(text: str) -> set[str]:
    """Return every module of ours that a text runs with `python -m`."""
    return set(re.findall(rf"python -m ((?:{PACKAGE}|lab|scripts)(?:\.\w+)*)", text))


@cache
def known_names() -> frozenset[str]:
    """Return each path and each of its ends: codec/ops.py and ops.py name flash_allreduce_plugin/codec/ops.py."""
    paths = [name.split("/") for name in tracked()]
    return frozenset("/".join(path[start:]) for path in paths for start in range(len(path))) | NOT_OURS


def test_files_and_folders_that_comments_and_pages_name_exist() -> None:
    assert files_named("see codec/ops.py, ../csrc/a.h, x.cu.") == {"codec/ops.py", "x.cu"}
    assert folders_named("lab/soak/ or /lab/x, docs/use/a.md") == {"lab/soak/"}
    missing = {
        name: bad
        for name in tracked()
        if name.endswith(TEXT)
        and (
            bad := [
                *sorted(files_named(prose(name)) - known_names()),
                *(one for one in folders_named(prose(name)) if not any(path.startswith(one) for path in tracked())),
            ]
        )
    }
    assert not missing, "these names have no file; one of another project: NOT_OURS"


def test_modules_that_commands_name_exist() -> None:
    alias = f"{PACKAGE}.megatron"  # flash_allreduce_plugin/aliases.py
    missing = {
        name: bad
        for name in tracked()
        if name.endswith(TEXT)
        and (
            bad := [
                module
                for module in commands_named(text_of(name)) - {alias}
                if not {f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py")} & set(tracked())
            ]
        )
    }
    assert not missing


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [name for name in tracked() if name.endswith(".md")])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)\s]*)\)", text_of(page)):
        target, _, anchor = link.partition("#")
        to = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
        assert to in tracked() or any(name.startswith(f"{to}/") for name in tracked()), f"{page}: {link}"
        assert not anchor or anchor in anchors(to), f"{page}: {link}"


def test_the_architecture_page_names_every_folder_and_only_modules_that_exist() -> None:
    rows = re.findall(r"^\| `(\w+)/`.*?\| (.*) \|$", text_of("docs/inside/architecture.md"), flags=re.MULTILINE)
    folders = {name.split("/")[1] for name in of_folders(PACKAGE, ending=".py") if name.count("/") > 1}
    assert {folder for folder, _ in rows} == folders
    for folder, modules in rows:
        inside = f"{PACKAGE}/{folder}/"
        known = {one.removeprefix(inside).split("/")[0].removesuffix(".py") for one in tracked() if inside in one}
        assert not (bad := {*re.findall(r"`(\w+)`", modules)} - known), f"{folder}/: {bad}"


def test_functions_that_the_tour_names_exist() -> None:
    tour = text_of("docs/inside/tour.md")
    named = {(file, one) for file, one in re.findall(r"`([\w/]+\.py)`: `(\w+)`", tour)}
    named |= {(file, one) for file, one in re.findall(r"`([\w/]+\.py)`: `\w+`(?:,| and) `(\w+)`", tour)}
    named |= {(file, one) for one, file in re.findall(r"`(\w+)` of `([\w/]+\.py)`", tour)}
    assert len(named) >= 20
    for file, one in named:
        [path] = [name for name in tracked() if name in (file, f"{PACKAGE}/{file}")]
        assert one in {name.rpartition(".")[2] for name, *_ in definitions(path)}, f"{file} has no {one}"
