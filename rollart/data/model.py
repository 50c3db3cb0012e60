"""Model folders: where a model's name leads, and the `tiny` model that is made on first use.

Invariant: a folder returned by `resolve` is complete, in Hugging Face format, and loads offline in transformers and
vLLM; `tiny` has the same bytes on every machine with the same library versions, and two processes that make it at once
do no harm. What this file leaves out: loading weights into an engine or trainer.

Run as a program (`python -m rollart.data.model tiny`) it prints the folder, so that the driver never imports torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import string
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.data.places import TINY as TINY_NAME
from rollart.data.places import model_place
from rollart.errors import ConfigError, boundary
from rollart.files import cache_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# One token each, with and without a leading space: the words of the shipped tasks, so that a small model reads short
# sequences. Everything else falls back to bytes.
SPELLED = (
    "system user assistant up down left right Walk from to Avoid Answer or wall frozen hole goal start Invalid action "
    "Sort Write the numbers number in ascending order Compute result Say word and"
)
WORDS = tuple(SPELLED.split())

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that every back end's attention kernels take
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TINY_SEED = 20260


def resolve(name: str) -> Path:
    """The folder of a model by `tiny`, path, or hub name. Raises ConfigError when there is none."""
    if name == TINY_NAME:
        return _tiny()
    if (folder := model_place(name)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.name: {name!r} is no folder here and could not be had from the hub ({reason}); "
            "take 'tiny' or a local folder"
        ) from error


def tiny_folder() -> Path:
    """Where `tiny` lies or will lie; the name changes with anything that the bytes depend on."""
    recipe = json.dumps([TINY, TINY_SEED, WORDS, CHAT_TEMPLATE]).encode()
    return cache_folder() / "models" / f"tiny-{hashlib.sha256(recipe).hexdigest()[:12]}"


def _tiny() -> Path:
    folder = tiny_folder()
    if (folder / "config.json").is_file():
        return folder
    with boundary(ConfigError, f"model 'tiny' cannot be made in {folder.parent} (set ROLLART_CACHE to another folder)"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".tiny-", dir=folder.parent))
        try:
            make_tiny(draft)
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster, with the same bytes
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def make_tiny(folder: Path, **changes: object) -> None:
    """Write the tiny Qwen3 model, its tokenizer and chat template into an existing folder.

    `changes` override entries of `TINY`, for tests and benchmarks.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    end, stop = tokenizer.token_to_id(EOS), tokenizer.token_to_id(IM_END)
    config = Qwen3Config(**{**TINY, **changes, "eos_token_id": stop, "pad_token_id": end, "bos_token_id": None})  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[stop, end], pad_token_id=end)
    model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: bytes, the merges that spell `WORDS`, ` X` for letters and digits, three specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], int] = {}
    for word in WORDS:
        pieces = _split(word, merges)
        while len(pieces) > 1:
            merges[pieces[0], pieces[1]] = len(merges)
            pieces[:2] = ["".join(pieces[:2])]
    space = "\u0120"  # how the byte-level alphabet writes a space
    for piece in (*WORDS, *string.ascii_letters, *string.digits):
        merges[space, piece] = len(merges)
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*alphabet, *(a + b for a, b in merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, IM_START, IM_END)])
    return tokenizer


def _split(word: str, merges: dict[tuple[str, str], int]) -> list[str]:
    """The pieces that byte-pair encoding with `merges` (pair -> rank) makes of a word."""
    pieces = list(word)
    while True:
        ranked = [(merges[pair], at) for at, pair in enumerate(itertools.pairwise(pieces)) if pair in merges]
        if not ranked:
            return pieces
        at = min(ranked)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": EOS,
        "model_max_length": TINY["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def main() -> int:
    """Print the folder of the model named on the command line."""
    try:
        sys.stdout.write(f"{resolve(sys.argv[1])}\n")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
