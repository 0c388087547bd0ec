"""Which linear of a layer plays which part: ``q_proj`` and ``query`` are one role under two names."""

from __future__ import annotations

from overspill.model.facts import LayerKind, LinearShape

__all__ = ["roles_of"]

_ATTENTION = {
    "q_proj": "q", "query": "q", "q": "q", "q_lin": "q", "wq": "q", "k_proj": "k", "key": "k", "k": "k", "v_proj": "v",
    "value": "v", "v": "v", "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv", "Wqkv": "qkv", "qkv": "qkv",
    "q_attn": "q", "o_proj": "o", "out_proj": "o", "dense": "o", "c_proj": "o", "o": "o", "proj": "o",
    "q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b", "g_proj": "gate",
    "gate_proj": "gate",
}  # fmt: skip
_MLP = {
    "gate_proj": "gate", "w1": "gate", "wi_0": "gate", "linear_v": "up", "up_proj": "up", "w3": "up", "wi_1": "up",
    "c_fc": "up", "dense_h_to_4h": "up", "fc1": "up", "fc_in": "up", "wi": "up", "linear_fc1": "up",
    "down_proj": "down", "w2": "down", "wo": "down", "c_proj": "down", "dense_4h_to_h": "down", "fc2": "down",
    "fc_out": "down", "linear_fc2": "down", "gate_up_proj": "gate_up", "proj_1": "up", "proj_2": "down",
    "input_linear": "gate_up", "output_linear": "down", "linear_1": "up", "linear_2": "down",
}  # fmt: skip
_MLP_PATHS = (
    "mlp",
    "ffn",
    "feed_forward",
    "block_sparse_moe",
    "experts",
    "intermediate",
    "fc",
    "DenseReluDense",
    "moe",
)
_CROSS_PATHS = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn")


def roles_of(kind: LayerKind) -> dict[str, dict[str, LinearShape]]:
    """By part (``attention``, ``cross``, ``mlp``, ``shared``, ``experts``), role → the linear that plays it."""
    parts: dict[str, dict[str, LinearShape]] = {"attention": {}, "cross": {}, "mlp": {}, "shared": {}, "experts": {}}
    for linear in kind.linears:
        path = linear.name.split(".")
        head = path[:-1]
        if any(word in step for step in head for word in _CROSS_PATHS):
            part, table = "cross", _ATTENTION
        elif linear.is_expert:
            part, table = "experts", _MLP
        elif path[-1] == "shared_expert_gate":  # Qwen's: how much of the shared expert a token takes
            part, table = "shared", {"shared_expert_gate": "share"}
        elif any("shared" in step for step in head):
            part, table = "shared", _MLP
        elif any(step.startswith(_MLP_PATHS) for step in head) or path[-1] in ("fc1", "fc2", "fc_in", "fc_out"):
            part, table = "mlp", _MLP
        elif head[:1] == ["output"]:  # BERT: output.dense stands beside intermediate.dense
            part, table = "mlp", {"dense": "down"}
        else:
            part, table = "attention", _ATTENTION
        role = "up" if head[:1] == ["intermediate"] else table.get(path[-1])
        if role is not None:
            parts[part].setdefault(role, linear)
    return parts
