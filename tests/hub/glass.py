"""A real, trained, tiny Llama (0.85M parameters) from the package `glassllm`, as a Hugging Face folder."""

import importlib.metadata
import json
from pathlib import Path

import numpy as np

ENGLISH = """\
It was late in the afternoon when the old man came down to the river, and the boys had gone home long before. He sat
upon a stone and looked at the water. There was no wind, and the light lay on the other side, where the road goes up to
the house on the hill. "I have been here before," he said to himself, "but I did not know it then." He thought of his
mother, and of the little room in which she used to read to him at night, and of all the things that she had told him.
When the sun had gone down he got up and went slowly back by the way that he had come. In the town there were lights in
the windows, and a woman at a door asked him if he had seen her son. "He will come," said the old man, "they all come
when they are hungry." She laughed at that, and he went on, and it was dark before he found his own street.
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 341,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "torch_dtype": "float16",
}


def _half_split(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, `[heads * width, fan_in]`, from interleaved pairs to halves."""
    rows, fan_in = kernel.shape
    return kernel.reshape(heads, rows // heads // 2, 2, fan_in).swapaxes(1, 2).reshape(rows, fan_in)


def glass_tensors() -> dict[str, np.ndarray]:
    """The tensors under the names and in the form that `LlamaForCausalLM` has them, float16."""
    (path,) = [f for f in importlib.metadata.files("glassllm") or [] if str(f).endswith("en.npz")]
    theirs = np.load(path.locate())
    tensors = {"model.embed_tokens.weight": theirs["E"], "model.norm.weight": theirs["norm_f.gamma"]}
    for layer in range(4):
        there, here = f"blocks.{layer}", f"model.layers.{layer}"
        tensors |= {
            f"{here}.input_layernorm.weight": theirs[f"{there}.norm1.gamma"],
            f"{here}.self_attn.q_proj.weight": _half_split(theirs[f"{there}.attn.W_Q"].T, 4),
            f"{here}.self_attn.k_proj.weight": _half_split(theirs[f"{there}.attn.W_K"].T, 2),
            f"{here}.self_attn.v_proj.weight": theirs[f"{there}.attn.W_V"].T,
            f"{here}.self_attn.o_proj.weight": theirs[f"{there}.attn.W_O"].T,
            f"{here}.post_attention_layernorm.weight": theirs[f"{there}.norm2.gamma"],
            f"{here}.mlp.gate_proj.weight": theirs[f"{there}.ffn.W1"].T,
            f"{here}.mlp.up_proj.weight": theirs[f"{there}.ffn.W3"].T,
            f"{here}.mlp.down_proj.weight": theirs[f"{there}.ffn.W2"].T,
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def write_glass(folder: Path) -> Path:
    """The whole checkpoint: config, tensors, tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(glass_tensors(), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    (path,) = [f for f in importlib.metadata.files("glassllm") or [] if str(f).endswith("en.tokenizer.json")]
    theirs = json.loads(Path(str(path.locate())).read_text(encoding="utf-8"))
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    pieces = [*special, *theirs["alphabet"], *(a + b for a, b in theirs["merges"])]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(p) for p in theirs["merges"]], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    return tokenizer
