import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import ConfigError
from rollart.tasks.chat import ChatRenderer
from rollart.tasks.chat_template import ChatTemplate

from .model_folders import CHATML, TEMPLATES, byte_level_tokenizer, write_folder

TOKENIZER = byte_level_tokenizer()
STYLES = sorted(TEMPLATES)

observations = st.text("abc 12.\n\té漢<|>{%}", max_size=30)
actions = st.text("abz 12\né", min_size=1, max_size=20).map(str.strip).filter(bool)


def _id(token):
    return TOKENIZER.token_to_id(token)


def _conversation(renderer, system, first, turns, stop=None):
    tokens = renderer.first(system, first)
    for answer, observation in turns:
        action = [*renderer.encode(answer), renderer.stop_token_ids[0] if stop is None else stop]
        tokens += action + renderer.following(observation, action)
    return tokens


def _messages(style, system, first, turns):
    messages = [{"role": "user", "content": first}]
    if system and style in ("gemma", "glm", "llama2"):
        messages[0]["content"] = f"{system}\n\n{first}"
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    for answer, observation in turns:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    return messages


@pytest.mark.parametrize("style", [style for style in STYLES if style != "llama2"])
@settings(max_examples=40)
@given(
    system=st.sampled_from(["", "Be brief."]),
    first=observations,
    turns=st.lists(st.tuples(actions, observations), max_size=4),
)
def test_the_pieces_are_the_tokens_of_the_whole_conversation(renderers, style, system, first, turns):
    renderer = renderers[style]
    text = renderer._template.render(_messages(style, system, first, turns))
    assert _conversation(renderer, system, first, turns) == renderer.encode(text)


@pytest.mark.parametrize("style", STYLES)
def test_the_closing_token_comes_first_among_the_stop_tokens(renderers, style):
    _, settings_, closing = TEMPLATES[style]
    eos = settings_["eos_token"]
    expected = dict.fromkeys([_id(closing), _id(eos["content"] if isinstance(eos, dict) else eos)])
    assert renderers[style].stop_token_ids == tuple(expected)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "llama2"])
def test_an_answer_cut_short_is_closed_as_if_it_had_stopped(renderers, style):
    renderer = renderers[style]
    cut = renderer.encode("up")
    stopped = [*cut, renderer.stop_token_ids[0]]
    assert cut + renderer.following("next", cut) == stopped + renderer.following("next", stopped)


def test_a_space_before_the_closing_token_is_not_added_after_it(renderers):
    renderer = renderers["llama2"]
    stopped = [*renderer.encode("up"), _id("</s>")]
    assert TOKENIZER.decode(renderer.following("next", stopped), skip_special_tokens=False) == "<s>[INST] next [/INST]"
    assert TOKENIZER.decode(renderer.following("next", []), skip_special_tokens=False) == " </s><s>[INST] next [/INST]"


def test_another_end_token_does_not_stand_in_for_the_closing_one(renderers):
    renderer = renderers["llama3"]
    after = renderer.following("next", [*renderer.encode("up"), _id("<|endoftext|>")])
    assert after == renderer.following("next", [])
    assert after[0] == _id("<|eot|>")


def test_thinking_that_was_generated_stays_in_the_history(renderers):
    answer = "<think>\nhm\n</think>\n\nup"
    text = TOKENIZER.decode(_conversation(renderers["qwen3"], "", "x", [(answer, "y")]), skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        "<think>\nhm\n</think>\n\nup<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_words_of_the_renderer_in_an_observation_do_no_harm(renderers):
    renderer = renderers["chatml"]
    text = renderer._template.render(_messages("chatml", "", "Zanswerz", [("a", "Zquestionz Zanswerz")]))
    assert _conversation(renderer, "", "Zanswerz", [("a", "Zquestionz Zanswerz")]) == renderer.encode(text)


def test_decoding_leaves_out_only_the_stop_token_at_the_end(renderers):
    renderer = renderers["chatml"]
    stop = renderer.stop_token_ids[0]
    up = renderer.encode("go up é")
    assert renderer.decode([*up, stop]) == renderer.decode(up) == "go up é"
    assert renderer.decode([stop, *up]) == "<|im_end|>go up é"
    assert renderer.decode([stop]) == renderer.decode([]) == ""


def test_stop_tokens_of_the_generation_config_count(tmp_path):
    folder = write_folder(tmp_path, CHATML, {"eos_token": "<|endoftext|>"}, {"eos_token_id": [_id("</s>"), 3]})
    expected = (_id("<|im_end|>"), _id("<|endoftext|>"), _id("</s>"), 3)
    assert ChatRenderer(folder).stop_token_ids == expected


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_the_template_may_lie_in_the_tokenizer_config(tmp_path, renderers, template):
    folder = write_folder(tmp_path, None, {"chat_template": template, "eos_token": "<|im_end|>"})
    assert ChatRenderer(folder).first("s", "x") == renderers["chatml"].first("s", "x")


def test_transformers_renders_the_same(tmp_path):
    from transformers import PreTrainedTokenizerFast

    for style, (template, settings_, _) in TEMPLATES.items():
        folder = tmp_path / style
        folder.mkdir()
        write_folder(folder, template, settings_)
        theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
        messages = _messages(style, "Be brief.", " x ", [("a", "b\n"), ("<b>", "é")])
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ChatTemplate(folder).render(messages) == expected


def _break(folder, name, text):
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("chat_template.jinja", "{% for %}", "chat template cannot be read"),
        ("chat_template.jinja", "{{ raise_exception('never') }}", "refuses the roles user, assistant, user: never"),
        ("chat_template.jinja", "{{ messages[0].content }}", "leaves out what the assistant said"),
        ("chat_template.jinja", "{{ messages[1].content }}", "leaves out what the user said"),
        ("chat_template.jinja", "{{ ''.__class__.__mro__ }}", "refuses the roles"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "[", "not readable JSON"),
        ("generation_config.json", "[]", "expected a JSON object"),
    ],
)
def test_a_folder_that_cannot_work_is_refused_with_the_reason(tmp_path, name, text, reason):
    folder = write_folder(tmp_path, CHATML, {"eos_token": "<|im_end|>"})
    _break(folder, name, text)
    with pytest.raises(ConfigError, match=reason):
        ChatRenderer(folder)


def test_a_template_without_any_end_token_is_refused(tmp_path):
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '\\n' }}{% endfor %}"
    with pytest.raises(ConfigError, match="no token ends a turn; set eos_token"):
        ChatRenderer(write_folder(tmp_path, template, {}))
    with_eos = write_folder(tmp_path, template, {"eos_token": "<|endoftext|>"})
    assert ChatRenderer(with_eos).following("x", []) == TOKENIZER.encode("\nuser: x\n").ids


def test_a_folder_without_tokenizer_or_template_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer.json; save a fast tokenizer"):
        ChatRenderer(tmp_path)
    folder = write_folder(tmp_path, None, json.loads('{"eos_token": "</s>"}'))
    with pytest.raises(ConfigError, match=r"no chat template; put a chat_template.jinja"):
        ChatRenderer(folder)
