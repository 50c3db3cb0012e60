"""`rollart plan` on the command line: what it asks for, prints and writes, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.cli import Parts, main
from rollart.config import Config, load
from rollart.plan_command import Allowance, Order
from rollart.plan_report import Plans
from rollart.planner import plan, told, written
from tests.planning import CONFIG, Counting, formula, made


class FakeParts(Parts):
    """Remembers the order, and says that it was cut short when told to."""

    def __init__(self, interrupted: bool = False) -> None:
        self.orders: list[tuple[Config, Order]] = []
        self.interrupted = interrupted

    def plan(self, config: Config, order: Order) -> tuple[str, bool]:
        self.orders.append((config, order))
        return "the report", self.interrupted


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(CONFIG)
    return str(path)


def test_what_is_not_said_has_a_default(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = FakeParts()
    assert main(["plan", toml], parts) == 0
    ((config, order),) = parts.orders
    assert config == made()
    assert (order.source, order.out, order.json) == (toml, Path("cluster-plan.toml"), None)
    assert order.allowed == Allowance()
    assert (order.objective, order.trials, order.top) == ("throughput", 100, 5)
    assert order.jobs >= 1
    assert capsys.readouterr().out == "the report\n"


def test_every_option_arrives(toml: str) -> None:
    parts = FakeParts()
    words = ["plan", toml, "alpha=2", "--devices", "H800=96,H20=32", "--objective", "cost", "--max-alpha", "4"]
    words += [
        "--schedules",
        "areal,one_off",
        "--trials",
        "7",
        "--top",
        "2",
        "--jobs",
        "3",
        "--out",
        "a.toml",
        "--json",
        "b",
    ]
    assert main(words, parts) == 0
    ((config, order),) = parts.orders
    assert config.alpha == 2
    assert order == Order(
        source=toml,
        out=Path("a.toml"),
        allowed=Allowance(devices={"H800": 96, "H20": 32}, max_alpha=4.0, schedules=("areal", "one_off")),
        objective="cost",
        trials=7,
        top=2,
        jobs=3,
        json=Path("b"),
    )


def test_all_schedules_have_one_word(toml: str) -> None:
    parts = FakeParts()
    assert main(["plan", toml, "--schedules", "all", "--budget", "12.5"], parts) == 0
    ((_, order),) = parts.orders
    assert set(order.allowed.schedules) == {"sync", "sync_plus", "one_off", "areal", "rollart"}
    assert order.allowed.budget == 12.5


def test_a_search_that_was_cut_short_says_so_by_its_exit_code(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", toml], FakeParts(interrupted=True)) == 130
    assert capsys.readouterr().out == "the report\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no config"),
        (["--budget", "0"], "'0' is not a number above 0"),
        (["--devices", "H800"], "'H800' are not devices per class, such as H800=96,H20=32"),
        (["--budget", "3", "--devices", "H800=8"], "not allowed with argument"),
        (["--schedules", "rolart"], "'rolart' is not a schedule"),
        (["--trials", "0"], "'0' is not a whole number of at least 1"),
        (["--objective", "speed"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words], FakeParts()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def found() -> Plans:
    return plan(made(), formula, trials=30)


def test_the_best_plan_and_the_figures_are_written(tmp_path: Path) -> None:
    order = Order(source="cluster.toml", out=tmp_path / "best.toml", allowed=Allowance(), json=tmp_path / "all.json")
    plans = written(found(), order)
    assert plans.best is not None
    assert load(order.out) == plans.best.config
    assert order.json is not None
    assert '"trials"' in order.json.read_text()
    assert f"{order.out}: plan 1 as a config" in told(plans, order.out)


def test_nothing_is_written_when_nothing_is_better(tmp_path: Path) -> None:
    order = Order(source="cluster.toml", out=tmp_path / "best.toml", allowed=Allowance())
    plans = written(plan(made(), Counting(interrupted_at=2), trials=30), order)
    assert plans.best is None
    assert not order.out.exists()
    assert "No plan that was tried is better" in told(plans, order.out)


def test_a_missing_folder_is_said_before_any_work(
    toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", toml, "--out", str(tmp_path / "no" / "best.toml")]) == 1
    assert "there is no folder" in capsys.readouterr().err
