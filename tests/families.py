"""Small mixture-of-experts models of transformers' families, and what is fused in each.

A family is the name of a configuration, ``SMALL`` its sizes where the configuration has them, and
``FAMILIES`` what differs. To find out for a new one, add a row and read the failure.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "interleave_moe_layer_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LATENT_ATTENTION = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
FULL_ATTENTION = {"layer_types": ["full_attention"]}
GEMMA4 = {
    "enable_moe_block": True,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "global_head_dim": 16,
}
SPARSE = {"mlp_layer_types": ["sparse"]}

GATED = "the sum is multiplied by several elements that may differ by rank: expected one number"
LAYER_NORM = "a LayerNorm reads the sum: expected an RMSNorm"
NORM_FIRST = "the norm comes before the residual add"
COPIED = "aten.repeat comes between the all_reduce and the norm"
MIXED = "aten.mul.Tensor comes between the all_reduce and the norm"
READ_BY_STREAMS = "what the all_reduce feeds is read several times (aten.div.Tensor, aten.neg)"
READ_TWICE = "what the all_reduce feeds is read several times (aten.add.Tensor, aten.reshape)"
APART = "the sum is an operand of another tail, which is reduced apart"
ELSEWHERE = "another all_reduce of the same sum has the finalize"
OVERFLOW = "an addend that is scaled up alone could overflow float16"
REDUCED_FIRST = "the all_reduce comes before the finalize"

CAST_FIRST = "weight after cast"
CAST_LAST = "weight before cast"
GEMMA = ("1 + weight", "1 + weight before cast")

AFTER = "after the all_reduce"
OWN = "its own all_reduce"


@dataclass(frozen=True)
class Family:
    """What is found in one layer.

    Attributes:
        plain: fused tails without a finalize: the embedding's, attention's.
        shared: where the fused MoE tail's shared expert came in, None where no such tail is fused.
        norm: the RMSNorm's spelling in fp32.
        half: its spelling in bf16 and fp16.
        refused: how many all_reduces are left, by reason.
        scaled: the reduced sum is multiplied by a float of the module, which ``dynamic=True``
            makes a tensor.
        fields: configuration fields beside ``SMALL``.
        rows: the fused MoE tail's finalize, None for that of the experts' implementation.
        experts: whether the experts' implementation can be chosen.
        ci: in the half that every run of the tests traces.
    """

    plain: int
    shared: str | None = "none"
    norm: str = "weight"
    half: str = CAST_FIRST
    refused: dict[str, int] = field(default_factory=dict)
    _: KW_ONLY
    scaled: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    rows: str | None = None
    experts: bool = True
    ci: bool = False

    def found(self, dtype: str, shapes: str) -> tuple[str | None, dict[str, int]]:
        """``shared`` and ``refused``, in one dtype and one way of naming sizes."""
        if self.shared == OWN and dtype == "fp16":  # a rank's sum of two partials could overflow
            return AFTER, {**self.refused, ELSEWHERE if self.scaled else APART: 1}
        if not self.scaled or shapes != "dynamic":
            return self.shared, self.refused
        if self.shared == OWN:  # a tensor may differ by rank: it stays on its side of the reduction
            return AFTER, {**self.refused, ELSEWHERE: 1}
        return (None, {**self.refused, OVERFLOW: 1}) if dtype == "fp16" else (AFTER, self.refused)


FAMILIES: dict[str, Family] = {
    "afmoe": Family(1, half=CAST_LAST, fields=FULL_ATTENTION),
    "aria_text": Family(2, OWN),
    "axk1": Family(1, OWN, fields={**LATENT_ATTENTION, **SPARSE}),
    "bailing_hybrid": Family(1, OWN, fields={**FULL_ATTENTION, **LATENT_ATTENTION}),
    "beam": Family(2, half=CAST_LAST, fields=SPARSE),
    "cohere2_moe": Family(0, None, refused={LAYER_NORM: 3}, fields=FULL_ATTENTION, ci=True),
    "deepseek_v2": Family(2, OWN, fields=LATENT_ATTENTION),
    "deepseek_v3": Family(1, OWN, fields=LATENT_ATTENTION, ci=True),
    "deepseek_v32": Family(2, OWN, fields=LATENT_ATTENTION),
    "dots1": Family(2, OWN, fields=FULL_ATTENTION, ci=True),
    "dots3_note_text": Family(
        2, OWN, fields={**FULL_ATTENTION, **SPARSE, "shared_experts_intermediate_size": 32}
    ),
    "ernie4_5_moe": Family(2, OWN),
    "exaone_moe": Family(2, AFTER, fields=FULL_ATTENTION),
    "flex_olmo": Family(0, None, refused={READ_TWICE: 1, NORM_FIRST: 2}, ci=True),
    "flint": Family(1, OWN, half=CAST_LAST, fields={**FULL_ATTENTION, "mlp_only_layers": []}),
    "gemma4_text": Family(
        1,
        None,
        half=CAST_LAST,
        refused={NORM_FIRST: 3},
        fields={**FULL_ATTENTION, **GEMMA4},
    ),
    "glm4_moe": Family(2, OWN, ci=True),
    "glm4_moe_lite": Family(2, AFTER, fields={**LATENT_ATTENTION, **SPARSE}),
    "gpt_oss": Family(1, half=CAST_LAST, fields=FULL_ATTENTION, ci=True),
    "granitemoe": Family(1, ci=True),
    "granitemoehybrid": Family(1, AFTER, scaled=True, fields={"layer_types": ["attention"]}),
    "granitemoeshared": Family(1, AFTER, scaled=True, ci=True),
    "hunyuan_v1_moe": Family(1, AFTER, ci=True),
    "hy_v3": Family(2, OWN, fields=SPARSE, ci=True),
    "kimi_linear": Family(1, OWN, fields={**FULL_ATTENTION, **LATENT_ATTENTION, **SPARSE}),
    "laguna": Family(2, OWN, scaled=True, fields={**FULL_ATTENTION, **SPARSE}, ci=True),
    "lfm2_moe": Family(1, fields=FULL_ATTENTION),
    # its shared expert's all_reduce has no finalize, and is fused
    "llama4_text": Family(
        2,
        AFTER,
        refused={REDUCED_FIRST: 1},
        fields=FULL_ATTENTION,
        rows="finalized",
        experts=False,
        ci=True,
    ),
    "mellum": Family(2, fields=FULL_ATTENTION),
    "minimax": Family(2, fields=FULL_ATTENTION, ci=True),
    "minimax_m2": Family(2),
    "minimax_m3_vl_text": Family(2, AFTER, *GEMMA),
    "mixtral": Family(2, ci=True),
    "olmoe": Family(2),
    "phimoe": Family(0, None, refused={LAYER_NORM: 2}, ci=True),
    "qwen2_moe": Family(2, AFTER, ci=True),
    "qwen3_5_moe_text": Family(2, AFTER, *GEMMA, {GATED: 1}, fields=FULL_ATTENTION),
    "qwen3_moe": Family(2, ci=True),
    "qwen3_next": Family(2, AFTER, *GEMMA, {GATED: 1}, fields=FULL_ATTENTION, ci=True),
    # hyper-connections: several residual streams
    "qwen4_exp_text": Family(0, None, refused={COPIED: 1, READ_BY_STREAMS: 3, GATED: 1, MIXED: 1}),
    "sarvam_mla": Family(1, OWN, fields=LATENT_ATTENTION, experts=False),
    "sarvam_moe": Family(2, OWN, experts=False),
    "solar_open": Family(2, AFTER),
}
# Families that cannot be traced, and how that fails.
FAKE = ("its constructor calls Module.to, which fake tensors do not support", "Couldn't swap")
UNTRACED = {
    "deepseek_v4": FAKE,
    "hy_v4": FAKE,
    "inkling_text": FAKE,
    "inkling2_text": FAKE,
    "inkling2_loop_text": FAKE,
    "zaya": ("it has no plan for tensor parallelism", "no `tp_plan`"),
}
UNTRACED_FIELDS = {"zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"]}}
# Under its plan for tensor parallelism the experts of this one are not sharded.
EXPERT_PARALLEL_ONLY = {"gpt_oss"}
# In CI a family is traced in one of each of these ways, in turn; ALL_FAMILIES=1 traces all.
EXPERTS = (("grouped_mm", False), ("batched_mm", False), ("grouped_mm", True))
MARKED = (("bf16", "marked"), ("fp16", "marked"))
STATIC = (("fp32", "static"), *[None] * 5)  # of every sixth family
# ``dynamic=True`` takes three times as long: only these, one of which scales by a module's float.
FULLY_DYNAMIC = {"granitemoe": ("bf16", "dynamic"), "dots1": ("fp16", "dynamic")}


def fields_of(family: str, known: Any) -> dict[str, Any]:
    """The fields of a small configuration, of those that the configuration ``known`` has."""
    small = {name: value for name, value in SMALL.items() if name in known.to_dict()}
    small |= {name: SMALL[name] for name in known.attribute_map if name in SMALL}
    special = FAMILIES[family].fields if family in FAMILIES else UNTRACED_FIELDS.get(family, {})
    return {**small, **special}
