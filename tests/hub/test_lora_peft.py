"""LoRA against the library `peft`: the same adapters on the same tiny model give the same logits and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import TIME, error, theirs, tokens
from safetensors.numpy import load_file

import meshwright as mw
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.hf import HostParameters
from meshwright.hub.adapter import CONFIG, TENSORS, prove_adapter, write_adapter
from meshwright.hub.reader import open_checkpoint

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DEEPSEEK = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
DEEPSEEK |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
DEEPSEEK |= {"first_k_dense_replace": 1, "intermediate_size": 24, "moe_intermediate_size": 16, "n_routed_experts": 4}
DEEPSEEK |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 32}

CASES = {
    "every map of llama": ("llama", LLAMA, {"rank": 4}),
    "rsLoRA on two maps": ("llama", LLAMA, {"rank": 9, "alpha": 4.5, "rslora": True, "targets": ["q_proj", "v_proj"]}),
    "gpt2, whose queries, keys and values are one map": ("gpt2", GPT2, {"rank": 3, "targets": ["c_attn", "mlp.c_*"]}),
    "deepseek, with maps in two stacks": (
        *("deepseek_v3", DEEPSEEK),
        {"rank": 2, "targets": ["kv_*", "q_b_proj"]},
    ),
}
NAMES = {
    "every map of llama": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    "rsLoRA on two maps": ["q_proj", "v_proj"],
    "gpt2, whose queries, keys and values are one map": ["c_attn", "c_fc", "mlp.c_proj"],
    "deepseek, with maps in two stacks": ["kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj"],
}


def engine_of(folder, model_type, keys, lora):
    """An engine whose optimizer keeps the gradients, and all of whose adapters are random."""
    theirs(model_type, **keys).save_pretrained(folder / "base")
    values = {
        "data": {"train": "x"},
        "model": {"init": f"hf:{folder / 'base'}", "balance_loss": 0.0, "router_z_loss": 0.0},
        "tokenizer": {"kind": "bytes"},
    }
    values |= {"lora": lora, "optimizer": {"clip_norm": 0.0}}
    values |= {"train": {"batch_size": 2, "sequence_length": TIME - 1, "scan_layers": True, "remat": "products"}}
    run = mw.make_run(values)
    engine = JaxEngine(run, run.model.spec, optimizer=optax.trace(decay=0.0))
    random = np.random.default_rng(7)
    trained = engine._program.state.trained
    part = jax.tree.map(
        lambda x: jnp.asarray(0.1 * random.standard_normal(x.shape), jnp.float32), trained.of(engine._state.params)
    )
    engine._state = engine._state._replace(params=trained.put(part, engine._state.params))
    return run, engine


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Its name, the run, the engine, and a folder with the base and the adapters in their form."""
    folder = tmp_path_factory.mktemp("lora")
    run, engine = engine_of(folder, *CASES[request.param])
    (folder / "adapter").mkdir()
    write_adapter(folder / "adapter", run.model.spec, run.lora, engine.adapters_on_host(), str(folder / "base"))
    return request.param, run, engine, folder


def opened(folder):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True).eval()


def test_peft_opens_what_is_written(case):
    name, run, engine, folder = case
    proof = prove_adapter(
        folder / "adapter",
        run.model.spec,
        run.lora,
        engine.adapters_on_host(),
        base=open_checkpoint(run.model.init).folder,
        tokens_BT=tokens().astype(np.int32),
        run_logits=engine.logits,
    )
    (difference,) = proof.differences.values()
    assert difference < 1e-5 and not proof.failure
    config = peft.LoraConfig.from_pretrained(str(folder / "adapter"))
    assert sorted(config.target_modules) == NAMES[name]
    assert (folder / "adapter" / CONFIG).is_file()
    assert config.fan_in_fan_out == ("gpt2" in name)


def test_one_step_is_pefts(case, tmp_path):
    _, run, engine, folder = case
    model, ids_BT = opened(folder), torch.tensor(tokens())
    out = model(ids_BT, labels=ids_BT, use_cache=False)
    out.loss.backward()
    before = {path: np.asarray(x) for path, x in flat(engine._state.params).items()}
    inputs, targets = tokens().astype(np.int32)[:, :-1], tokens().astype(np.int32)[:, 1:]
    values = engine.train_step(Batch(inputs, targets, np.ones(inputs.shape, np.float32)))
    assert float(values["loss"]) == pytest.approx(out.loss.item(), abs=1e-5)

    trained = engine._program.state.trained
    gradients = trained.put(engine._state.optimizer.trace, engine._state.params)
    write_adapter(
        tmp_path, run.model.spec, run.lora, HostParameters(gradients, run.model.spec, engine._program), "gradients"
    )
    ours = load_file(tmp_path / TENSORS)
    of_peft = {n.replace(".default", ""): p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
    assert ours.keys() == of_peft.keys()
    assert max(error(ours[name], of_peft[name]) for name in ours) < 1e-4

    after = flat(engine._state.params)
    assert all(np.array_equal(before[path], after[path]) for path in before if ".lora." not in path)
    assert all(not np.array_equal(before[path], after[path]) for path in before if ".lora." in path)


def test_what_is_merged_is_the_same_model(case):
    """A whole checkpoint with the adapters added, read by transformers."""
    _, run, engine, folder = case
    from meshwright.hub.export import write_model
    from meshwright.hub.reference import transformers_logits

    out = folder / "merged"
    out.mkdir(exist_ok=True)
    write_model(out, run.model.spec, engine.on_host(), dtype="float32", shard_bytes=10**9, tokens={})
    ids_BT = tokens().astype(np.int32)
    assert np.abs(transformers_logits(out, ids_BT) - engine.logits(ids_BT)).max() < 2e-5


def flat(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
