"""What tensors of routed experts and of their routers are called, in every architecture read so far.

A name of an expert is `<layer>.<module>.experts.<id>.<part>` or, fused, `<layer>.<module>.experts.<part>` with the
experts along the first axis; a few architectures name the fused ones otherwise. Routers are the module's other tensors
that have an axis of experts, sometimes with rows behind them (zero experts, a null expert). Sources: transformers 5.24
`models/*/modeling_*.py` and `conversion_mapping.py`, facts/families.md section 7.
"""

from __future__ import annotations

import re

EXPERT = re.compile(
    r"^(?P<layer>.*?(?:^|\.)[0-9]+)\.(?P<module>(?:[A-Za-z_][A-Za-z_0-9]*\.)*?)experts\.(?:(?P<id>[0-9]+)\.)?(?P<part>.+)$"
)
"""`layer` ends with its number; `module` is empty or ends with a dot; `id` is missing where experts are fused."""

FUSED = re.compile(
    r"^(?P<layer>.*?(?:^|\.)[0-9]+)\.(?P<module>block_sparse_moe\.|moe\.)(?P<part>(?:input_linear|output_linear"
    r"|gate_proj|up_proj|down_proj)\..+)$"
)
"""Fused experts without the word: Granite's `input_linear`, Step's `moe.gate_proj`."""

FLATTENED = re.compile(r"^mlp\.(?:w1|v1|w2)$")
"""DBRX: the experts one after another along the first axis, [experts * width, hidden]."""

SHARED = re.compile(r"^(?:shared_experts?|share_expert|shared_mlp|shared_expert_gate)\b")

ROUTER = re.compile(
    r"^(?:gate|router|wg|classifier|moe_statics|expert_bias|router_bias|e_score_correction_bias|balancing_biases)\b"
)
"""What a router's tensors begin with, behind the module."""

OUTSIDE = re.compile(
    r"(?:^|\.)(?:router|moe_statics)\.(?:weight|bias|expert_bias|e_score_correction_bias)$"
    r"|(?:^|\.)(?:expert_bias|router_bias|e_score_correction_bias|balancing_biases)$"
)
"""Parts of a router that lie beside the module of its experts (Kolibri's `moe.router.expert_bias`)."""

OF_MIXTURE = re.compile(r"(?:^|[._])(?:moe|router|expert)")
PACKED = re.compile(r"\.(?:qweight|qzeros|weight_packed|weight_zero_point)$")

DECIDES = re.compile(
    r"(?:gate|router|wg|classifier)\.(?:weight|bias|qweight|qzeros|scales|weight_packed|weight_scale|weight_scale_inv"
    r"|weight_zero_point)"
)
"""Tensors that a router's choice is made of: each has an axis of experts, or one number for all of them."""

ID_TABLES = ("tid2eid",)
"""Last parts of tensors whose values are expert ids (DeepSeek V4's hash layers)."""

COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
    "ffn_config.moe_num_experts",
)
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "ffn_config.moe_top_k",
)
GROUP_DEFAULTS = {"deepseek_v3": (8, 4), "kimi_k2": (8, 4)}
"""Routing groups, and those that are chosen, where the config says nothing: what the class has then."""

GROUPS = ("n_group", "num_expert_group")
TOP_GROUPS = ("topk_group",)
EXTRA_ROWS = ("zero_expert_num",)
MTP_COUNT = "mtp_num_experts"
"""The count of an MTP head's own experts, where it has another than the layers (oMLX 3659, vLLM's InternS2 Mobius)."""

CAPACITIES = ("moe_capacity",)
"""Lists with one capacity a use, each the count of experts (Ernie's remote code)."""

KERNEL_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576)
"""Counts that vLLM's top-k kernels are made for (vllm#50982); others fall back or fail."""
