"""The configuration: what it accepts, what it derives, and that every mistake is one line with a way out."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollart import toml
from rollart.config import (
    Config,
    from_dict,
    layout,
    limits,
    load,
    parse,
    server_urls,
    serverless_of,
    to_toml,
)
from rollart.engine_options import ENGINE_KEYS, FOLLOWS, SET, VLLMOptions
from rollart.errors import ConfigError
from rollart.schedule import SCHEDULES
from rollart.sections import LogConfig, TaskConfig, TrainConfig

BASE = "[tasks.frozenlake]\n"


def complaint(*overrides: str, text: str = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "schedule=rolart",
            "schedule: 'rolart' is not a choice; did you mean 'rollart'? "
            "choose from areal, one_off, rollart, sync, sync_plus",
        ),
        (
            "train.loss=zzzz",
            "train.loss: 'zzzz' is not a choice; choose from cispo, gspo, ppo, reinforce",
        ),
        (
            "schedule=3",
            "schedule: 3 is not a choice; choose from areal, one_off, rollart, sync, sync_plus",
        ),
        ("steps=many", "steps: expected a whole number of at least 1 such as 100, got 'many'"),
        ("steps=true", "steps: expected a whole number of at least 1 such as 100, got true"),
        ("steps=1.5", "steps: expected a whole number of at least 1 such as 100, got 1.5"),
        ("steps=0", "steps: 0 is out of range; expected a whole number of at least 1"),
        ("train.learning_rate=0", "train.learning_rate: 0 is out of range; expected a number above 0"),
        ("train.learning_rate=true", "train.learning_rate: expected a number above 0 such as 0.001, got true"),
        ("train.beta1=1.0", "train.beta1: 1.0 is out of range; expected a number of at least 0 and below 1"),
        ("rollout.top_p=1.5", "rollout.top_p: 1.5 is out of range; expected a number above 0 and of at most 1"),
        (
            "rollout.temperature=1e-300",
            "rollout.temperature: 1e-300 is out of range; expected a number from 0.001 to 1000",
        ),
        ("train.learning_rate=inf", "train.learning_rate: inf is out of range; expected a number above 0"),
        ("train.kl_coef=nan", "train.kl_coef: nan is out of range; expected a number of at least 0"),
        ("alpha=5000", "alpha: 5000 is no bound on staleness, which is a number of versions; give a number above 0"),
        ("log.name=42", 'log.name: expected text in quotes such as "42", got 42'),
        ("log.name=[1]", 'log.name: expected text in quotes such as "cpu", got a list'),
        ("log.tensorboard=yes", "log.tensorboard: expected true or false, got 'yes'"),
        ("tasks.frozenlake.stop=x", 'tasks.frozenlake.stop: expected a list such as ["a", "b"], got \'x\''),
        ("tasks.frozenlake.options=8", "tasks.frozenlake.options: expected a table such as { size = 4 }, got 8"),
        ("tasks.frozenlake=8", "tasks.frozenlake: expected a table, written as [tasks.frozenlake], got 8"),
        ("tasks.frozenlake.wieght=2", "tasks.frozenlake.wieght: unknown key; did you mean 'weight'?"),
        ("train=fast", "train: expected a table, written as [train], got 'fast'"),
        ("trian.loss=ppo", "trian: unknown table; did you mean 'train'?"),
        ("learning_rate=0.1", "learning_rate: unknown key; did you mean 'train.learning_rate'?"),
        ("rollout.minibatches=2", "rollout.minibatches: unknown key; did you mean 'train.minibatches'?"),
        ("seed=99999999999999999999", "seed: 99999999999999999999 does not fit into 64 bits"),
        ("tasks.frozenlake.options.since=1979-05-27", "options.since: date is not supported; write it as text"),
        ("tasks.frozenlake.options.deep={a=[nan]}", "tasks.frozenlake.options.deep.a: must be finite, not nan"),
        ("log.name=a/b", "log.name: 'a/b' cannot name a folder; take letters, digits, '-' and '_'"),
        ("log.name=\udcff", "is not UTF-8 text"),
        ('tasks."\udcce".env=sorting', "is not UTF-8 text"),
        ("steps", "override 'steps': write it as section.key=value, for example train.learning_rate=3e-4"),
        ("=3", "override '=3': write it as section.key=value"),
        ("a..b=3", "override 'a..b=3': write it as section.key=value"),
        ("seed.x=3", "seed: expected a whole number"),
        ("engine=vlm", "engine: 'vlm' is not a choice; did you mean 'vllm'?"),
        ("engine_options.slots=3", "engine_options.slots: follows from rollout.engine_slots; set that instead"),
        ("engine=http", 'engine_options.urls: name the servers, such as ["http://10.0.0.1:30000"]'),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_the_way_out(override: str, line: str) -> None:
    assert line in complaint(override)


def test_an_override_below_a_value_says_so() -> None:
    assert complaint("steps.x=3", text="steps = 3\n" + BASE) == "override 'steps.x=3': 'steps' is a value, not a table"


def test_whole_numbers_do_for_numbers_and_overrides_are_toml() -> None:
    config = parse(
        BASE,
        [
            "train.learning_rate=1",
            "roles.actor_gen.device_class=H20",
            "log.tensorboard=false",
            "tasks.frozenlake.stop=['a']",
        ],
    )
    assert config.train.learning_rate == 1.0
    assert config.roles["actor_gen"].device_class == "H20"
    assert config.log.tensorboard is False
    assert config.tasks["frozenlake"].stop == ["a"]


def test_an_override_may_quote_names_and_add_tasks() -> None:
    config = parse(BASE, ['tasks."my.module:Env".weight=2', "tasks.frozenlake.options.size=8"])
    assert config.tasks["my.module:Env"].weight == 2
    assert config.tasks["frozenlake"].options == {"size": 8}


@pytest.mark.parametrize("text", ["", "[tasks]\n", "tasks = {}\n"])
def test_a_config_without_tasks_says_how_to_add_one(text: str) -> None:
    assert complaint(text=text) == "tasks: no task; add a table such as [tasks.frozenlake]"


@pytest.mark.parametrize("text", ["steps = ", "a = 1\na = 2\n", "x = " + "[" * 5000])
def test_text_that_is_not_toml_is_a_config_error(text: str) -> None:
    assert "not valid TOML" in complaint(text=text)


@pytest.mark.parametrize(
    "value", ["-1", "-0.5", "nan", "inf", "-inf", "1000.5", "1e400", "x", '""', "true", "[1]", "{a=1}"]
)
@pytest.mark.parametrize("schedule", [*SCHEDULES])
def test_what_is_no_alpha_is_refused_with_what_the_schedule_takes(value: str, schedule: str) -> None:
    why = complaint(f"schedule={schedule}", f"alpha={value}")
    assert " is no bound on staleness, which is a number of versions; " in why
    implied = SCHEDULES[schedule].alpha
    rule = "give a number above 0, at most 1000, such as 1 or 0.5"
    assert why.endswith(rule if implied is None else f"schedule {schedule!r} implies {implied:g}; leave alpha out")


def test_combinations_that_cannot_work_say_what_would() -> None:
    assert "leave alpha out" in complaint("schedule=sync", "alpha=2")
    assert "alpha = 1 or schedule 'sync_plus'" in complaint("alpha=0")
    assert complaint("train.minibatches=3").endswith("nearest that does: 2")
    assert complaint("train.minibatches=15").endswith("nearest that does: 16")
    assert complaint("train.minibatches=40").endswith("nearest that does: 16")
    assert "'reinforce_pp'" in complaint("rollout.group_size=1")
    assert "lower the first or raise the second" in complaint("tasks.frozenlake.max_tokens=2000")
    assert "every weight is 0" in complaint("tasks.frozenlake.weight=0")
    for schedule in ("sync", "sync_plus", "one_off"):
        text = complaint("rollout.free_slots=train_start", f"schedule={schedule}")
        assert f"schedule '{schedule}' admits a batch at a time; take 'train_end', or schedule 'rollart'" in text
    assert complaint("weights.replicas=2").startswith("weights.replicas: only read with weights.store = 'mooncake'")
    assert complaint("weights.protocol=rdma").startswith("weights.protocol: only read with weights.store = 'mooncake'")
    assert parse(BASE, ["weights.store=mooncake", "weights.protocol=rdma"]).weights.protocol == "rdma"
    assert "weights.master: 'here' is not of the form host:port" in complaint(
        "weights.store=mooncake", "weights.master=here"
    )


def test_a_fractional_alpha_rounds_the_slots_up() -> None:
    derived = limits(parse(BASE, ["alpha=0.5", "rollout.groups_per_batch=5", "rollout.extra_groups=2"]))
    assert derived.slots == 8 + 2
    assert derived.trajectories_in_flight == 10 * 8
    assert derived.groups_in_memory == 10
    assert derived.trajectories_per_batch == 40


def test_slots_that_are_free_when_training_starts_keep_one_more_batch_in_memory() -> None:
    words = ["rollout.free_slots=train_start", "rollout.groups_per_batch=5", "rollout.extra_groups=2"]
    derived = limits(parse(BASE, words))
    assert (derived.slots, derived.buffer_groups, derived.groups_in_memory) == (12, 12, 17)
    assert derived.trajectories_in_flight == 12 * 8


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_a_config_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file|directory"):
        load(tmp_path / name)


def test_a_file_that_is_not_text_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "c.toml")


def outcome(override: str) -> Config | str:
    try:
        return parse(BASE, [override])
    except ConfigError as error:
        return str(error)


TEXT = st.text(max_size=12)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
TASK = st.builds(
    TaskConfig,
    env=TEXT,
    weight=st.floats(0.001, 1e6),
    options=st.dictionaries(TEXT, PLAIN, max_size=4),
    system_prompt=st.none() | TEXT,
    stop=st.lists(TEXT, max_size=3),
    max_turns=st.none() | st.integers(1, 1000),
)
NAMED = {*ENGINE_KEYS, *FOLLOWS, *SET, *VLLMOptions.__struct_fields__, "pipeline_parallel_size"}
CONFIG = st.builds(
    Config,
    seed=st.integers(-(2**63), 2**63 - 1),
    alpha=st.none() | st.floats(0.001, 1000),
    engine=st.just("vllm"),
    engine_options=st.dictionaries(TEXT.filter(lambda name: name not in NAMED), PLAIN, max_size=3),
    tasks=st.dictionaries(st.text(min_size=1, max_size=12), TASK, min_size=1, max_size=3),
)


def test_every_server_is_named_once() -> None:
    urls = ["http://a:1", "http://b:1"]
    config = parse(BASE, ["engine=http", "engine_options.kind=vllm", f"engine_options.urls={urls}"])
    assert server_urls(config) == urls
    assert server_urls(parse(BASE)) == []
    for first, second in (
        ("http://a:1", "http://a:1"),
        ("http://a:1", "http://A:1/"),
        ("http://localhost:1", "http://127.0.0.1:1"),
        ("http://a", "http://a:80"),
    ):
        assert "a server is named twice" in complaint(*ON_VLLM, f'engine_options.urls=["{first}", "{second}"]')
    parse(BASE, [*ON_VLLM, 'engine_options.urls=["http://a:1/x", "http://a:1/y", "http://a:2"]'])


ON_VLLM = ("engine=http", "engine_options.kind=vllm")
FINE = "train.canary_tolerance: 0.001 is finer than"
SERVERS = ("engine=http", 'engine_options.urls=["http://a:1"]')
ON_SGLANG = (*SERVERS, "engine_options.kind=sglang")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("engine_options.prefil_tokens=3",), "engine_options.prefil_tokens: unknown key; did you mean 'prefill_toke"),
        (("engine_options.floor_s=3",), "engine_options.floor_s: unknown key; choose from dtype, kept_tokens, prefill"),
        (("engine_options.prefill_tokens=0",), "engine_options.prefill_tokens: 0 is out of range; expected a whole"),
        (("engine_options.urls=[]",), "engine_options.urls: unknown key; choose from dtype, kept_tokens, prefill_tok"),
        (
            ("engine=emulated", "engine_options.slowdown=fast"),
            "engine_options.slowdown: expected a number above 0 such",
        ),
        (("engine=emulated", "engine_options.dtype=fp8"), "engine_options.dtype: 'fp8' is not a choice; choose from"),
        (
            ("engine=vllm", "engine_options.dtype=fp8"),
            "engine_options.dtype: 'fp8' is not a choice; choose from auto,",
        ),
        (
            ("engine=vllm", "engine_options.async_scheduling=true"),
            "engine_options.async_scheduling: rollart sets it it",
        ),
        (
            ("engine=vllm", "engine_options.kv_transfer_config={}"),
            "engine_options.kv_transfer_config: follows from [ro",
        ),
        (
            ("engine=vllm", "engine_options.max_num_seqs=3"),
            "engine_options.max_num_seqs: follows from rollout.engine_s",
        ),
        (("engine=vllm", "engine_options.pipeline_parallel_size=2"), "engine_options.pipeline_parallel_size: rollart "),
        (("engine=vllm", "rollout.temperature=3"), "rollout.temperature: 3, but vLLM takes 0.01 to 2; take 2, or anot"),
        (
            ("engine=vllm", "rollout.temperature=0.001"),
            "rollout.temperature: 0.001, but vLLM takes 0.01 to 2; take 0.01",
        ),
        (SERVERS, "engine_options.kind: say what the servers are, 'vllm' or 'sglang'"),
        ((*SERVERS, "engine_options.kind=tgi"), "engine_options.kind: 'tgi' is not a choice; choose from vllm, sglang"),
        ((*ON_SGLANG, "engine_options.timeout=3"), "engine_options.timeout: unknown key; did you mean 'timeout_s'?"),
        (
            (*ON_SGLANG, "engine_options.timeout_s=0"),
            "engine_options.timeout_s: 0 is out of range; expected a number ab",
        ),
        (
            (*ON_SGLANG, "rollout.top_k=5"),
            "rollout.top_k: SGLang's log-probabilities are those before top_k and top_p; ",
        ),
        (
            (*ON_SGLANG, "rollout.top_p=0.5"),
            "rollout.top_p: SGLang's log-probabilities are those before top_k and top_",
        ),
        (
            (*ON_SGLANG, 'engine_options.urls=["127.0.0.1:8000"]'),
            "engine_options.urls: '127.0.0.1:8000': write it as ht",
        ),
        (
            (*SERVERS, "engine_options.kind=vllm", "rollout.temperature=3"),
            "rollout.temperature: 3, but a server of vLLM",
        ),
        (("engine_options.dtype=bfloat16",), f"{FINE} an engine in bfloat16 agrees with the trainer; take train.can"),
        (("engine=vllm", "engine_options.dtype=bfloat16"), f"{FINE} an engine in bfloat16 agrees with the trainer; "),
        (("engine=vllm", "engine_options.dtype=half"), f"{FINE} an engine in half agrees with the trainer; take"),
    ],
)
def test_an_engine_that_cannot_work_is_refused_early(overrides: tuple[str, ...], line: str) -> None:
    assert complaint(*overrides).startswith(line)


def test_engines_take_what_they_document() -> None:
    parse(BASE, ["engine=vllm", "rollout.temperature=0.01", "engine_options.block_size=32", "rollout.top_k=5"])
    parse(BASE, [*ON_SGLANG, "rollout.temperature=3", "engine_options.patience_s=1"])
    parse(BASE, ["engine=vllm", "engine_options.dtype=bfloat16", "train.canary_tolerance=0.1"])
    parse(BASE, ["engine=emulated", "engine_options.params=1e9", "engine_options.kept_tokens=0"])


@given(CONFIG)
def test_a_written_config_reads_back_equal(config: Config) -> None:
    assert parse(to_toml(config)) == config


SECTIONS = {"": Config, "train": TrainConfig, "log": LogConfig, "tasks.frozenlake": TaskConfig}


@given(st.sampled_from(sorted(SECTIONS)), TEXT, PLAIN)
def test_a_random_key_is_refused_by_its_full_name(section: str, name: str, value: object) -> None:
    assume(name not in SECTIONS[section].__struct_fields__)
    data: dict[str, Any] = {"tasks": {"frozenlake": {}}, "train": {}, "log": {}}
    functools.reduce(operator.getitem, section.split(".") if section else [], data)[name] = value
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    assert str(caught.value).startswith(f"{section}.{toml.key(name)}: unknown ".removeprefix("."))


@given(
    st.sampled_from(["", "train.", "rollout.", "tasks.frozenlake.", "log."]),
    st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=10),
    TEXT,
)
def test_any_override_gives_a_config_or_a_config_error_that_names_the_key(section: str, name: str, text: str) -> None:
    result = outcome(f"{section}{name}={text}")
    assert isinstance(result, Config) or name in result


@given(TEXT)
def test_no_override_text_raises_anything_but_a_config_error(text: str) -> None:
    assert outcome(text)


def test_shards_follow_from_the_trajectories_in_flight() -> None:
    def shards(**options: object) -> int:
        rollout = {"groups_per_batch": 8, "group_size": 8, "shard_trajectories": 50}
        return limits(from_dict({"tasks": {"maze": {}}, "rollout": rollout, **options})).shards

    assert shards() == 3, "16 slots of 8 are 128 trajectories"
    assert shards(rollout={"groups_per_batch": 8, "group_size": 8}) == 1
    assert shards(schedule="sync_plus") == 2
    assert shards(schedule="sync") == shards(runtime="inline") == 1
    with pytest.raises(ConfigError, match=r"roles\.rollout\.workers: follows from rollout\.shard_trajectories"):
        shards(roles={"rollout": {"workers": 3}})


def test_a_serverless_pool_says_how_many_calls_run_at_once_unless_the_table_does():
    text = """
[tasks.sorting]
reward = "https://rewards.example/score"
[tasks.other]
env = "sorting"
[pools.functions]
url = "https://rewards.example/score"
count = 40
"""
    config = parse(text)
    assert serverless_of(config, "sorting").max_concurrency == 40
    assert serverless_of(config, "other").max_concurrency == 0
    config = parse(text, ["serverless.default.max_concurrency=3"])
    assert serverless_of(config, "sorting").max_concurrency == 3
    assert serverless_of(config, "other").max_concurrency == 3


def test_a_serverless_table_belongs_to_a_task_or_to_all():
    with pytest.raises(ConfigError, match=r"serverless.sortin: no task has this name; did you mean 'sorting'\?"):
        parse("[tasks.sorting]\n[serverless.sortin]\nbatch = 2")


FSDP = ("trainer=fsdp2", "roles.actor_train.workers=4")
MEGATRON = ("trainer=megatron", "roles.actor_train.workers=8")
BFLOAT16 = ("train.precision=bfloat16", "train.canary_tolerance=0.1")


def test_the_layout_of_ranks_follows_from_their_number_and_what_they_share() -> None:
    def shown(*overrides: str) -> str:
        return str(layout(parse(BASE, overrides)))

    assert shown() == "1 rank = 1 data"
    assert shown(*FSDP) == "4 ranks = 4 data"
    assert shown("trainer=fsdp2", "roles.actor_train.workers={ H800 = 2, H20 = 2 }") == "4 ranks = 4 data"
    assert shown(*FSDP, "train.tensor_parallel=2") == "4 ranks = 2 data x 2 tensor"
    stages = "train.megatron={ pipeline_parallel = 2 }"
    assert shown(*MEGATRON, stages, "train.tensor_parallel=2") == "8 ranks = 2 data x 2 tensor x 2 pipeline"
    assert shown(*MEGATRON, "train.megatron.expert_parallel=4") == "8 ranks = 8 data, 4 expert"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("train.tensor_parallel=2",), "train.tensor_parallel: trainer 'embedded' is one process in float32; take"),
        (BFLOAT16, "train.precision: trainer 'embedded' is one process in float32; take trainer = 'fsdp2'"),
        ((*FSDP, BFLOAT16[0]), "train.canary_tolerance: 0.001 is finer than a trainer in bfloat16 agrees with its"),
        ((*FSDP, "train.tensor_parallel=3"), "roles.actor_train.workers: 4 do not divide into groups of 3 that hold"),
        ((*FSDP, "train.tensor_parallel=8"), "take a multiple of 8"),
        ((*FSDP, "roles.actor_train.devices=2"), "a rank of trainer 'fsdp2' has one device; take devices = 1 and work"),
        ((*FSDP, "runtime=inline"), "runtime: 'inline' is one process, but the trainer is several; take runtime ="),
        (
            (*FSDP, "rollout.groups_per_batch=1", "rollout.group_size=2"),
            "roles.actor_train.workers: 4 ranks would share the 2 trajectories of a mini-batch; take at most 2 workers",
        ),
        ((*FSDP, "train.megatron.pipeline_parallel=2"), "train.megatron: trainer 'fsdp2' does not look at it; take"),
        (
            ("trainer=megatron", "roles.actor_train.workers=4", "train.megatron.expert_parallel=3"),
            "train.megatron.expert_parallel: 3 does not divide the 4 ranks that hold equal layers; take 2",
        ),
        (
            (*MEGATRON, "train.megatron={ pipeline_parallel = 2, context_parallel = 3 }"),
            "roles.actor_train.workers: 8 do not divide into groups of 6 that hold the model together "
            "(train.tensor_parallel, train.megatron); take a multiple of 6, such as 6",
        ),
        ((*FSDP, "train.tensor_parallel=2", "train.lora.r=4"), "train.lora: not together with train.tensor_parallel"),
        (("train.lora.r=4", "train.lora.targets=[]"), "train.lora.targets: no layer is adapted; name some, such as"),
        (("engine=vllm", "train.lora.r=4"), "train.lora: engine 'vllm' takes whole weights; take 'embedded', or r = 0"),
        (
            ("engine=http", "engine_options.kind=vllm", 'engine_options.urls=["http://a:1"]', "train.lora.r=4"),
            "train.lora: engine 'http' takes whole weights; take 'embedded', or r = 0",
        ),
        (("engine_options.lora={ r = 4 }",), "engine_options.lora: follows from train.lora; set that instead"),
        (("trainer=megatron", "train.lora.r=4"), "train.lora: trainer 'megatron' trains all weights; take trainer"),
        (("trainer=fsdp",), "trainer: 'fsdp' is not a choice; did you mean 'fsdp2'?"),
    ],
)  # fmt: skip
def test_a_trainer_that_cannot_work_is_refused_early(overrides: tuple[str, ...], line: str) -> None:
    assert line in complaint(*overrides)
