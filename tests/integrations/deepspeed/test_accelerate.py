"""Accelerate: the section in the JSON that it is given, as a file or as a dict, and nothing else in the script."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from unmodified import launch

MISSING = [name for name in ("deepspeed", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}: nox -s test-hf"),
    pytest.mark.timeout(300),
]

# Who writes it knows nothing of the plugin. PartialState(cpu=True): else each rank takes itself for the only one.
SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState

PartialState(cpu=True)
how, path = sys.argv[1:]
if how == "launch":
    accelerator = Accelerator()
elif how == "file":
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=path))
else:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json.load(open(path))))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(96, 64)
model, optimizer, batches = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(inputs, batch_size=4))
losses = []
for _ in range(2):
    for x in batches:
        with accelerator.accumulate(model):
            loss = (model(x) - x.flip(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    print("losses", json.dumps(losses))
"""
BATCHES = 2 * 96 // 4 // 2  # of a rank: the two have different ones
# Values that Accelerate fills in, and those that it passes on.
CONFIGURATION = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}
SECTION = {"bits": 8, "min_bytes": 0}
ATTACHED = (
    "flash all-reduce: attached to DeepSpeedEngine with DeepSpeedZeroOptimizer, ZeRO stage 2: gradients in 8 bits, "
    "groups of 128, buckets from 0 bytes"
)


def train(folder: Path, how: str, section: dict[str, int] | None) -> tuple[list[float], list[str], list[list[int]]]:
    """Return the mean losses of both ranks, the plugin's lines, and [quantized, calls] of each rank's gradients."""
    configuration = CONFIGURATION if section is None else {**CONFIGURATION, "flash_allreduce": section}
    (folder / "ds.json").write_text(json.dumps(configuration))
    (folder / "script.py").write_text(SCRIPT)
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    if how == "launch":
        launcher = ["accelerate.commands.launch", "--use_deepspeed", "--deepspeed_config_file", "ds.json"]
        launcher += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    printed, counted = launch(folder, *launcher, "script.py", how, "ds.json", cwd=folder)
    lines = printed.splitlines()
    [losses] = [line.removeprefix("losses ") for line in lines if line.startswith("losses ")]
    ours = [line for line in lines if line.startswith("flash")]
    gradients = [rank["sites"].get("deepspeed.stage2.gradients", {"quantized": 0, "calls": 0}) for rank in counted]
    return json.loads(losses), ours, [[one["quantized"], one["calls"]] for one in gradients]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses without the section, where the plugin does nothing."""
    losses, lines, counts = train(tmp_path_factory.mktemp("full"), "file", None)
    assert lines == [] and counts == [[0, 0], [0, 0]]
    assert len(losses) == BATCHES and losses[-1] < 0.9 * losses[0]
    return losses


@pytest.mark.parametrize("how", ["launch", "file", "dict"])
def test_the_section_is_enough(tmp_path: Path, full: list[float], how: str) -> None:
    losses, lines, counts = train(tmp_path, how, SECTION)
    assert lines[0] == ATTACHED
    assert all("stage2.parameters" in line and "param_bits is full" in line for line in lines[1:])
    assert counts == [[BATCHES, BATCHES]] * 2  # stage 2 reduces at every micro-batch
    assert losses != full and losses == pytest.approx(full, rel=0.01)
