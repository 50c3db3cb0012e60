"""Files and folders that a config names: refused before anything starts where they cannot serve, else left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollart.config import parse
from rollart.data.places import check_places, model_place, model_said
from rollart.errors import ConfigError

SERVERS = "engine='http'\nengine_options.kind='vllm'\nengine_options.urls=['http://10.0.0.1:1']\n"


def refusal(text: str) -> str:
    """Why a config is refused."""
    with pytest.raises(ConfigError) as caught:
        check_places(parse(f"{text}\n[tasks.sorting]\n"))
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["./mine", "../mine", "/nowhere/mine", "~/nowhere-at-all", "models/mine/last", "mine/", ".mine", "a b", ""]
)
def test_a_model_that_is_written_like_a_path_must_be_there(name: str) -> None:
    why = refusal(f"model.name={name!r}")
    assert why == f"model.name: no folder {name!r}; give 'tiny', a folder in Hugging Face format or a hub name"


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "some_one/a-model.v2"])
def test_what_may_be_on_the_hub_is_told_and_not_refused(name: str) -> None:
    check_places(parse(f"model.name={name!r}\n[tasks.sorting]"))
    assert model_said(name).startswith(f"{name}: no folder here, so it is fetched from the Hugging Face hub")


def test_a_folder_is_a_model_only_with_its_files(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        assert refusal(f"model.name='{tmp_path}'").startswith(f"model.name: {tmp_path} has no {name}; ")
        (tmp_path / name).touch()
    assert model_place(str(tmp_path)) == tmp_path
    assert model_said(str(tmp_path)) == str(tmp_path)
    assert "config.json' is a file; give the folder around it" in refusal(f"model.name='{tmp_path}/config.json'")


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("log.folder", "log.folder='{}'"),
        ("resources.store", "resources.store='file:{}'"),
        (
            "tasks.judged.reward_options.cache",
            "tasks.judged={{env='sorting',reward='judge',reward_options.cache='{}'}}",
        ),
    ],
)
def test_a_folder_to_be_made_is_refused_where_a_file_is_and_not_made_by_looking(
    key: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        why = refusal(line.format(tmp_path / name))
        assert why == f"{key}: {tmp_path}/file is a file, so that {tmp_path / name} cannot be a folder; name another"
    check_places(parse(f"{line.format(tmp_path / 'new' / 'below')}\n[tasks.sorting]"))
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not os.geteuid(), reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refusal(f"log.folder='{tmp_path}'").startswith(f"log.folder: {tmp_path} may not be written; ")
    assert "cannot be made: " in refusal(f"log.folder='{tmp_path}/below'")


def test_a_store_that_is_none_is_refused() -> None:
    assert refusal("resources.store='etcd://x'").startswith("resources.store: 'etcd://x' is not a store; take memory")


def test_a_folder_that_servers_share_must_be_there_on_this_machine(tmp_path: Path) -> None:
    line = "{}engine_options.weights_folder='{}'"
    check_places(parse(f"{line.format(SERVERS, tmp_path)}\n[tasks.sorting]"))
    why = refusal(line.format(SERVERS, tmp_path / "no"))
    assert why.startswith(f"engine_options.weights_folder: no folder '{tmp_path}/no'; make it")
    check_places(parse(f"runtime='ray'\n{line.format(SERVERS, tmp_path / 'no')}\n[tasks.sorting]"))
