import pytest

from rollart.tasks.chat import ChatRenderer

from .model_folders import TEMPLATES, write_folder


@pytest.fixture(scope="session")
def renderers(tmp_path_factory):
    """A renderer for each style of template."""
    made = {}
    for name, (template, settings, _) in TEMPLATES.items():
        made[name] = ChatRenderer(write_folder(tmp_path_factory.mktemp(name), template, settings))
    return made
