"""Attention over a sequence that ranks share, by all-to-all, as far as the seams see it."""

import torch


def flash_attn_a2a_communicate(
    a2a_inputs,
    chunk_ids_for_a2a,
    seq_dim,
    cp_size,
    cp_group,
    cp_stream,
    before_attn,
    qkv_format="bshd",
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    a2a_input_names=None,
):
    """[batch, sequence, heads, head]: before attention to the ranks of the heads, after it back."""
    given = a2a_inputs if isinstance(a2a_inputs, list) else [a2a_inputs]
    sent = [torch.stack(one.chunk(cp_size, 2 if before_attn else seq_dim)) for one in given]
    received = [torch.empty_like(one) for one in sent]
    waiting = [
        torch.distributed.all_to_all_single(output, input, group=cp_group, async_op=True)
        for output, input in zip(received, sent, strict=True)
    ]
    found = []
    for request, output in zip(waiting, received, strict=True):
        request.wait()
        found.append(torch.cat(list(output), seq_dim if before_attn else 2))
    return found if isinstance(a2a_inputs, list) else found[0]


def _attend(q, k, v):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class AttnFuncWithCPAndQKVOA2A(torch.autograd.Function):
    @staticmethod
    def forward(ctx, is_training, q, k, v, cp_group, cp_stream):
        ctx.how = how = 1, cp_group.size(), cp_group, cp_stream
        q, k, v = flash_attn_a2a_communicate([q, k, v], None, *how, True, a2a_input_names=["q", "k", "v"])
        ctx.save_for_backward(q, k, v)
        return flash_attn_a2a_communicate(_attend(q, k, v), None, *how, False, a2a_input_names=["out"])

    @staticmethod
    def backward(ctx, dout, *_args):
        dout = flash_attn_a2a_communicate(dout, None, *ctx.how, True, a2a_input_names=["dout"])
        with torch.enable_grad():
            qkv = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            gradients = list(torch.autograd.grad(_attend(*qkv), qkv, dout))
        names = ["dq", "dk", "dv"]
        return None, *flash_attn_a2a_communicate(gradients, None, *ctx.how, False, a2a_input_names=names), None, None


class AttnFuncWithCPAndKVP2P(torch.autograd.Function):
    """The ring; with a2a+p2p it exchanges as the other one does."""

    @staticmethod
    def forward(ctx, is_training, q, k, v, cp_group, cp_stream):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, dout, *_args):
        raise NotImplementedError
