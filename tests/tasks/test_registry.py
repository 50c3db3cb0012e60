import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rollart
from rollart.config import parse
from rollart.errors import ConfigError
from rollart.sections import TaskConfig
from rollart.tasks import registry
from rollart.tasks.definition import TaskDefinition
from rollart.tasks.sorting import SortingOptions


def _specs(text):
    return registry.specs(parse(text))


@pytest.fixture
def folder(tmp_path):
    """A current folder that holds a user's module; a process of its own keeps this one's imports clean."""
    (tmp_path / "my_env.py").write_text(
        textwrap.dedent(
            '''
            from typing import Literal


            class Env:
                """Counts down."""

                def __init__(self, start: int, mode: Literal["a", "b"] = "a", rest: object = None):
                    self.start = start

                def reset(self, seed=None):
                    return str(self.start), {}

                def step(self, action):
                    return "", 1.0, True, False, {}


            class Open:
                def __init__(self, **kwargs):
                    self.kwargs = kwargs

                def reset(self, seed=None):
                    return str(self.kwargs), {}

                step = reset


            class Half:
                def reset(self, seed=None): ...


            def reward(request):
                return float(len(request.responses))
            '''
        )
    )
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence key')")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "needing.py").write_text("import package_that_is_not_there")
    return tmp_path


def _in(folder, text, code="print(registry.specs(parse(text)))"):
    script = f"from rollart.tasks import registry\nfrom rollart.config import parse\ntext = {text!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, env=_path())
    return done.stdout + done.stderr


def _path():
    return {**os.environ, "PYTHONPATH": str(Path(rollart.__file__).parents[1])}


def test_the_config_goes_over_the_definition():
    spec = _specs("[tasks.frozenlake]")["frozenlake"]
    assert (spec.name, spec.tag, spec.max_turns, spec.has_reward) == ("frozenlake", "frozenlake", 16, False)
    assert spec.system_prompt.startswith("Walk from P to G.")
    changed = _specs(
        "[tasks.lake]\nenv='frozenlake'\nweight=2\ntag='walk'\nmax_turns=3\nsystem_prompt=''\nstop=['!']\nenv_retries=0"
    )["lake"]
    assert (changed.name, changed.weight, changed.tag, changed.max_turns) == ("lake", 2.0, "walk", 3)
    assert (changed.system_prompt, changed.stop, changed.env_retries) == ("", ("!",), 0)


def test_whatever_a_definition_decides_a_config_may_decide_for_a_class_of_ones_own(folder):
    text = "[tasks.mine]\nenv='my_env:Env'\noptions={ start = 3 }\n"
    code = "spec = registry.specs(parse(text))['mine']; print(spec.success_reward, spec.max_turns, spec.system_prompt)"
    assert _in(folder, text, code) == "1.0 16 \n"
    assert _in(folder, f"{text}success_reward=0\nmax_turns=2\nsystem_prompt='Go.'", code) == "0.0 2 Go.\n"
    decided = set(TaskDefinition.__struct_fields__) - {"name", "summary", "load", "extra", "requires", "try_out"}
    assert decided <= set(TaskConfig.__struct_fields__)


def test_a_task_brings_its_reward_unless_the_config_names_another():
    assert _specs("[tasks.sorting]")["sorting"].has_reward
    assert registry.reward_url(TaskConfig(env="sorting"), "s") == "rollart.rewards.rule:sorting"
    for url in ("operator:attrgetter", "local://operator:attrgetter", "https://host/path", "lambda://scorer"):
        assert registry.reward_url(TaskConfig(env="sorting", reward=url), "s") == url
    assert registry.reward_url(TaskConfig(env="frozenlake"), "s") == ""


def test_options_reach_the_environment():
    env = registry.make_env(TaskConfig(env="sorting", options={"length": 2}))
    assert len(env.reset(0)[0].split()) == 3
    assert len(registry.make_env(TaskConfig(), "sorting").reset(0)[0].split()) == 1 + SortingOptions().length


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[tasks.frozenlak]", "tasks.frozenlak: unknown environment 'frozenlak'; did you mean 'frozenlake'?"),
        ("[tasks.x]\nenv='sort'", "tasks.x.env: unknown environment 'sort'; did you mean 'sorting'?"),
        ("[tasks.x]\nenv='qqqq'", "tasks.x.env: unknown environment 'qqqq'; choose from .*module:Class"),
        ("[tasks.frozenlake.options]\nsise=3", "tasks.frozenlake.options.sise: unknown option; did you mean 'size'?"),
        ("[tasks.frozenlake.options]\nsize='4'", "tasks.frozenlake.options.size: expected `int`, got `str`"),
        ("[tasks.frozenlake.options]\nsize=1", "tasks.frozenlake.options.size: expected `int` >= 2"),
        ("[tasks.sorting.options]\nlow=5\nhigh=2", "tasks.sorting.options: low 5 is more than high 2"),
        ("[tasks.synthetic.options]\nturns_min=9", "tasks.synthetic.options: turns_min 9 is more than turns_max 8"),
        ("[tasks.gymnasium]", "tasks.gymnasium.options: object missing required field `id`"),
        ("[tasks.gymnasium.options]\nid='Taxi'", "tasks.gymnasium.options.id: 'Taxi' unknown; did you mean 'Taxi-v4'?"),
        ("[tasks.sorting]\nreward='nothing'", "tasks.sorting.reward: 'nothing' is not of the form module:name"),
        ("[tasks.sorting]\nreward='json:dunps'", "tasks.sorting.reward: .*json.* has no 'dunps'; did you mean 'dumps'"),
        ("[tasks.sorting]\nreward='sys:path'", "tasks.sorting.reward: 'sys:path' is .*, which cannot be called"),
        (
            "[tasks.sorting]\nreward='operator:neg'\nreward_options={ a = 1 }",
            "tasks.sorting.reward_options: 'operator:neg' is a plain function, which takes none; write a class",
        ),
        ("[tasks.x]\nenv='math:pi'", "tasks.x.env: 'math:pi' is 3.14.*; expected an environment class"),
        (
            "[tasks.x]\nenv='nowhere_at_all:E'",
            "tasks.x.env: no module 'nowhere_at_all' among the installed packages or in",
        ),
        (
            "[tasks.sorting]\n[rollout]\nmax_model_tokens=100",
            "tasks.sorting.max_tokens: 256 is more than rollout.max_model",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(text, reason):
    with pytest.raises(ConfigError, match=f"^{reason}") as caught:
        _specs(text)
    assert "\n" not in str(caught.value)


def test_a_users_class_in_the_current_folder_is_an_environment(folder):
    text = "[tasks.mine]\nenv='my_env:Env'\noptions={start=3}\nreward='my_env:reward'"
    code = "config = parse(text)\nprint(registry.specs(config)['mine'].has_reward)\n"
    code += "print(registry.make_env(config.tasks['mine'], 'mine').reset(1))"
    assert _in(folder, text, code).split("\n")[:2] == ["True", "('3', {})"]


def test_a_constructor_with_open_keywords_takes_any_option(folder):
    code = "print(registry.make_env(parse(text).tasks['mine'], 'mine').reset(1)[0])"
    assert _in(folder, "[tasks.mine]\nenv='my_env:Open'\noptions={a=1, b=[2]}", code) == "{'a': 1, 'b': [2]}\n"


USER_MISTAKES = {
    "env='my_env:Env'": "tasks.mine.options: object missing required field `start`",
    "env='my_env:Env'\noptions={start='x'}": "tasks.mine.options.start: expected `int`, got `str`",
    "env='my_env:Env'\noptions={start=1, mode='c'}": "tasks.mine.options.mode: invalid enum value 'c'",
    "env='my_env:Env'\noptions={start=1, strat=2}": "tasks.mine.options.strat: unknown option; did you mean 'start'?",
    "env='my_env:Half'": "tasks.mine.env: class Half is no environment: it has no method step",
    "env='my_env:Emv'": "my_env.py has no 'Emv'; did you mean 'Env'?",
    "env='broken:Env'": "tasks.mine.env: importing 'broken' failed: RuntimeError: no licence key",
    "env='leaving:Env'": "tasks.mine.env: importing 'leaving' failed: SystemExit: 3",
    "env='needing:Env'": "tasks.mine.env: importing 'needing' failed: No module named 'package_that_is_not_there'",
}


def test_a_users_mistake_is_named_with_its_cause(folder):
    code = """
for task in text.split("--"):
    try:
        registry.specs(parse("[tasks.mine]\\n" + task))
    except ValueError as error:
        print(type(error).__name__, error)
"""
    lines = _in(folder, "--".join(USER_MISTAKES), code).splitlines()
    for line, reason in zip(lines, USER_MISTAKES.values(), strict=True):
        assert line.startswith("ConfigError tasks.mine.")
        assert reason in line


def test_an_installed_package_publishes_tasks_by_entry_points(folder):
    info = folder / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[rollart.tasks]\ncountdown = my_env:Env\nlake = rollart.tasks.frozenlake:TASK\nbad = broken:Env\n"
    )
    text = "[tasks.countdown]\noptions={start=2}\n[tasks.lake]\noptions={size=3}"
    code = "names = sorted(registry.specs(parse(text)))\n"
    code += "print(names, [(i.name, i.available) for i in registry.describe() if i.name not in registry.BUILT_IN])"
    expected = "['countdown', 'lake'] [('countdown', True), ('lake', True), ('bad', False)]\n"
    assert _in(folder, text, code) == expected


def test_every_task_describes_its_options():
    found = {info.name: info for info in registry.describe()}
    assert set(registry.BUILT_IN) <= set(found)
    size = found["frozenlake"].options[0]
    assert (size.name, size.type, size.default) == ("size", "int", "4")
    assert all(option.doc and option.type for name in registry.BUILT_IN for option in found[name].options)
    tail = next(option for option in found["synthetic"].options if option.name == "latency_tail")
    assert tail.type == "'none' | 'lognormal' | 'gaussian'"


def test_looking_tasks_up_imports_neither_torch_nor_transformers_nor_a_library_of_environments(tmp_path):
    code = "registry.specs(parse(text)); registry.describe(); import sys\n"
    code += "print([m for m in ('torch', 'transformers', 'gymnasium', 'reasoning_gym', 'gem') if m in sys.modules])"
    assert _in(tmp_path, "[tasks.frozenlake]\n[tasks.sorting]\n[tasks.arithmetic]\n[tasks.synthetic]", code) == "[]\n"


def test_the_example_of_ones_own_task_can_be_built_from_its_folder():
    folder = Path(__file__).parents[2] / "examples"
    code = "config = parse(text)\nprint(registry.specs(config)['guess'].max_turns)\n"
    code += "print(registry.make_env(config.tasks['guess'], 'guess').reset(1)[0])"
    assert _in(folder, (folder / "my_task.toml").read_text(), code) == "4\n1 to 9\n"
