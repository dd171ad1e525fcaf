"""The layers of the package: imports have one direction, heavy ones stay in their rooms, importing has no effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_allreduce_plugin as fap

ROOT = Path(fap.__file__).parent
NAME = ROOT.name

# From the ground up, one folder or module a storey: each imports only from those above it in this list.
STOREYS = (
    "errors",
    "aliases",
    "environment",
    "autoload",
    "codec",
    "config",
    "policy",
    "telemetry",
    "collectives",
    "quality",
    "runtime",
    "api",
    "integrations",
    "cli",
    "__main__",
)
STOREY = {module: number for number, module in enumerate(STOREYS)}

# Package -> the rooms that may import it when their modules are imported.
HEAVY = {
    "megatron": (),  # not even its own room: megatron-core is imported when it is patched
    "deepspeed": (),  # the same
    "apex": (),  # the same
    "matplotlib": (),  # slow to import: when a figure is drawn
    "rich": ("cli",),
    "typer": ("cli",),
    "pydantic": ("config",),
    "numpy": (),
    "lab": (),  # in a checkout alone: inside the commands that need it, after cli/checkout.py has looked
}


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


#: Pairs of folders where one imports from the other, imports for the type checker included. Goal: 60 or fewer.
#: It only falls.
EDGES = 43
#: An import for the type checker from a lower to a higher storey: Site has a field for the tally of an engine.
UP_FOR_TYPES = {("policy", "telemetry")}

# The table of the integrations imports nothing: every folder may read it.
TABLE = f"{NAME}.integrations.registry"


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(path: Path, *, when_imported: bool, for_types: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of a file's imports: all of them, or those that run when the file is imported.

    Imports under `if TYPE_CHECKING:` never happen. They count if for_types is true.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if when_imported and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            test = ast.unparse(child.test) if isinstance(child, ast.If) else ""
            if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not for_types:
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide where a name comes from"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def own_modules(path: Path, *, for_types: bool = False) -> Iterator[tuple[int, str]]:
    for line, name in imports(path, when_imported=False, for_types=for_types):
        first, _, rest = name.partition(".")
        if first == NAME and not name.startswith(TABLE):
            yield line, rest.partition(".")[0]


def test_every_module_has_its_storey() -> None:
    """Check that a new module has a place in the table above."""
    assert {room(path) for path in sources()} - {"__init__"} == set(STOREY)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    if path == ROOT / "__init__.py":
        others = {other for _, other in own_modules(path)}
        assert others == {"aliases", "autoload"}, "__init__ loads its names when they are used"
        return
    mine = room(path)
    for line, other in own_modules(path):
        if other == mine:
            continue  # inside a folder
        assert other in STOREY, f"{path.name}:{line} imports {other}, a name of __init__; import its module"
        assert STOREY[other] < STOREY[mine], f"{path.name}:{line}: {mine} imports {other}, which is not below it"


def test_edges_between_folders_become_fewer() -> None:
    pairs = {(room(path), other) for path in sources() for _, other in own_modules(path, for_types=True)}
    edges = {(one, other) for one, other in pairs if one != other and (ROOT / one).is_dir() and (ROOT / other).is_dir()}
    assert len(edges) <= EDGES, f"{len(edges)}, at most {EDGES}: pass a value in, or move a function to its folder"
    assert {(one, other) for one, other in edges if STOREY[other] > STOREY[one]} == UP_FOR_TYPES


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_in_their_rooms_only(path: Path) -> None:
    for line, name in imports(path, when_imported=True):
        package = name.partition(".")[0].replace("pydantic_core", "pydantic")
        assert room(path) in HEAVY.get(package, (room(path),)), f"{path.name}:{line} imports {name}"


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


# Modules without a test file of their own name, and the files that test them.
TESTED_IN = {
    "integrations/ddp/attach": "integrations/ddp/test_ddp_attach",
    "integrations/fsdp/attach": "integrations/fsdp/test_fsdp_attach",
    "integrations/contract": "integrations/test_registry",
    "integrations/optimizer_steps": "integrations/ddp/test_ddp_attach",
    "integrations/tensor_parallel/transformers": "programs/test_programs_transformers",  # with real ones
    "integrations/deepspeed/engine": "integrations/deepspeed/test_engines",
    "integrations/deepspeed/exchanges": "integrations/deepspeed/test_experts",  # and deepspeed/test_attention
    "integrations/deepspeed/engine_seams": "integrations/deepspeed/test_stages",  # each stage calls its functions
    "integrations/deepspeed/reduction": "integrations/deepspeed/test_stages",
    "integrations/megatron/attention": "integrations/megatron/test_context_parallel",
    "integrations/megatron/tensor_parallel": "integrations/megatron/test_seams",  # one model has the seams of both
    "integrations/megatron/sequence_parallel": "integrations/megatron/test_seams",
    "integrations/megatron/refusals": "integrations/megatron/test_arguments",  # which refuses the listed ones
    "integrations/megatron/attach": "integrations/megatron/test_megatron_attach",
    "cli/output": "cli/test_bench",  # and every other command, piped
    "config/wording": "config/test_fields",  # the sentences of its mistakes
    "cli/machine": "cli/test_bench",  # its results name the machine of the measurement
}
SMALL = 40  # lines: such a module is tested with its users


def test_tests_mirror_the_package() -> None:
    """Check that a module has a test file of its name; the modules of a command share that of the command."""
    tests = Path(__file__).parent
    names = {path.stem for path in tests.rglob("test_*.py")}
    without = []
    for path in sources():
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        if path.stem.startswith("__") or len(path.read_text().splitlines()) <= SMALL:
            continue
        if module in TESTED_IN:
            assert (tests / f"{TESTED_IN[module]}.py").exists(), f"{TESTED_IN[module]} is to test {module}"
            continue
        command = path.parent.name if module.startswith("cli/") else path.stem
        if not {f"test_{path.stem}", f"test_{command}"} & names:
            without.append(module)
    assert not without, f"no test file has the name of {without}"


def test_importing_the_package_imports_next_to_nothing() -> None:
    loaded = loaded_by("import flash_allreduce_plugin")
    assert not loaded & {"torch", "pydantic", "numpy", *HEAVY}
    assert {name for name in loaded if name.startswith(NAME)} == {
        NAME,
        f"{NAME}.aliases",
        f"{NAME}.autoload",
        f"{NAME}.integrations",
        TABLE,
    }


def test_the_collectives_need_no_framework() -> None:
    loaded = loaded_by("import flash_allreduce_plugin as fap; fap.all_reduce, fap.encode, fap.FlashConfig, fap.stats")
    assert not loaded & {"megatron", "deepspeed", "matplotlib", "rich", "typer"}


def test_every_public_name_is_there() -> None:
    for name in fap.__all__:
        assert getattr(fap, name) is not None
    assert set(dir(fap)) >= set(fap.__all__)
    with pytest.raises(AttributeError, match="no attribute 'all_to_some'"):
        _ = fap.all_to_some  # type: ignore[attr-defined]
