"""Runs a loading function on equal models in every way: plainly, traced, eager, and as its plan was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch

import streamer
from streamer.report import LoadReport, PlanCacheUse
from streamer.sources.memory import MemorySource

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[torch.nn.Module, Weights], Any]

WAYS: dict[str, dict[str, Any]] = {
    "trace": {"mode": "trace"},
    "trace, fetched after each tensor": {"mode": "trace", "overlap_tensors": 1},
    "eager": {"mode": "eager"},
}


class Model(torch.nn.Module):
    """Parameters and buffers to load into, with `load_weights` given from outside."""

    def __init__(
        self, loader: Loader, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._loader = loader
        for name, shape in shapes.items():
            value = torch.full(shape, -1.0, dtype=dtype)
            if name.startswith("buffer"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: Weights) -> Any:
        return self._loader(self, weights)


def source_of(state: Mapping[str, torch.Tensor]) -> MemorySource:
    return MemorySource({"model.safetensors": safetensors.torch.save(dict(state))})


def in_file_order(state: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors as an iterator over the file yields them, each with memory of its own."""
    return list(safetensors.torch.load(safetensors.torch.save(dict(state))).items())


def load_all_ways(
    loader: Loader,
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> LoadReport:
    """Assert that every way gives the same parameters, buffers and return value; return the traced report.

    Loads whose plan is kept give the same again without the function, and the same report.
    """
    order = [name for name, _ in streamer.iterate(source_of(state))]
    plain = Model(loader, shapes, dtype)
    own = dict(in_file_order(state))
    with torch.no_grad():
        expected = plain.load_weights((name, own[name]) for name in order)
    reports = {}
    for way, more in WAYS.items():
        model = Model(loader, shapes, dtype)
        returned: list[Any] = []

        def keeping(target: torch.nn.Module, weights: Weights, kept: list[Any] = returned) -> Any:
            kept.append(loader(target, weights))
            return kept[0]

        model._loader = keeping
        reports[way] = streamer.load(model, source_of(state), {"strict": False, **more, **options})
        assert_same(plain, model, way)
        assert returned[0] == expected
    with TemporaryDirectory() as folder:
        load_from_plan(plain, lambda: Model(loader, shapes, dtype), state, cache_dir=folder, **options)
    return reports["trace"]


def assert_same(expected: torch.nn.Module, model: torch.nn.Module, way: str) -> None:
    for (name, wanted), (_, got) in zip(expected.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(wanted, got), f"{name} differs, {way}: {wanted} {got}"


def load_from_plan(
    expected: torch.nn.Module, new: Callable[[], Model], state: Mapping[str, torch.Tensor], **options: Any
) -> PlanCacheUse | None:
    """Assert that loads give what `expected` holds, from a plan or not; return what came of the first."""
    reports: list[LoadReport] = []
    for overlap in (0, 0, 1):
        if len(reports) == 2 and reports[0].plan_cache != PlanCacheUse("kept", ""):
            break
        model = new()
        config = {"strict": False, "plan_cache": True, "overlap_tensors": overlap, **options}
        reports.append(streamer.load(model, source_of(state), config))
        assert_same(expected, model, f"plan {reports[-1].plan_cache}")
    first, again = reports[:2]
    expected_use = PlanCacheUse("used", "") if first.plan_cache == PlanCacheUse("kept", "") else first.plan_cache
    assert [report.plan_cache for report in reports[1:]] == [expected_use] * (len(reports) - 1)
    for field in ("loaded", "ignored", "unexpected", "copies", "casts", "materialised"):
        assert getattr(again, field) == getattr(first, field), field
    assert again.needed_bytes <= first.needed_bytes
    return first.plan_cache
