"""transformers' tp_plan="auto" (torch's DTensor), training and generating, without a word of the plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import MOST_SENT, SETTINGS, Run, needs, torchrun, without

pytestmark = [needs("transformers"), pytest.mark.timeout(1200)]

PROGRAM = """
import json

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained("llama", tp_plan="auto", dtype=torch.float32)
text = torch.randint(64, (64, 33), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
losses = []
for step in range(6):
    ids = text[4 * step : 4 * step + 4]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    logits = model(text[:4, :8]).logits
    tokens = model.generate(text[:4, :8], max_new_tokens=4, do_sample=False)
norms = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "norm" in n])
norms = norms.full_tensor() if hasattr(norms, "full_tensor") else norms
others = [torch.empty_like(norms) for _ in range(2)]
dist.all_gather(others, norms)
if dist.get_rank() == 0:
    found = {"losses": losses, "logits": logits.double().norm().item(), "tokens": tokens.shape[1]}
    print("FOUND", json.dumps({**found, "copies are equal": torch.equal(*others)}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
WIDTHS = {"FLASH_ALLREDUCE_BACKWARD_BITS": "8", **SETTINGS}


def found(run: Run) -> dict[str, object]:
    [line] = [line for line in run.printed.splitlines() if "FOUND" in line]
    result: dict[str, object] = json.loads(line[line.index("FOUND") + 5 :])
    return result


def folder_of(parent: Path, name: str) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    folder = parent / name
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / "llama")
    (folder / "train.py").write_text(PROGRAM)
    return folder


def test_tp_plan_trains_and_generates(tmp_path: Path) -> None:
    stock = found(without(folder_of(tmp_path, "stock"), "train.py"))
    variables = {"FLASH_ALLREDUCE_ATTACH": "tensor_parallel", **WIDTHS}
    run = torchrun(folder_of(tmp_path, "served"), ("train.py",), variables)
    served = found(run)
    [line] = run.attached
    assert "attached to torch's tensor parallelism: sums in 8 bits, their gradients in 8 bits" in line
    assert served["copies are equal"] and stock["copies are equal"]
    assert served["losses"] == pytest.approx(stock["losses"], rel=1e-3) and served["losses"] != stock["losses"]
    assert served["logits"] == pytest.approx(stock["logits"], rel=1e-2) and served["tokens"] == stock["tokens"] == 12
    forward, backward = (run.sites[f"tensor_parallel.reduce.{name}"] for name in ("forward", "backward"))
    # Two layers: four sums a forward pass; six steps, a pass without a gradient and four tokens.
    assert forward["calls"] == forward["quantized"] == 4 * (6 + 1 + 4)
    # The inputs of q, k, v, gate and up, and of the head.
    assert backward["calls"] == backward["quantized"] == 11 * 6
    for counts in (forward, backward):
        assert counts["bytes_sent"] < MOST_SENT * counts["bytes_full_precision"]
