"""Lightning: strategy="ddp" and FSDP2's ModelParallelStrategy, in programs as its documentation has them.

Its own examples need a GPU or downloads. Model and data are of its `demos`; the text is written here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import (
    MOST_SENT,
    SETTINGS,
    Run,
    attached,
    by_hand,
    needs,
    same_bits_for_less,
    start,
    text,
    torchrun,
    without,
)

pytestmark = [needs("lightning"), pytest.mark.timeout(2400)]

STEPS = 20
PROGRAM = f"""
import lightning as L
import torch
from lightning.pytorch.demos import Transformer, WikiText2


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.model = Transformer(vocab_size, ninp=32, nhid=64, dropout=0.0)
        self.losses = []

    def training_step(self, batch):
        tokens, target = batch
        loss = torch.nn.functional.nll_loss(self.model(tokens, target), target.view(-1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
{{configure}}

if __name__ == "__main__":
    L.seed_everything(1)
    data = WikiText2(block_size=16)
    model = LanguageModel(data.vocab_size)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy={{strategy}}, max_steps={STEPS}, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.print("losses", *model.losses)
    trainer.save_checkpoint("out.ckpt")
"""
DDP = PROGRAM.format(configure="", strategy='"ddp"')
FSDP2 = """
import os
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
""" + PROGRAM.format(
    configure="""
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in [*self.model.transformer.encoder.layers, *self.model.transformer.decoder.layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
""",
    strategy="ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)",
)
TENSOR = """
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
""" + PROGRAM.format(
    configure="""
    def configure_model(self):
        plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        for layer in [*self.model.transformer.encoder.layers, *self.model.transformer.decoder.layers]:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)
""",
    strategy="ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, save_distributed_checkpoint=False)",
)
DDP_LINE = "flash all-reduce: attached to DistributedDataParallel (LanguageModel, 43855 parameters in float32): "
FSDP2_LINE = (
    "flash all-reduce: attached to FSDP2 (Transformer, 43855 parameters in float32, shards x replicas 2 x 1): "
    "gradients of 5 of 5 modules in 8 bits"
)


def material(folder: Path, program: str) -> Path:
    """Write the program and the text that WikiText2 would download."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "wikitext-2.txt").write_text(text(300))
    (folder / "program.py").write_text(program)
    return folder


def losses(run: Run) -> list[float]:
    """Return rank 0's loss of every step."""
    [line] = [line for line in run.printed.splitlines() if line.startswith("losses ")]
    return [float(loss) for loss in line.split()[1:]]


def same_weights(one: Run, other: Run) -> bool:
    import torch

    first, second = (torch.load(run.folder / "out.ckpt", weights_only=False)["state_dict"] for run in (one, other))
    assert first.keys() == second.keys() and len(first) > 10
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("program", "kind", "site", "beginning"),
    [(DDP, "ddp", "ddp.gradients", DDP_LINE), (FSDP2, "fsdp", "fsdp.gradients", FSDP2_LINE)],
    ids=["ddp", "fsdp2"],
)
def test_a_strategy(tmp_path: Path, program: str, kind: str, site: str, beginning: str) -> None:
    full = without(material(tmp_path / "full", program), "program.py")
    served = attached(material(tmp_path / "served", program), kind, "program.py")
    hand = by_hand(material(tmp_path / "hand", program), kind, "program.py")
    [line] = served.attached
    assert line.startswith(beginning)
    same_bits_for_less(served, hand, site)
    assert losses(served) == losses(hand) and same_weights(served, hand)
    assert not same_weights(served, full)
    assert len(losses(full)) == STEPS and losses(full)[-1] < 0.8 * losses(full)[0]
    # Training this fast, the model makes 1e-5 of the second step 1 to 3 per cent of a late one, to either side.
    assert sum(losses(served)) == pytest.approx(sum(losses(full)), rel=5e-3)
    assert losses(served) == pytest.approx(losses(full), rel=0.05)


def test_tensor_parallelism(tmp_path: Path) -> None:
    """Train two encoder and two decoder layers with feed-forward parts that the ranks share."""
    full = without(material(tmp_path / "full", TENSOR), "program.py")
    variables = {"FLASH_ALLREDUCE_ATTACH": "tensor_parallel", "FLASH_ALLREDUCE_BACKWARD_BITS": "8", **SETTINGS}
    served = torchrun(material(tmp_path / "served", TENSOR), ("program.py",), variables)
    [line] = served.attached
    assert line.startswith("flash all-reduce: attached to torch's tensor parallelism: sums in 8 bits, their")
    for name in ("forward", "backward"):
        counts = served.sites[f"tensor_parallel.reduce.{name}"]
        assert counts["calls"] == counts["quantized"] == 4 * STEPS
        assert counts["bytes_sent"] < MOST_SENT * counts["bytes_full_precision"]
    assert not same_weights(served, full)
    assert losses(served) == pytest.approx(losses(full), rel=0.05)


def test_started_by_lightning_itself(tmp_path: Path) -> None:
    """Run `python program.py`: rank 0 is the program, which starts the other one; no torchrun, no RANK in rank 0."""
    served = attached(material(tmp_path / "torchrun", DDP), "ddp", "program.py")
    alone = start(material(tmp_path / "alone", DDP), ("program.py",), {"FLASH_ALLREDUCE_ATTACH": "ddp", **SETTINGS})
    assert alone.attached == served.attached and len(alone.attached) == 1
    assert alone.sites == served.sites
    assert losses(alone) == losses(served)
