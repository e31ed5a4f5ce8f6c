"""Which of the models that Meshwright doesn't know can't be cut among the processes of a tensor group."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

from torch_jobs import VOCAB, Layout, make_run

from meshwright.engines.torch.build import skeleton
from meshwright.engines.torch.tensor_plans import plan_of
from meshwright.errors import UserError

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA3N = {**_SIZES, "head_dim": 8, "hidden_size_per_layer_input": 4, "laurel_rank": 4}
_GEMMA3N |= {"vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "keys", "able", "not_able", "said"),
    [
        (
            "cohere",
            _SIZES,
            {"use_qk_norm": False},
            {"use_qk_norm": True},
            r"no plan by which model\.layers\.0\.self_attn\.q_norm\.weight of cohere is cut, .*; .* raise mesh.fsdp",
        ),
        (
            "gemma3n_text",
            _GEMMA3N,
            {"activation_sparsity_pattern": [0.0, 0.0]},
            {"activation_sparsity_pattern": [0.0, 0.5]},
            r"mesh.tensor: gemma3n_text chooses by the whole feed-forward width .* raise mesh.fsdp",
        ),
    ],
)
def test_what_needs_a_whole_width_is_not_cut(tmp_path, kind, keys, able, not_able, said):
    def model(more):
        config = {"model_type": kind, "vocab_size": VOCAB, **keys, **more}
        (tmp_path / "config.json").write_text(json.dumps(config))
        section = {"config": f"hf:{tmp_path}", "init": "random", "family": "transformers"}
        return skeleton(make_run("", Layout({}), model=section).model.spec)

    assert len(plan_of(model(able))) == 2 * 7
    with pytest.raises(UserError, match=said):
        plan_of(model(not_able))
