"""A conversation as tokens, one observation at a time.

Invariant: what was appended stays. `first` and the results of `following`, with the generated tokens between them, are
the whole sequence that the model sees and that training trains on; nothing is rendered or tokenised twice. Templates
that would rewrite history (Qwen3 drops old thinking, Mistral moves the system prompt to the last message) are used
only for what follows an assistant's text.
What this file leaves out: tool calls and pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollart.errors import ConfigError
from rollart.tasks.chat_template import ChatTemplate, Message, read_json

# Plain words: no template strips, splits or rewrites them, as some do with the thinking of earlier turns.
SYSTEM, QUESTION, ANSWER = "Zsystemz", "Zquestionz", "Zanswerz"

KEPT = 512
"""Observations whose tokens are kept."""


class ChatRenderer:
    """`protocols.Renderer` over a model folder in Hugging Face format.

    `stop_token_ids`: first the token with which the template closes an assistant's turn, then the tokenizer's and the
    generation config's end-of-sequence tokens. Raises ConfigError for a folder that cannot hold a conversation.
    """

    def __init__(self, model_folder: str | Path) -> None:
        self._folder = Path(model_folder)
        self._tokenizer = _load_tokenizer(self._folder)
        self._template = ChatTemplate(self._folder)
        self._takes_system = self._probe_system()
        self._closing = self._probe_closing()
        self.stop_token_ids = self._find_stop_tokens()
        # Members of a group read the same observations, and small worlds show the same ones again and again.
        self._first = lru_cache(KEPT)(self._render_first)
        self._following = lru_cache(KEPT)(self._render_following)

    def first(self, system_prompt: str, observation: str) -> list[int]:
        """Tokens up to where the assistant begins; a template without system role gets it in the first user message."""
        return list(self._first(system_prompt, observation))

    def following(self, observation: str, previous_action: Sequence[int]) -> list[int]:
        """Tokens between an assistant's text and the next one. A closing token that was generated is not repeated."""
        tokens = self._following(observation)
        if previous_action and previous_action[-1] == self._closing:
            return list(tokens[tokens.index(self._closing) + 1 :])
        return list(tokens)

    def _render_first(self, system_prompt: str, observation: str) -> tuple[int, ...]:
        if system_prompt and self._takes_system:
            messages = [_message("system", system_prompt), _message("user", observation)]
        elif system_prompt:
            messages = [_message("user", f"{system_prompt}\n\n{observation}")]
        else:
            messages = [_message("user", observation)]
        return tuple(self._encode(self._template.render(messages)))

    def _render_following(self, observation: str) -> tuple[int, ...]:
        return tuple(self._encode(self._after_answer(observation)))

    def decode(self, action: Sequence[int]) -> str:
        """Text of generated tokens, without a stop token at their end."""
        kept = action[:-1] if action and action[-1] in self.stop_token_ids else action
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Tokens of an action's text as a model would write it, without a stop token."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _after_answer(self, observation: str) -> str:
        messages = [_message("user", QUESTION), _message("assistant", ANSWER), _message("user", observation)]
        _, found, after = self._template.render(messages).partition(ANSWER)
        if not found:
            raise ConfigError(f"{self._folder}: the chat template leaves out what the assistant said")
        return after

    def _probe_system(self) -> bool:
        try:
            return SYSTEM in self._template.render([_message("system", SYSTEM), _message("user", QUESTION)])
        except ConfigError:
            return False

    def _probe_closing(self) -> int | None:
        """The first added token between an assistant's text and the next user's."""
        between, found, _ = self._after_answer(QUESTION).partition(QUESTION)
        if not found:
            raise ConfigError(f"{self._folder}: the chat template leaves out what the user said")
        added = self._tokenizer.get_added_tokens_decoder()
        return next((token for token in self._encode(between) if token in added), None)

    def _find_stop_tokens(self) -> tuple[int, ...]:
        eos = self._tokenizer.token_to_id(self._template.special_tokens.get("eos_token", ""))
        configured = read_json(self._folder / "generation_config.json").get("eos_token_id")
        candidates = [self._closing, eos, *(configured if isinstance(configured, list) else [configured])]
        stops = tuple(_unique(token for token in candidates if isinstance(token, int)))
        if not stops:
            raise ConfigError(
                f"{self._folder}: no token ends a turn; set eos_token in tokenizer_config.json "
                "or eos_token_id in generation_config.json"
            )
        return stops


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _unique(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))


def _load_tokenizer(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: no tokenizer.json; save a fast tokenizer there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
