"""Megatron imports these from 2.7 on; no test routes tokens through Transformer Engine."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
