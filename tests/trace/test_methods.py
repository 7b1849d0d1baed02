"""What stands in for methods of ``torch.Tensor`` while a load traces: exact, only there, only then."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import streamer
from streamer.checkpoint.checkpoint import TensorInfo
from streamer.fetch.fill import copy_arrival
from streamer.trace.barrier import tracing
from streamer.trace.storages import ModelStorages
from streamer.trace.tracer import Tracer
from tests.trace.loading import Model, load_all_ways, source_of

STATE = {"a": torch.arange(48.0).reshape(8, 6)}
NAMES = (
    *("numpy", "tolist", "data_ptr", "storage", "untyped_storage"),
    *("share_memory_", "__array__", "__dlpack__", "__reduce_ex__"),
    *("data", "narrow", "copy_"),
)


def tracer_for(model: torch.nn.Module | None = None) -> Tracer:
    return Tracer(ModelStorages(model), lambda jobs: None)


def found() -> dict[str, object]:
    """The methods as a look at the class finds them, and whether it has them of its own."""
    return {name: (vars(torch.Tensor).get(name), getattr(torch.Tensor, name)) for name in NAMES}


@pytest.mark.parametrize("first_out", ["outer", "inner"])
def test_methods_are_as_before_when_loads_have_overlapped(first_out: str) -> None:
    before = found()
    contexts = {"outer": tracing(tracer_for()), "inner": tracing(tracer_for())}
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        with contexts["inner"]:
            entered.set()
            leave.wait(30)
        left.set()

    thread = threading.Thread(target=other)
    with contexts["outer"]:
        during = found()
        assert all(during[name] != before[name] for name in NAMES)
        thread.start()
        assert entered.wait(30)
        assert found() == during
        if first_out == "inner":
            leave.set()
            assert left.wait(30)
            assert found() == during
    if first_out == "outer":
        assert found() == during
        leave.set()
    thread.join(30)
    assert found() == before


def test_methods_are_as_before_after_an_error() -> None:
    before = found()
    with pytest.raises(KeyError), tracing(tracer_for()):
        raise KeyError
    assert found() == before


def test_what_others_replaced_meanwhile_stays_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        stack.enter_context(tracing(tracer_for()))
        ours = torch.Tensor.tolist
        replaced = lambda self: [ours(self)]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "tolist", replaced)
    assert torch.Tensor.tolist is replaced
    assert torch.arange(2).tolist() == [[0, 1]]


def test_tensors_become_no_sequences() -> None:
    """A slot that was filled once stays filled, and bindings would take tensors for lists."""
    is_sequence = ctypes.pythonapi.PySequence_Check
    is_sequence.argtypes = [ctypes.py_object]
    with tracing(tracer_for()):
        assert not is_sequence(torch.ones(3))
    assert not is_sequence(torch.ones(3))


def test_a_start_that_is_a_pending_tensor_is_read() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in sorted(weights, reverse=True):
            if name == "start":
                model.start.data.copy_(tensor)
            else:
                model.w.narrow(0, model.start[0], 2).copy_(tensor.narrow(0, 1, 2))

    state = {"a": torch.arange(48).reshape(8, 6), "start": torch.tensor([3])}
    load_all_ways(loader, {"w": (8, 6), "start": (1,)}, state, dtype=torch.int64)


@pytest.mark.parametrize("what", ["data", "narrow", "select"])
def test_aliases_made_before_and_after_a_copy_find_it(what: str) -> None:
    alias: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "data": lambda tensor: tensor.data,
        "narrow": lambda tensor: tensor.narrow(0, 2, 3),
        "select": lambda tensor: tensor[2],
    }

    def loader(model: Any, weights: Any) -> list[float]:
        seen: list[float] = []
        for name, tensor in weights:
            if name == "a":
                before = alias[what](model.w)
                model.w.copy_(tensor)
                seen.append(float(before.sum()))
                alias[what](model.w).add_(1)
                model.w.data.narrow(1, 0, 2).copy_(tensor.narrow(1, 1, 2))
                seen.append(float(alias[what](model.w).sum()))
        return seen

    load_all_ways(loader, {"w": (8, 6)}, STATE)


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Heard(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", "?"))
        # Values are read inside, where the barrier must be in its place.
        self.names.append(str(float(args[0].sum())) if func is torch.Tensor.narrow else "")
        return func(*args, **(kwargs or {}))


def test_modes_of_the_model_code_see_what_they_would() -> None:
    def loader(model: Any, weights: Any) -> list[str]:
        for name, tensor in weights:
            if name == "a":
                model.w.copy_(tensor)
                rows = tensor.narrow(0, 3, 2)
                with Seen() as seen:
                    model.w.data.narrow(0, 1, 2).copy_(rows)
                with Heard() as heard:
                    model.w.data.narrow(0, 1, 2).copy_(rows)
        assert seen.names == ["aten::detach", "aten::slice", "aten::copy_"]
        return list(heard.names)

    load_all_ways(loader, {"w": (8, 6)}, STATE)


@pytest.mark.parametrize("stack", ["empty", "another mode"])
def test_where_the_barrier_is_off_nothing_puts_it_back(stack: str) -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    model: Any = Model(lambda *_: None, {"w": (8, 6)})
    with tracing(tracer_for(model)), _disable_current_modes(), ExitStack() as more:
        seen = more.enter_context(Seen()) if stack == "another mode" else None
        modes = torch._C._len_torch_dispatch_stack()
        model.w.data.narrow(0, 1, 2)
        assert torch._C._len_torch_dispatch_stack() == modes
        assert seen is None or seen.names == ["aten::detach", "aten::slice"]


@pytest.mark.parametrize("error", [IndexError, RuntimeError])
def test_the_barrier_stays_after_errors(error: type[Exception]) -> None:
    filled: list[object] = []
    model: Any = Model(lambda *_: None, {"w": (8, 6)})
    tracer = Tracer(ModelStorages(model), filled.append)
    with tracing(tracer):
        model.w.copy_(tracer.lazy(TensorInfo("a", "F32", (8, 6), 0, 0, 192)))
        with pytest.raises(error) as kept:  # with all frames of the traceback, as who handles an error has them
            model.w.narrow(*((7, 0, 1) if error is IndexError else (0, 7, 5)))
        assert torch._C._len_torch_dispatch_stack() == 1
        assert not filled
        model.w.sum()
        assert len(filled) == 1
        del kept


def test_threads_of_the_model_code_copy_and_read() -> None:
    def loader(model: Any, weights: Any) -> list[Any]:
        read: list[Any] = []

        def work(tensor: torch.Tensor) -> None:
            with torch.no_grad():
                read.append(tensor.narrow(0, 2, 3).tolist())
                model.v.data.copy_(tensor)
                model.u.data.copy_(tensor.narrow(0, 1, 4))

        for name, tensor in weights:
            if name == "a":
                thread = threading.Thread(target=work, args=[tensor])
                thread.start()
                thread.join()
                read.append(model.v.tolist())
                read.append(model.u.data.numpy().tolist())
        return read

    load_all_ways(loader, {"v": (8, 6), "u": (4, 6)}, STATE)


def test_another_thread_is_not_watched() -> None:
    """Who owns what is pending is the thread that traces; another's look at memory does not fetch."""
    filled: list[object] = []
    model: Any = Model(lambda *_: None, {"w": (2,)})
    tracer = Tracer(ModelStorages(model), filled.append)
    with tracing(tracer):
        model.w.copy_(tracer.lazy(TensorInfo("a", "F32", (2,), 0, 0, 8)))
        thread = threading.Thread(target=lambda: model.w.data_ptr())
        thread.start()
        thread.join()
        assert not filled
        model.w.data_ptr()
        assert len(filled) == 1


def test_the_barrier_hears_nothing_of_what_is_placed_and_all_that_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing staged bytes takes several operations for each, which once cost a quarter of a load of small tensors."""
    depths: list[int] = []

    def placing(*arguments: Any) -> float:
        depths.append(torch._C._len_torch_dispatch_stack())
        return copy_arrival(*arguments)

    monkeypatch.setattr("streamer.fetch.engine.copy_arrival", placing)

    def loader(model: Any, weights: Any) -> list[float]:
        seen = []
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_(tensor)
                seen.append(float(model.w.sum()))  # fetches
                model.w.data.copy_(tensor)
                model.w.mul_(2)  # was pending again
            elif name == "b":
                model.x.data.copy_(tensor)  # fetched at the end
        return seen

    load_all_ways(loader, {"w": (8, 6), "x": (8, 6)}, {**STATE, "b": STATE["a"] + 1}, dtype=torch.float64)
    assert set(depths) == {0}


def test_copies_count_as_writes_to_autograd() -> None:
    def loader(model: Any, weights: Any) -> list[int]:
        versions = []
        for name, tensor in weights:
            if name == "a":
                versions.append(model.w._version)
                model.w.copy_(tensor)
                versions.append(model.w._version)
        return versions

    load_all_ways(loader, {"w": (8, 6)}, STATE)


def test_autograd_objects_as_ever() -> None:
    def loader(model: Any, weights: Any) -> None:
        model.w.requires_grad_()
        for name, tensor in weights:
            if name == "a":
                with torch.enable_grad():
                    model.w.copy_(tensor)

    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        streamer.load(Model(loader, {"w": (8, 6)}), source_of(STATE))
