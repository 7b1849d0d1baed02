"""The loader, in this process: what it loads is byte for byte what SGLang's default loader does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sglang.cases import CASES, Case
from tests.sglang.host import differences, load, tensors_of

Get = Callable[[str], tuple[Case, Path]]

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_bytes_are_those_of_the_default_loader(checkpoint: Get, name: str) -> None:
    case, folder = checkpoint(name)
    expected = tensors_of(load(folder, load_format="auto", **case.arguments).model)
    for mode in ("trace", "eager"):
        loaded = load(folder, extra={"mode": mode, "verify": mode == "trace"}, **case.arguments)
        assert not differences(expected, tensors_of(loaded.model))
        assert loaded.loader.report.mode == mode
