"""examples/megatron: the commands of its README, as printed, with a smaller model and fewer steps."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

pytest.importorskip("megatron.core")

from tests.integrations.megatron.test_launch import ROOT, run

EXAMPLE = ROOT / "examples" / "megatron"
STEPS, LAYERS, EVALUATIONS = 10, 2, 2
SHORT = f"--train-iters {STEPS} --num-layers {LAYERS} --eval-iters {EVALUATIONS}".split()
FORWARD = 2 * LAYERS * (STEPS + EVALUATIONS)  # row-parallel layers, evaluation included
BACKWARD = (2 * LAYERS + 1) * STEPS  # column-parallel layers and the LM head
COPIES = 1  # each quantized call has one more call in full precision, for copies on tensor-parallel ranks

Train = Callable[..., str]


def commands() -> list[list[str]]:
    """Return every command in the README's ```sh blocks, as words."""
    text = (EXAMPLE / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def command(*has: str, lacks: tuple[str, ...] = ()) -> list[str]:
    """Return the one training command of the README with all the words of `has` and none of `lacks`."""
    found = [c for c in commands() if c[0] == "torchrun" and set(has) <= set(c) and not set(lacks) & set(c)]
    assert len(found) == 1, f"the README has {len(found)} commands with {has} and without {lacks}"
    return found[0]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return train(words): it runs a training command after the README's first command, and returns the output.

    A command runs once, however many tests ask for it.
    """
    folder = tmp_path_factory.mktemp("example")
    (folder / "examples").symlink_to(ROOT / "examples")
    [prepare] = [c for c in commands() if c[0] == "python"]
    done = run(folder, *prepare[1:])
    assert done.returncode == 0, done.stdout
    assert re.search(r"data/stdlib\.bin, \.idx: \d+ documents, \d+ tokens", done.stdout)
    printed: dict[str, str] = {}

    def train(words: list[str]) -> str:
        key = shlex.join(words)
        if key not in printed:
            torchrun = ("-m", "torch.distributed.run", "--local-addr", "127.0.0.1")
            done = run(folder, *torchrun, *words[1:], *SHORT, timeout=400)
            assert done.returncode == 0, done.stdout[-4000:]
            printed[key] = done.stdout
        return printed[key]

    return train


def learned(output: str) -> float:
    """Return the validation loss, which must be well below the first step's."""
    [first] = re.findall(r"^step +1  loss (\S+)", output, flags=re.MULTILINE)
    [last] = re.findall(rf"^step +{STEPS}  loss (\S+)", output, flags=re.MULTILINE)
    [validation] = re.findall(r"^validation loss (\S+)", output, flags=re.MULTILINE)
    assert 5 < float(first) < 7, "about log(384) before the first step"
    assert 0 < float(last) < float(first) - 1 and 0 < float(validation) < float(first) - 1  # NaN fails, too
    assert re.search(r"^\d+ tokens/s$", output, flags=re.MULTILINE)
    return float(validation)


def counts(output: str, seam: str) -> tuple[int, int]:
    """Return (calls, quantized) in the report."""
    site = re.escape(f"megatron.{seam}")
    if re.search(rf"^in place, nothing sent: (.*, )?{site}(,|$)", output, flags=re.MULTILINE):
        return 0, 0
    [found] = re.findall(rf"^{site}: (\d+) calls, (\d+) quantized", output, flags=re.MULTILINE)
    return int(found[0]), int(found[1])


FULL = {"lacks": ("--flash-allreduce",)}
INT8 = ("--flash-allreduce", "--flash-allreduce-preset", "int8", "--bf16")
#: The preset in bf16 moves the validation loss after these ten steps by less, relative to full precision.
CLOSE = 0.005


@pytest.mark.timeout(600)
def test_in_full_precision_the_plugin_stays_out(train: Train) -> None:
    output = train(command("torchrun", "--bf16", **FULL))
    learned(output)
    assert "megatron.g.forward" not in output


@pytest.mark.timeout(600)
def test_preset_int8(train: Train) -> None:
    output = train(command(*INT8, lacks=("--sequence-parallel", "--use-distributed-optimizer")))
    full = learned(train(command("torchrun", "--bf16", **FULL)))
    assert learned(output) == pytest.approx(full, rel=CLOSE)
    assert counts(output, "g.forward") == (FORWARD, FORWARD)
    assert counts(output, "linear.dgrad") == (BACKWARD, BACKWARD)
    assert counts(output, "embedding.forward") == (STEPS + EVALUATIONS, STEPS + EVALUATIONS)


@pytest.mark.timeout(600)
def test_preset_int8_with_sequence_parallelism(train: Train) -> None:
    output = train(command(*INT8, "--sequence-parallel"))
    full = learned(train(command("torchrun", "--bf16", **FULL)))
    assert learned(output) == pytest.approx(full, rel=CLOSE)
    assert counts(output, "sequence_parallel.g.forward") == (FORWARD, FORWARD)
    assert counts(output, "sequence_parallel.linear.dgrad") == (BACKWARD, BACKWARD)
    gathers = FORWARD + STEPS + EVALUATIONS  # of column-parallel layers and of the LM head
    assert counts(output, "sequence_parallel.linear.gather") == (gathers, gathers)
    assert counts(output, "g.forward") == counts(output, "linear.dgrad") == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_preset_int8_with_the_distributed_optimizer(train: Train) -> None:
    output = train(command(*INT8, "--use-distributed-optimizer", "4"))
    learned(output)
    assert counts(output, "g.forward") == (FORWARD, FORWARD)
    assert counts(output, "linear.dgrad") == (BACKWARD, BACKWARD)
    assert counts(output, "data_parallel.gradients") == ((1 + COPIES) * STEPS, STEPS)
    assert counts(output, "data_parallel.parameters") == (STEPS + COPIES * (STEPS - 1), STEPS - 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_tensor_parallel_ranks(train: Train) -> None:
    words = ["4" if word == "2" else word for word in command(*INT8, "--sequence-parallel")]
    assert words[words.index("--nproc-per-node") + 1] == words[words.index("--tensor-model-parallel-size") + 1] == "4"
    full = learned(train(command("torchrun", "--bf16", **FULL)))
    output = train(words)
    assert learned(output) == pytest.approx(full, rel=CLOSE)
    assert counts(output, "sequence_parallel.g.forward") == (FORWARD, FORWARD)
    assert counts(output, "sequence_parallel.linear.dgrad") == (BACKWARD, BACKWARD)
