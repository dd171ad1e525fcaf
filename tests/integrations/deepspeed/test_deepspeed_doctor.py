"""`flash-allreduce doctor` with DeepSpeed: functions are checked as they are, not as the entry point leaves them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flash_allreduce_plugin.integrations.deepspeed import engine

pytest.importorskip("typer")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_every_function_would_be_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_allreduce_plugin", "doctor", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    seams = {line["name"]: line["level"] for line in found if line["section"] == "DeepSpeed seams"}
    assert seams == {seam.id: "ok" for seam in engine.seams()}, done.stdout
    [entry_point] = [line["text"] for line in found if line["section"] == "autoload"]
    assert entry_point == "registered; torch has called it"
