"""What is remembered about views, and what is not, gives what torch gives the first time and every other time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.trace.barrier import tracing
from streamer.trace.collector import fewer_full_collections
from streamer.trace.lazy import LazyTensor
from streamer.trace.storages import ModelStorages
from streamer.trace.tracer import Tracer
from tests.trace.loading import load_all_ways

VIEWS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.narrow(0, 1, 2),
    lambda x: x.narrow(dim=1, start=2, length=2),
    lambda x: x.narrow(-1, -2, 1),
    lambda x: x.narrow(0, torch.tensor(1), 2),
    lambda x: x.narrow(0, 0, 0),
    lambda x: x.narrow(0, 0, 1),
    lambda x: x.narrow(0, 1, 1),
    lambda x: x[1:2],
    lambda x: x[1:3],
    lambda x: x.view(3, -1),
    lambda x: x[1],
    lambda x: x[:, 1:4:2],
    lambda x: x[..., None],
    lambda x: x.t(),
    lambda x: x.transpose(0, 1)[2:],
    lambda x: x.permute(1, 0),
    lambda x: x.view(-1),
    lambda x: x.view(2, 2, 6).select(1, 1),
    lambda x: x.view(torch.int16),
    lambda x: x.unfold(1, 3, 1),
    lambda x: x.expand(3, *x.shape),
    lambda x: x.chunk(2, 1)[1],
    lambda x: x.unbind(1)[3],
    lambda x: torch.split(x, [1, 3], 0)[1],
    lambda x: x.diagonal(),
    lambda x: x.as_strided((2, 2), (3, 1), 5),
    lambda x: x.detach(),
]


def tracer_for(model: object = None) -> Tracer:
    return Tracer(ModelStorages(model), lambda jobs: None, dry_run=True)


def geometry(x: Any) -> list[Any]:
    """All that a tensor says about its elements' places; of a lazy one, by every way to ask."""
    found = [tuple(x.shape), x.ndim, x.dtype, tuple(x.size()), tuple(x.stride()), x.storage_offset(), x.dim()]
    if isinstance(x, LazyTensor):
        meta = x.lazy_meta
        assert [tuple(meta.shape), meta.ndim, meta.dtype, *found[3:6]] == found[:6]
        assert meta.untyped_storage()._cdata == x.lazy_base.root.untyped_storage()._cdata
        assert x.device == torch.device("cpu")
    return found


def attempt(view: Callable[[torch.Tensor], Any], x: torch.Tensor) -> object:
    try:
        return view(x)
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error)


@settings(max_examples=200, deadline=None)
@given(choices=st.lists(st.integers(0, len(VIEWS) - 1), min_size=1, max_size=5))
def test_views_seen_before_are_as_torch_makes_them(choices: list[int]) -> None:
    tracer = tracer_for()
    infos = [TensorInfo(name, "F32", (4, 6), 0, 0, 96) for name in "abc"]

    def outcome(x: torch.Tensor) -> object:
        """Every choice applied to each of a chain of views, the first choice's result being the next."""
        found: list[object] = []
        for number in range(len(choices)):
            results = [attempt(VIEWS[choice], x) for choice in (*choices[number:], *choices[:number])]
            found += [geometry(y) if isinstance(y, torch.Tensor) else y for y in results]
            if isinstance(results[0], torch.Tensor):
                x = results[0]
        return found

    expected = outcome(torch.empty(4, 6, device="meta"))
    with tracing(tracer):
        for info in infos:  # from the second on, what was remembered answers
            assert outcome(tracer.lazy(info)) == expected
            assert tracer.bases[info.name].looked_at


def test_a_narrow_of_a_tensor_that_was_written_to_sees_the_write() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            half = tensor.narrow(0, 1, 2)
            if name == "b":
                tensor.zero_()
            model.w.data[:2].copy_(half)
            model.w.data[2:].copy_(tensor.narrow(0, 1, 2))

    state = {name: torch.arange(12.0).reshape(4, 3) + n for n, name in enumerate("ab")}
    load_all_ways(loader, {"w": (4, 3)}, state)


def test_a_start_that_is_a_tensor_is_read_anew() -> None:
    """As a key, a tensor equals itself, also after it was changed."""

    def loader(model: Any, weights: Any) -> None:
        start = torch.tensor(0)
        for _, tensor in weights:
            model.w.data[start].copy_(tensor.narrow(0, start, 1)[0])
            start += 1

    state = {name: torch.arange(12.0).reshape(4, 3) + 20 * n for n, name in enumerate("abc")}
    load_all_ways(loader, {"w": (3, 3)}, state)


def test_a_conjugate_is_not_taken_for_a_plain_view() -> None:
    def loader(model: Any, weights: Any) -> None:
        for _, tensor in weights:
            model.w.data.copy_(torch.view_as_real(tensor.conj().resolve_conj()))
            model.x.data.copy_(tensor.conj().imag)

    state = {"a": torch.complex(torch.arange(3.0), torch.arange(3.0) + 5)}
    load_all_ways(loader, {"w": (3, 2), "x": (3,)}, state)


@pytest.mark.parametrize("first_out", ["outer", "inner"])
def test_collections_are_as_before_when_loads_have_overlapped(first_out: str) -> None:
    before = gc.get_threshold()
    outer, inner = fewer_full_collections(), fewer_full_collections()
    outer.__enter__()
    assert gc.get_threshold() == (*before[:2], 1000)
    inner.__enter__()
    for context in (outer, inner) if first_out == "outer" else (inner, outer):
        context.__exit__(None, None, None)
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), tracing(tracer_for()):
        assert gc.get_threshold() != before
        raise KeyError
    assert gc.get_threshold() == before


def test_what_was_set_meanwhile_stays_set() -> None:
    before = gc.get_threshold()
    try:
        with fewer_full_collections():
            gc.set_threshold(123, 4, 5000)
        assert gc.get_threshold() == (123, 4, 5000)
        with fewer_full_collections():
            assert gc.get_threshold() == (123, 4, 5000)
    finally:
        gc.set_threshold(*before)
