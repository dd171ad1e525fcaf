"""A byte-level transformer on Python's own sources, trained with local SGD (DiLoCo): ranks talk once in 20 steps.

torchrun --nproc-per-node 2 examples/local_sgd/train.py              full precision
torchrun --nproc-per-node 2 examples/local_sgd/train.py --bits 2     differences of weights at 2 bits
    --checkpoint FOLDER    saves after every round; the same command resumes, bit for bit

One round (A. Douillard et al., "DiLoCo", arXiv 2311.08105):

1. Every rank takes its own AdamW steps from the shared weights.
2. One quantized all-reduce averages the differences: shared weights minus this rank's.
3. The average is the gradient of an SGD step, with Nesterov momentum, of the shared weights.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import flash_allreduce_plugin as fap

SEQUENCE, BATCH, WIDTH = 128, 8, 128
# The role takes codebook and spikes out of a configuration, such as a preset's: at 2 bits the codebook shrinks the
# differences, which are sums of Adam's steps, to 0.88 of their size in each of the two roundings.
SITE = fap.Site("local_sgd", fap.Role.PARAMETER_DIFFERENCE)


class LocalSGD:
    """The weights that all ranks share, and the step of a round. All parameters are one vector: one call a round."""

    def __init__(self, model: nn.Module, config: fap.FlashConfig, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.model, self.config = model, config
        self.shared = parameters_to_vector(model.parameters()).detach().clone()
        self.optimizer = torch.optim.SGD([self.shared], lr=lr, momentum=momentum, nesterov=True)
        self.feedback = fap.Feedback.from_config(config)
        self.rounds = 0

    @torch.no_grad()
    def step(self) -> None:
        """End a round. Every rank ends with the same weights, bit for bit."""
        difference = self.shared - parameters_to_vector(self.model.parameters())
        self.feedback.begin(self.rounds)
        slot = self.feedback.slot("difference") if self.config.error_feedback else None
        fap.all_reduce(difference, dist.ReduceOp.AVG, config=self.config, site=SITE, feedback=slot)
        self.shared.grad = difference
        self.optimizer.step()
        self.rounds += 1
        self._give()

    def _give(self) -> None:
        """Give the model a copy of the shared weights: its parameters become views of the copy."""
        vector_to_parameters(self.shared.clone(), self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds. Each rank has its own residual."""
        mine = {"shared": self.shared, "rounds": self.rounds, "optimizer": self.optimizer.state_dict()}
        return {**mine, "feedback": self.feedback.state_dict(), "plugin": fap.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict of the same rank. All ranks call it together."""
        self.shared.copy_(state["shared"])
        self.rounds = state["rounds"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.feedback.load_state_dict(state["feedback"])
        fap.load_state_dict(state["plugin"])
        self._give()


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x, y = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, device=text.device)
        hidden = self.bytes(x) + self.positions(torch.arange(SEQUENCE, device=text.device))
        logits = self.head(self.layers(hidden, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def drawn(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - SEQUENCE, (count,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE + 1] for start in starts])


class Training:
    """A rank's model, optimizers and batches, and their file."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(arguments.seed)  # the same model on all ranks
        self.device = device
        self.model = Model().to(device)
        # FLASH_ALLREDUCE_* has priority.
        given = fap.FlashConfig(param_bits=arguments.bits or "full", error_feedback=True)
        self.outer = LocalSGD(self.model, fap.FlashConfig.from_env(given))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.batches = torch.Generator().manual_seed(100 * arguments.seed + dist.get_rank())
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
        self.text, self.held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def round(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(drawn(self.text, BATCH, self.batches).to(self.device))
            self.inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.inner.step()
        self.outer.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of the shared weights on held-out text."""
        return float(self.model(drawn(self.held_out, 128, torch.Generator().manual_seed(0)).to(self.device)))

    def save(self, file: Path) -> None:
        """Save this rank's state. The file is always complete: the old one or the new one."""
        state = {"outer": self.outer.state_dict(), "inner": self.inner.state_dict()}
        torch.save({**state, "batches": self.batches.get_state()}, file.with_suffix(".part"))
        dist.barrier()  # no rank has a new file before all ranks have written theirs
        os.replace(file.with_suffix(".part"), file)

    def resume(self, file: Path) -> None:
        """Continue from this rank's file, if all ranks have a file of the same round."""
        state = torch.load(file, weights_only=True, map_location="cpu") if file.exists() else None
        rounds = [0] * dist.get_world_size()
        dist.all_gather_object(rounds, state["outer"]["rounds"] if state else 0)
        if len(set(rounds)) > 1:
            raise SystemExit(f"the ranks' files in {file.parent} are of rounds {rounds}; delete the folder")
        if state is not None:
            self.outer.load_state_dict(state["outer"])
            self.inner.load_state_dict(state["inner"])
            self.batches.set_state(state["batches"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, help="width of the differences; without it, full precision")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="AdamW steps of a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="a folder: save after every round, and resume")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    # NCCL takes one rank a GPU: more ranks than GPUs share them over gloo, to try this out.
    dist.init_process_group("nccl" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank() % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    training, file = Training(arguments, device), None
    if arguments.checkpoint:
        arguments.checkpoint.mkdir(parents=True, exist_ok=True)
        file = arguments.checkpoint / f"rank_{dist.get_rank()}.pt"
        training.resume(file)
    while training.outer.rounds < arguments.rounds:
        training.round(arguments.steps)
        rounds = training.outer.rounds
        if file is not None:
            training.save(file)
        if dist.get_rank() == 0 and (rounds % 5 == 0 or rounds == arguments.rounds):
            print(f"round {rounds}: loss {training.loss():.4f}", flush=True)
    if dist.get_rank() == 0:
        for name, site in fap.stats()["sites"].items():
            print(f"{name}: {site['quantized']} of {site['calls']} calls quantized, ", end="")
            print(f"{site['bytes_sent'] / 1e6:.1f} of {site['bytes_full_precision'] / 1e6:.1f} MB sent")
    dist.barrier()  # gloo's thread must release the last tensor before the interpreter ends, or the process aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
