"""Checkpoints that transformers wrote, of families whose tensors are kept in different ways: in, out, and the same."""

import json

import numpy as np
import pytest
from runs import started
from safetensors.numpy import load_file

import meshwright as mw
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.hub.write import Trained, export

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # three parameters in one tensor
    "gemma3_text": {**_SIZES, "head_dim": 12, "query_pre_attn_scalar": 9},  # norms kept as their distance from 1
    "qwen3_moe": {**_SIZES, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {  # layers of two kinds, heads' parts side by side, rotated pairs
        **_SIZES,
        **{"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4},
        **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10},
        **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    },
}


def saved(folder):
    """All tensors of a folder, float32."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return {name: values.astype(np.float32) for name, values in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out(family, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from families import VOCAB, theirs, tokens

    theirs(family, **FAMILIES[family]).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    run = mw.make_run(
        {
            "data": {"train": "x"},
            "model": {"init": f"hf:{tmp_path / 'in'}"},
            "tokenizer": {"kind": "bytes"},
            "train": {"sequence_length": 16},
        }
    )
    trained = Trained(run, started(run), ByteTokenizer(), {"step": 0}, {}, {})
    done = export(tmp_path / "out", trained, tokens(), shard_bytes=20_000)
    assert sum("largest difference of logits" in line for line in done.proof) == 2
    came, went = saved(tmp_path / "in"), saved(tmp_path / "out")
    assert went.keys() == came.keys()
    for name, values in went.items():  # distances from 1 are rounded on the way
        np.testing.assert_allclose(values, came[name], rtol=0, atol=2e-7 if "gemma" in family else 0, err_msg=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == VOCAB
