"""The command line: what it calls, what it prints, how it fails, and what it does not import."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from rollart import __version__
from rollart.arguments import parsers
from rollart.checks import nearest
from rollart.cli import Parts, main
from rollart.config import Config, parse
from rollart.data.simulated.profile import load_profile, parse_profile
from rollart.data.simulated.runtime import nodes_of
from rollart.errors import ConfigError, EnvError, RollartError, WorkerError
from rollart.profiling import Recorded
from rollart.resource.placement import Placement, place
from rollart.resource.pool import PoolRow, Pools
from rollart.run_folder import RunFolder, checkpoint_path
from rollart.types import NodeInfo, TaskSpec


class Option(Struct):
    name: str
    type: str
    default: str
    doc: str


class Task(Struct):
    name: str
    summary: str
    options: list[Option]
    extra: str = ""
    available: bool = True


class FakeParts(Parts):
    """Two tasks, a machine of two cores, and a record of what was called."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure = failure

    def train(self, config: Config, resume: Path | None, checkpoint: int | None = None) -> int:
        self.calls.append(("train", config, resume))
        self.checkpoint = checkpoint
        if self.failure:
            raise self.failure
        return 0

    def evaluate(self, run: Path, episodes: int | None, checkpoint: int | None) -> int:
        self.calls.append(("evaluate", run, episodes, checkpoint))
        return 0

    def profile(self, run: Path) -> Recorded:
        self.calls.append(("profile", run))
        return Recorded(load_profile("paper"), ["few samples"])

    def specs(self, config: Config) -> dict[str, TaskSpec]:
        known = [task.name for task in self.describe()]
        for name in config.tasks:
            if name not in known:
                raise ConfigError(f"tasks.{name}: {name!r} is not a task{nearest(name, known)}")
        return {name: TaskSpec(name, weight=task.weight) for name, task in config.tasks.items()}

    def describe(self) -> list[Any]:
        size = Option("size", "int", "4", "Rows and columns of the map.")
        slippery = Option("slippery", "bool", "False", "Whether a step may slide.")
        return [Task("maze", "Find the way.", [size, slippery]), Task("maths", "Sums.", [], "reasoning", False)]

    def place(self, config: Config) -> Placement | None:
        return place(config, [NodeInfo("localhost", {"CPU": 2})])

    def pools(self, config: Config, repair: str) -> list[PoolRow]:
        placed = self.place(config)
        assert placed is not None
        pools = Pools(placed.pools)
        pools.bind("someone/inference-0", "actor_gen", "CPU")
        return pools.rows()


class Simulating(FakeParts):
    """Has the devices that a simulated cluster has."""

    def place(self, config: Config) -> Placement | None:
        return place(config, nodes_of(config))


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "quick.toml"
    path.write_text(f"steps = 5\nlog.folder = '{tmp_path}'\n[tasks.maze]\nweight = 3\n[tasks.maths]\n")
    return str(path)


@pytest.fixture
def finished(toml: str) -> Path:
    with RunFolder.create(parse(Path(toml).read_text()), ["rollart", "train", toml]) as folder:
        for step in (2, 4):
            checkpoint_path(folder.path, step).mkdir(parents=True)
    return folder.path


def test_train_gets_the_config_with_its_overrides_wherever_they_stand(toml: str, tmp_path: Path) -> None:
    parts = FakeParts()
    assert main(["train", toml, "steps=7", "--resume", str(tmp_path), "train.loss=gspo"], parts) == 0
    ((_, config, resume),) = parts.calls
    assert (config.steps, config.train.loss, resume) == (7, "gspo", tmp_path)


def test_an_older_checkpoint_belongs_to_a_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = FakeParts()
    assert main(["train", "--resume", str(finished), "--checkpoint", "5"], parts) == 0
    assert parts.checkpoint == 5
    assert main(["train", "configs/default.toml", "--checkpoint", "5"], parts) == 2
    assert "--checkpoint says where a run goes on; name that run: --resume RUN" in capsys.readouterr().err


def test_resume_takes_the_config_of_the_run(finished: Path) -> None:
    parts = FakeParts()
    assert main(["train", "--resume", str(finished), "steps=9"], parts) == 0
    ((_, config, resume),) = parts.calls
    assert (config.steps, config.tasks["maze"].weight, resume) == (9, 3, finished)


def test_eval_hands_on_what_was_asked(finished: Path) -> None:
    parts = FakeParts()
    assert main(["eval", str(finished), "--episodes", "20", "--checkpoint", "4"], parts) == 0
    assert main(["eval", str(finished)], parts) == 0
    assert parts.calls == [("evaluate", finished, 20, 4), ("evaluate", finished, None, None)]


def test_a_profile_is_printed_or_written_and_what_is_thin_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, out = FakeParts(), tmp_path / "mine.toml"
    assert main(["profile", "runs/latest"], parts) == 0
    printed = capsys.readouterr()
    assert parse_profile(printed.out) == load_profile("paper")
    assert printed.err == "rollart: warning: few samples\n"
    assert main(["profile", "runs/latest", "--out", str(out)], parts) == 0
    assert load_profile(str(out)) == load_profile("paper")
    assert f"next: rollart simulate CONFIG.toml simulate.profile={out}" in capsys.readouterr().out
    assert parts.calls == [("profile", Path("runs/latest"))] * 2


def test_a_profile_that_cannot_be_written_or_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "runs/latest", "--out", str(tmp_path / "no" / "x.toml")], FakeParts()) == 2
    assert capsys.readouterr().err.endswith("x.toml: No such file or directory\n")
    assert main(["profile", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("is not a run folder: it has no config.toml\n")


def test_check_prints_a_config_that_reads_back_and_what_follows(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", toml, "alpha=0.5", "rollout.extra_members=1"], FakeParts()) == 0
    output = capsys.readouterr().out
    assert parse(output) == parse(Path(toml).read_text(), ["alpha=0.5", "rollout.extra_members=1"])
    for line in (
        "#   slots         24 groups admitted",
        "#   in flight     at most 216 trajectories (24 groups of 8 + 1)",
        "#   engine        embedded: 64 requests at once, 1024 tokens each",
        "#   weights       store file, 3 versions kept\n",
        "#   buffer        at most 24 finished groups",
        "#   in memory     at most 24 groups, with those in training",
        "#   batch         16 groups x 8 = 128 trajectories",
        "#   mini-batches  1 per batch, of 16 groups",
        "#   model         tiny, made on first use",
        "#   sampling      temperature 1, top_p 1, no top_k",
        "#   pools         CPU: 2 x CPU (cpu, 64 workers each)",
        "#   workers       actor_train 1 on CPU, actor_gen 1 on CPU, environment 1 on CPU, reward 1 on CPU",
        "#   prefill       every inference worker reads its own prompts",
        "#   task maze     75% of the groups, at most 16 x 64 generated tokens, 1024 tokens in all",
    ):
        assert line in output


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("simulate.model=nope", "simulate.model: 'nope' is neither a shipped model nor a folder"),
        ("simulate.profile=no.toml", "simulate.profile: no.toml: No such file or directory; name a file of"),
        ("simulate.tasks.maze=nope", "simulate.tasks.maze: the profile has no task 'nope'; choose from frozenlake"),
        ("simulate.tasks.moze=webshop", "simulate.tasks.moze: no task has this name; did you mean 'maze'?"),
        ("simulate.prefill=H200", "simulate.prefill: no worker of actor_gen is on class 'H200'; did you mean 'H20'?"),
        ("simulate.faults=[{at_s=1}]", "simulate.faults[0]: name one of pool, node and worker"),
        ("simulate.faults=[{at_s=1,pool='H200'}]", "simulate.faults[0].pool: there is no pool 'H200'; did you mean"),
        ("simulate.faults=[{at_s=1,node='H20-7'}]", "simulate.faults[0].node: there is no node 'H20-7'; did you mean"),
        ("simulate.faults=[{at_s=1,worker='inference-9'}]", "simulate.faults[0].worker: there is no worker 'inferen"),
        ("simulate.warmup_steps=5", "simulate.warmup_steps: 5 of 5 steps leave none to measure; raise steps"),
    ],
)
def test_check_refuses_what_a_simulation_would_refuse(
    word: str, line: str, toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = [
        "simulate.tasks={maze='frozenlake',maths='webshop'}",
        "pools={H800={count=2},H20={count=2}}",
        "roles={actor_train={device_class='H800'},actor_gen={device_class='H20'}}",
    ]
    assert main(["check", toml, *cluster, "simulate.warmup_steps=0"], Simulating()) == 0
    capsys.readouterr()
    assert main(["check", toml, *cluster, word], Simulating()) == 2
    assert f"rollart: error: {line}" in capsys.readouterr().err
    assert main(["train", toml, *cluster, word], Simulating()) == 0


def test_a_tiny_model_that_cannot_learn_is_told_in_one_line(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", toml], FakeParts()) == 0
    warning = capsys.readouterr().err
    assert warning.startswith("rollart: warning: model.warmup_steps: model 'tiny' has never seen text")
    assert warning.count("\n") == 1
    for word in ("model.warmup_steps=1", "model.name=Qwen/Qwen3-0.6B"):
        assert main(["check", toml, word], FakeParts()) == 0
        assert capsys.readouterr().err == ""


def test_check_of_what_can_only_be_simulated_says_why_it_cannot_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(Path(__file__).parents[1] / "configs" / "paper.toml")]) == 0
    said = capsys.readouterr()
    assert "[tasks.webshop]" in said.out
    assert "can be simulated, but not trained: tasks.webshop: unknown environment 'webshop'" in said.err


def test_check_says_when_slots_are_free(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", toml, "rollout.free_slots=train_start"], FakeParts()) == 0
    output = capsys.readouterr().out
    assert "#   slots         32 groups admitted and not yet in training, dropped or aborted" in output
    assert "#   in flight     at most 256 trajectories (32 groups of 8)" in output
    assert "#   in memory     at most 48 groups, with those in training" in output


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("engine=vllm",), "engine        vllm: 64 requests at once, 1024 tokens each"),
        (
            ("engine=http", "engine_options={kind='sglang', urls=['http://a:1']}"),
            "engine        http (sglang): 64 requests at once",
        ),
        (("weights.delta=8",), "weights       store file, 3 versions kept, a whole one every 8, else differences\n"),
        (
            ("weights.store=mooncake",),
            "weights       store mooncake, 3 versions kept, 1 copy each, over tcp, with a master of the run's own\n",
        ),
        (
            ("weights={store='mooncake', master='a:1', replicas=2, protocol='rdma'}",),
            "store mooncake, 3 versions kept, 2 copies each, over rdma, with the master at a:1\n",
        ),
    ],
)
def test_check_names_the_engine_and_the_weight_store(
    words: tuple[str, ...], line: str, toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", toml, *words], FakeParts()) == 0
    assert line in capsys.readouterr().out


def test_check_says_how_the_trainer_is_laid_out(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", toml], FakeParts()) == 0
    assert "embedded: one process, float32\n" in capsys.readouterr().out
    words = ["trainer=fsdp2", "roles.actor_train.workers=4", "train.tensor_parallel=2", "train.precision=bfloat16"]
    words += ["train.canary_tolerance=0.1"]
    assert main(["check", toml, *words], FakeParts()) == 0
    assert "fsdp2: 4 ranks = 2 data x 2 tensor, bfloat16\n" in capsys.readouterr().out
    assert main(["check", toml, "train.lora={ r = 4, targets = ['q_proj'] }"], FakeParts()) == 0
    assert "embedded: one process, float32, an adapter of rank 4 on q_proj\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("rollout.shard_trajectories=4096", "none: the driver manages all trajectories"),
        ("rollout.shard_trajectories=100", "3 rollout processes, each for at most 100 trajectories in flight"),
        ("schedule=sync", "none, though more than 50 trajectories are in flight: schedule sync steps all environments"),
        ("runtime=inline", "none, though more than 50 trajectories are in flight: runtime inline is one process"),
    ],
)
def test_check_says_where_trajectories_are_managed(
    word: str, line: str, toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", toml, "rollout.shard_trajectories=50", word], FakeParts()) == 0
    assert f"#   shards        {line}" in capsys.readouterr().out


def test_check_says_who_reads_prompts(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", toml, "roles.prefill.workers=2", "roles.actor_gen.workers=3"], FakeParts()) == 0
    assert "#   prefill       apart: 2 on CPU read prompts, 3 on CPU decode" in capsys.readouterr().out


def test_tasks_lists_options_with_types_defaults_and_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"], FakeParts()) == 0
    assert capsys.readouterr().out == (
        "maze: Find the way.\n"
        "    size (int, default 4)\n"
        "        Rows and columns of the map.\n"
        "    slippery (bool, default false)\n"
        "        Whether a step may slide.\n"
        "    set one with tasks.maze.options.size=4\n"
        "\n"
        "maths: Sums.\n"
        "    not installed; in rollart's checkout: pip install -e '.[reasoning]'\n"
    )
    assert main(["tasks", "maths"], FakeParts()) == 0
    assert "maze" not in capsys.readouterr().out


def test_pools_shows_devices_and_their_holders_as_a_table(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pools", toml], FakeParts()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "POOL  CLASS  NODE       DEVICES  FREE  FAILED  COST  HELD BY",
        "CPU   CPU    localhost  2        2     0       1     someone/inference-0",
    ]
    assert main(["pools", toml, "--repair", "localhost"], FakeParts()) == 0
    assert capsys.readouterr().out.startswith("repaired: the devices of localhost in CPU count as working again\nPOOL")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["trian"],
            "command 'trian' is not a choice; did you mean 'train'? choose from train, check, pools, eval, tasks",
        ),
        (["train"], "no config; name a file such as configs/default.toml"),
        (["train", "--fast"], "unknown argument '--fast'; see 'rollart train --help'"),
        (["tasks", "maze", "maths"], "unknown argument 'maths'; see 'rollart tasks --help'"),
        (["tasks", "mase"], "'mase' is not a task; did you mean 'maze'?"),
        (["check", "TOML", "stepz=3"], "stepz: unknown key; did you mean 'steps'?"),
        (["check", "TOML", "tasks.mase.weight=1"], "tasks.mase: 'mase' is not a task; did you mean 'maze'?"),
        (
            ["train", "TOML", "roles.actor_gen.device_class=H20"],
            "roles.actor_gen.device_class: no pool has class 'H20'; choose from CPU",
        ),
        (["check", "missing.toml"], "missing.toml: No such file or directory"),
        (["profile"], "the following arguments are required: RUN; see 'rollart profile --help'"),
        (["eval"], "the following arguments are required: RUN; see 'rollart eval --help'"),
        (["eval", "RUN", "--episodes", "0"], "argument --episodes: '0' is not a whole number of at least 1"),
        (["eval", "RUN", "--checkpoint", "3"], "has none of step 3; it has: 2, 4"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], line: str, toml: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = FakeParts()
    assert main([{"TOML": toml, "RUN": str(finished)}.get(word, word) for word in words], parts) == 2
    output = capsys.readouterr()
    assert (output.out, parts.calls) == ("", [])
    assert output.err.startswith("rollart: error: ")
    assert line in output.err
    assert output.err.count("\n") == 1


def test_a_folder_that_is_no_run_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "--resume", str(tmp_path)], ["eval", str(tmp_path)]):
        assert main(words, FakeParts()) == 1
        assert "not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (ConfigError("alpha: no"), 2, "rollart: error: alpha: no\n"),
        (EnvError("reset of task 'maze': boom"), 1, "rollart: error: reset of task 'maze': boom\n"),
        (RollartError(""), 1, "rollart: error: RollartError\n"),
        (
            WorkerError("trainer: boom\nTraceback ..."),
            1,
            "rollart: error: trainer: boom\nrollart: ROLLART_TRACEBACK=1 shows the rest of it\n",
        ),
        (KeyboardInterrupt(), 130, "rollart: interrupted\n"),
    ],
)
def test_every_error_of_ours_is_a_line_and_a_code(
    failure: BaseException, code: int, message: str, toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", toml], FakeParts(failure)) == code
    assert capsys.readouterr().err == message


def test_an_error_that_is_not_ours_keeps_its_traceback(toml: str) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["train", toml], FakeParts(ZeroDivisionError("a bug")))


# ------------------------------------------------------------------------------------------- in processes of their own
HEAVY = {"torch", "transformers", "rich", "numpy", "gymnasium", "tensorboardX", "ray", "vllm"}


def rollart(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollart", *words]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ".", **environ}, check=False)


def heavy_imports(statement: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after a statement."""
    script = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return HEAVY & {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_importing_rollart_loads_nothing_heavy() -> None:
    assert not heavy_imports("import rollart, rollart.config, rollart.protocols, rollart.metrics, rollart.run_folder")


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    assert not heavy_imports(f"from rollart.cli import main\nassert main({words}) == 0")


@pytest.mark.skipif(not importlib.util.find_spec("rollart.tasks"), reason="needs the tasks")
def test_check_and_tasks_do_not_load_torch(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[tasks.frozenlake]\n[tasks.sorting]\n")
    loaded = heavy_imports(f"from rollart.cli import main\nassert main(['check', {str(path)!r}]) == 0")
    assert not loaded & {"torch", "transformers", "rich"}
    assert not heavy_imports("from rollart.cli import main\nassert main(['tasks']) == 0") & {"torch", "transformers"}


@pytest.mark.parametrize("name", [*parsers()[1]])
def test_the_help_of_a_command_ends_with_its_own_examples_which_can_be_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"], FakeParts()) == 0
    output = capsys.readouterr().out
    _, _, after = output.partition("\nexamples:\n")
    examples = [line.split("   ")[0].strip() for line in after.splitlines() if line.startswith("  rollart ")]
    assert 2 <= len(examples) <= 3
    assert examples[0].startswith(f"rollart {name}")
    assert output.count("rollart ") - output.count(f"rollart {name}") <= 2
    assert ("section.key=value" in after) == ("CONFIG.toml key=value" in output)
    for example in examples:
        _, *words = shlex.split(example)
        parsers()[0].parse_args(words)


def test_the_help_shows_an_example_of_every_command() -> None:
    for words in ((), ("--help",)):
        done = rollart(*words)
        assert done.returncode == 0
        for name in parsers()[1]:
            assert f"\n  rollart {name}" in done.stdout


def test_the_version_is_the_packages() -> None:
    assert rollart("--version").stdout == f"rollart {__version__}\n"


def test_a_traceback_is_shown_on_demand_only() -> None:
    assert rollart("check", "missing.toml").stderr == "rollart: error: missing.toml: No such file or directory\n"
    assert "Traceback" in rollart("check", "missing.toml", ROLLART_TRACEBACK="1").stderr


def test_what_the_terminal_cannot_spell_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[tasks.sorting]\n[tasks."\u03a9"]\nenv = "sorting"\n', encoding="utf-8")
    done = rollart("check", str(path), "model.warmup_steps=1", PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert '[tasks."\\u03a9"]' in done.stdout


def test_a_start_without_standard_streams_is_survived() -> None:
    command = f"{sys.executable} -m rollart --version <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], env={"PYTHONPATH": "."}, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_to_a_full_disk_is_one_line_and_exit_code_1() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rollart", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": "."})
    assert done.stderr == "rollart: error: stdout: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", [[], ["--help"], ["check", "--help"]])
@pytest.mark.parametrize("environ", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_went_away_is_no_error(words: list[str], environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "rollart", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONPATH": ".", **environ}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
