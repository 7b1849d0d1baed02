"""What all tests with the real SGLang share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sglang.cases import CASES, Case, write_checkpoint
from tests.sglang.site import stubs

#: Raised by torch and SGLang themselves, about themselves.
WARNINGS = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# Before the first test module imports anything of SGLang.
stubs.install(["torchvision", "vllm", "IPython"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for text in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session")
def registered() -> None:
    """Load SGLang's plugins, of which this is one, as its processes do."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, Path]]:
    """Return a function that gives a case and its folder, written once."""
    root = tmp_path_factory.mktemp("checkpoints")
    cases = {case.name: case for case in CASES}

    def get(name: str) -> tuple[Case, Path]:
        folder = root / name
        if not folder.exists():
            write_checkpoint(cases[name], folder)
        return cases[name], folder

    return get
