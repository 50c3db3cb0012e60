"""Small model folders for tests: a byte-level tokenizer and short templates in the styles of known families."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>",
    "<start_of_turn>", "<end_of_turn>", "<bos>", "<s>", "</s>", "<|user|>", "<|assistant|>",
]  # fmt: skip

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# A system header that is always there, trimmed contents, a date.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if tools is not none %}{{- raise_exception('tools are absent') }}{%- endif %}
{{- '<|header|>system<|/header|>\\n\\nYear: ' + (strftime_now('%Y') | length | string) + '\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{%- continue %}{%- endif %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message['content'] | trim }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}
"""

# Thinking is shown after the last question only, where the renderer's placeholder would not survive.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# No system role, strict alternation, the assistant is called model.
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# The end of an answer is the beginning of the next question, and the system message is dropped without a word.
GLM = """\
{% for message in messages if message.role != 'system' %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# A space stands before the closing token.
LLAMA2 = """\
{% for message in messages %}
{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}
{% endfor %}"""

TEMPLATES = {  # template, its tokenizer settings, the token that closes an assistant's turn
    "chatml": (CHATML, {"eos_token": "<|im_end|>", "bos_token": None}, "<|im_end|>"),
    "llama3": (LLAMA3, {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>"}, "<|eot|>"),
    "qwen3": (QWEN3, {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}, "<|im_end|>"),
    "gemma": (GEMMA, {"eos_token": "<|endoftext|>", "bos_token": "<bos>"}, "<end_of_turn>"),
    "glm": (GLM, {"eos_token": "<|endoftext|>"}, "<|user|>"),
    "llama2": (LLAMA2, {"eos_token": "</s>", "bos_token": "<s>"}, "</s>"),
}


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["user assistant system model up down left right 1 2 3 sort the numbers"] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.enable_truncation(8)
    return tokenizer


def write_folder(folder: Path, template: str | None, settings: dict, generation: dict | None = None) -> Path:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
