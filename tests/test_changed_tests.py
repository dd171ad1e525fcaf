"""scripts/changed_tests.py finds the tests of a changed file, and nothing that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import changed_tests

ROOT = Path(__file__).resolve().parent.parent
TESTS = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("flash_allreduce_plugin/collectives/flat.py", {"tests/collectives/test_flat.py"}),
        ("flash_allreduce_plugin/cli/plan/cost_model.py", {"tests/cli/test_plan.py", "tests/cli/test_cost_model.py"}),
        ("flash_allreduce_plugin/integrations/pipelining.py", {"tests/integrations/test_pipelining.py"}),
        ("flash_allreduce_plugin/integrations/megatron/__init__.py", {"tests/integrations/megatron"}),
        ("flash_allreduce_plugin/config/wording.py", {"tests/config"}),
        ("lab/benchmarks/netlab.py", {"tests/lab/test_netlab.py"}),
        ("csrc/cpu/codec_kernels.h", {"tests/codec"}),
        ("tests/policy/test_plan.py", {"tests/policy/test_plan.py"}),
        ("LICENSE", set()),
    ],
)
def test_a_changed_file_has_its_tests(path: str, expected: set[str]) -> None:
    found = changed_tests.tests_of(path, TESTS)
    assert expected <= found and (found or not expected)
    assert all((ROOT / test).exists() for test in found)


def test_the_gates_and_the_tests_of_folders_exist() -> None:
    named = [*changed_tests.GATES, *(test for tests in changed_tests.OF_FOLDERS.values() for test in tests)]
    assert all((ROOT / test).exists() for test in named)


def test_a_base_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match="nowhere is no commit of this repository; fetch it"):
        changed_tests.main(["--base", "nowhere"])


def test_the_gates_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    changed_tests.main(["--base", "HEAD"])
    assert capsys.readouterr().out.split()[:3] == list(changed_tests.GATES)
