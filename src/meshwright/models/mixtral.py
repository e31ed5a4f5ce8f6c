"""Mixtral (Jiang et al., 2024): Llama with a mixture of experts in place of the feed-forward part."""

from meshwright.models.llama import PRESETS as LLAMA
from meshwright.models.spec import ModelSpec


def _mixtral(base: str, **changes: object) -> ModelSpec:
    return ModelSpec(**{**LLAMA[base].model_dump(), "family": "mixtral", **changes})


PRESETS = {
    "moe-tiny": _mixtral("llama-tiny", experts=4, ffn_width=176),
    "moe-1b": _mixtral("llama-1b", experts=8, width=1024, heads=16, kv_heads=8, head_width=64, ffn_width=2304),
}
