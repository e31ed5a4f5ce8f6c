"""Chat templates in the styles in use, and tokenizers that hold their special tokens, as `transformers` saves them."""

import json
from pathlib import Path

QWEN = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe of use.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant'] or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool>\\n' + (message.content | tojson) + '\\n</tool>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + \
'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
  {% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

INSTRUCT = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate\nuser and assistant') }}{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}\
{% endif %}{% endfor %}"""

PHI = "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"

# Thoughts of turns before the last question are left out.
FORGETFUL = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if not loop.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- set said = message.content %}
        {%- generation %}
            {%- set end = '<|im_end|>' %}
            {{- said + end }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

PLAIN = """\
{% for message in messages %}{% if message.content == 'skip' %}{% continue %}{% endif %}\
{{ message.role | capitalize }}: {{ message.content }}
{% endfor %}"""

# As Llama 3 and GPT-4 cut text: a word takes one sign before it, line breaks what is blank before them.
BORDERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "</s>"),
]
TEXT = Path(json.__file__).read_text() + "assistant user system\n\nHello, Hello world! [INST] [/INST]\n" * 50


def write_byte_level(folder: Path, template: str) -> Path:
    """A byte-level tokenizer with all of `SPECIAL`, `<think>` and `</think>` that aren't special, and the template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(BORDERS), "isolated"), bytes_of]  # type: ignore[list-item]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return _save(folder, tokenizer, template, bos_token="<|begin_of_text|>", eos_token="</s>")


def write_sentencepiece(folder: Path, template: str, spaces: str, rstrip: bool = False) -> Path:
    """A tokenizer in SentencePiece's way: `spaces` says before which texts it puts a space."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    scheme = "never" if spaces == "normalizer" else spaces
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # no token has two words
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT.replace("\n", " ")], trainer)
    form = json.loads(tokenizer.to_str())
    form["added_tokens"] = form["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(form))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if spaces == "normalizer":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(name, rstrip=rstrip, normalized=False) for name in names])
    return _save(folder, tokenizer, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _save(folder: Path, tokenizer: object, template: str, **special: str) -> Path:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
