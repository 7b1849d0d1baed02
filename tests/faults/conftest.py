"""What makes hundreds of loads quick enough."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.loaders
import pytest


@pytest.fixture(scope="session", autouse=True)
def service_models_are_parsed_once() -> Iterator[None]:
    """A third of what a tiny load takes is botocore reading the same megabyte of JSON again."""
    original = botocore.loaders.JSONFileLoader.load_file

    @functools.cache
    def load_file(path: str) -> object:
        return original(botocore.loaders.JSONFileLoader(), path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.loaders.JSONFileLoader, "load_file", lambda self, path: load_file(path))
        yield
