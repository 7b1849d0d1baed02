"""What all tests with the real vLLM share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.cases import CASES, Case, write_checkpoint
from tests.vllm.cpu import allow_gated_layers

#: Raised by torch and vLLM themselves, about themselves.
WARNINGS = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The tests of sharing go first: after all the others, in one process, the checkpoint that transformers 5.19 wrote
    # for DeepSeek had its experts under names that no published one has.
    items.sort(key=lambda item: item.path.name != "test_sharing.py")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for text in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session")
def gated_layers() -> None:
    allow_gated_layers()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, gated_layers: None) -> Callable[[str], tuple[Case, Path]]:
    """Return a function that gives a case of the census and its folder, written once."""
    root = tmp_path_factory.mktemp("census")
    cases = {case.name: case for case in CASES}

    def get(name: str) -> tuple[Case, Path]:
        folder = root / name
        if not folder.exists():
            write_checkpoint(cases[name], folder)
        return cases[name], folder

    return get
