"""Bytes end up in the right tensors: any view, any layout, any dtype, any cut into requests."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamer
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, SourceError, UnsupportedCheckpointError
from streamer.fetch.eager import iterate_tensors
from streamer.fetch.engine import FetchEngine
from streamer.fetch.fill import CopyJob
from streamer.plan.geometry import View
from streamer.sources.memory import MemorySource
from tests.files import entry, raw_file


def view_in_file(tensor: torch.Tensor, start: int) -> View:
    itemsize = tensor.element_size()
    return View(
        start + int(tensor.storage_offset()) * itemsize,
        itemsize,
        tuple(tensor.shape),
        tuple(stride * itemsize for stride in tensor.stride()),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Tensors, and views of them with destinations of every kind of layout and dtype."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    state, wanted = {}, []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.sampled_from([1, 2, 5, 40, 300]), max_size=3))
        if shape.count(300) > 1:
            shape = [300, 40]
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
        tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
        state[f"t{number}"] = tensor
        for _ in range(draw(st.integers(1, 3))):
            view = tensor
            for dim, size in enumerate(tensor.shape):
                start = draw(st.integers(0, size - 1))
                view = view.narrow(dim, start, draw(st.integers(1, size - start)))
            view = view.permute(draw(st.permutations(range(view.dim()))))
            if draw(st.booleans()):
                view = view.unsqueeze(0).expand(draw(st.integers(1, 2)), *view.shape)
            kind = draw(st.sampled_from(["plain", "plain", "transposed", "gaps", "cast"]))
            target = torch.full(view.shape, 7, dtype=torch.float64 if kind == "cast" else dtype)
            if kind == "transposed":
                target = torch.full(view.shape[::-1], 7, dtype=dtype).permute(list(reversed(range(view.dim()))))
            if kind == "gaps":
                target = torch.full((*view.shape, 2), 7, dtype=dtype).select(-1, 0)
            wanted.append((f"t{number}", view, target))
    return state, wanted


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from([64 << 10, 200_000, 1 << 20]), st.sampled_from([0, 1000, 512 << 10]))
def test_every_destination_gets_its_values(
    case: tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor, torch.Tensor]]], cap: int, gap: int
) -> None:
    state, wanted = case
    config = StreamConfig(buffer_bytes=cap, coalesce_gap_bytes=gap, concurrency=4)
    with FetchEngine(MemorySource({"model.safetensors": safetensors.torch.save(state)}), config) as engine:
        opened = engine.open_checkpoint()
        jobs = []
        for name, view, target in wanted:
            info = opened.checkpoint.tensors[name]
            jobs.append(CopyJob(target, 0, view_in_file(view, info.start), info.start, view.dtype))
        engine.fill(jobs, opened.items)
        assert engine.peak_buffer_bytes <= cap
    for _, view, target in wanted:
        assert torch.equal(target, view.to(target.dtype))


def engine_for(state: dict[str, torch.Tensor], **options: int) -> FetchEngine:
    return FetchEngine(MemorySource({"model.safetensors": safetensors.torch.save(state)}), StreamConfig(**options))  # type: ignore[arg-type]


def test_contiguous_cpu_destinations_need_no_buffer() -> None:
    state = {"a": torch.randn(2000, 1000), "b": torch.randn(3000, 500)}
    with engine_for(state) as engine:
        opened = engine.open_checkpoint()
        targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        jobs = [
            CopyJob(targets[name], 0, view_in_file(tensor, opened.checkpoint.tensors[name].start), 0, tensor.dtype)
            for name, tensor in state.items()
        ]
        engine.fill(jobs, opened.items)
        assert engine.peak_buffer_bytes == 0
        assert engine.times.copy == 0
    assert all(torch.equal(targets[name], tensor) for name, tensor in state.items())


def test_cap_below_the_largest_tensor() -> None:
    state = {"a": torch.randn(1000, 3000)}
    columns = torch.empty(1000, 1500)
    with engine_for(state, buffer_bytes=1 << 20) as engine:
        opened = engine.open_checkpoint()
        info = opened.checkpoint.tensors["a"]
        view = view_in_file(state["a"][:, 1500:], info.start)
        plan = engine.fill([CopyJob(columns, 0, view, info.start, torch.float32)], opened.items)
        assert engine.peak_buffer_bytes <= 1 << 20 < info.nbytes
        assert plan.over_read_bytes > 0
    assert torch.equal(columns, state["a"][:, 1500:])


@pytest.mark.parametrize("shift", range(8))
def test_unaligned_data(shift: int) -> None:
    """Odd header lengths and odd tensors before: offsets are used exactly, buffers are aligned anyway."""
    numbers = torch.arange(5000, dtype=torch.float64)
    header = {"u": entry("U8", [3], 0, 3), "d": entry("F64", [5000], 3, 3 + 40_000)}
    text = str(header).replace("'", '"').encode() + b" " * shift
    body = b"abc" + bytes(numbers.untyped_storage())
    model: Any = torch.nn.Module()
    model.register_buffer("u", torch.empty(3, dtype=torch.uint8))
    model.register_buffer("d", torch.empty(5000, dtype=torch.float64))
    strided = torch.empty(10_000, dtype=torch.float64)[::2]
    for mode in ("trace", "eager"):
        streamer.load(model, MemorySource({"m.safetensors": raw_file(text, body)}), {"mode": mode})
        assert torch.equal(model.d, numbers)
        assert bytes(model.u.tolist()) == b"abc"
        model.d.zero_()
    model.register_buffer("d", strided)
    streamer.load(model, MemorySource({"m.safetensors": raw_file(text, body)}))
    assert torch.equal(strided, numbers)


def test_failure_stops_the_fill_and_leaves_the_engine_usable() -> None:
    objects = {"model.safetensors": safetensors.torch.save({"a": torch.randn(1000, 1000)})}
    with FetchEngine(MemorySource(objects), StreamConfig(buffer_bytes=1 << 20)) as engine:
        opened = engine.open_checkpoint()
        target = torch.zeros(1000, 1000, dtype=torch.float64)
        info = opened.checkpoint.tensors["a"]
        job = CopyJob(target, 0, View(info.start, 4, (1000, 1000), (4000, 4)), info.start, torch.float32)
        good = objects["model.safetensors"]
        objects["model.safetensors"] = good + b""[:0] + b"x"
        with pytest.raises(SourceError, match="changed"):
            engine.fill([job], opened.items)
        objects["model.safetensors"] = good
        engine.fill([job], opened.items)
        assert target.any()


def mixed_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = itertools.cycle([(3,), (), (0, 5), (700, 300), (17, 5), (2, 3, 4)])
    return {f"t{number:02d}": torch.randn(next(shapes), generator=generator) for number in range(40)}


@pytest.mark.parametrize("cap", [64 << 10, 1 << 20, 1 << 30])
def test_list_of_the_iterator_is_correct_under_any_cap(cap: int) -> None:
    """The commonest silent corruption: a consumer that keeps tensors while their buffers are reused."""
    state = mixed_state()
    source = MemorySource({"model.safetensors": safetensors.torch.save(state)})
    found = list(streamer.iterate(source, {"buffer_bytes": cap}))
    assert {name for name, _ in found} == set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found)
    assert all(tensor.data_ptr() % 64 == 0 for _, tensor in found if tensor.numel())


def test_kept_and_handed_to_threads() -> None:
    state = mixed_state()
    source = MemorySource({"model.safetensors": safetensors.torch.save(state)})
    sums: dict[str, torch.Tensor] = {}
    threads = []
    for name, tensor in streamer.iterate(source, {"buffer_bytes": 64 << 10}):
        thread = threading.Thread(target=lambda n=name, t=tensor: sums.update({n: t.clone()}))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    assert all(torch.equal(sums[name], tensor) for name, tensor in state.items())


def test_eager_iterator_is_left_early_and_nothing_runs_on() -> None:
    state = mixed_state()
    before = threading.active_count()
    iterator = streamer.iterate(MemorySource({"model.safetensors": safetensors.torch.save(state)}))
    next(iterator)
    iterator.close()
    assert threading.active_count() == before


def test_eager_look_ahead_stays_within_the_budget() -> None:
    state = {f"t{n}": torch.zeros(64 << 10, dtype=torch.uint8) for n in range(50)}
    config = StreamConfig(buffer_bytes=256 << 10, request_bytes=64 << 10)
    with FetchEngine(MemorySource({"model.safetensors": safetensors.torch.save(state)}), config) as engine:
        opened = engine.open_checkpoint()
        before = engine.source.stats.bytes_received
        iterator = iterate_tensors(engine, list(opened.checkpoint.tensors.values()), opened.items)
        next(iterator)
        engine.loop.run(asyncio.sleep(0.1))
        assert engine.source.stats.bytes_received - before <= 256 << 10
        iterator.close()


ALL_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int16, torch.uint16, torch.float16, torch.bfloat16,
    torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64, torch.int64, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_bit_equal(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 40), dtype=torch.uint8)
    tensor = raw.view(dtype)
    file = {"m.safetensors": safetensors.torch.save({"whole": tensor, "gappy": tensor.clone()})}
    for mode in ("trace", "eager"):
        model: Any = torch.nn.Module()
        model.register_buffer("whole", torch.empty_like(tensor))
        model.register_buffer("gappy", torch.zeros_like(torch.cat((raw, raw), 1)).view(dtype)[:, : tensor.shape[1]])
        streamer.load(model, MemorySource(file), {"mode": mode})
        assert model.whole.dtype == dtype
        assert torch.equal(model.whole.view(torch.uint8), raw)
        assert torch.equal(model.gappy.contiguous().view(torch.uint8), raw)


def test_packed_fp4_has_half_the_elements(tmp_path: Path) -> None:
    body = bytes(range(8))
    file = {"m.safetensors": raw_file({"a": entry("F4", [2, 8], 0, 8)}, body)}
    (tmp_path / "m.safetensors").write_bytes(file["m.safetensors"])
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        theirs = opened.get_tensor("a")
    ((_, ours),) = streamer.iterate(MemorySource(file))
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) == (torch.float4_e2m1fn_x2, (2, 4))
    assert bytes(ours.view(torch.uint8).flatten().tolist()) == body
    model: Any = torch.nn.Module()
    model.register_buffer("a", torch.empty(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    streamer.load(model, MemorySource(file))
    assert bytes(model.a.view(torch.uint8).flatten().tolist()) == body


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "words"),
    [("F6_E2M3", [4], 3, "dtype F6_E2M3, which torch .* cannot hold"), ("F4", [2, 3], 3, "odd last dimension")],
)
@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_what_torch_cannot_hold_is_refused_by_name(
    dtype: str, shape: list[int], nbytes: int, words: str, mode: str
) -> None:
    file = {"m.safetensors": raw_file({"odd": entry(dtype, shape, 0, nbytes)}, bytes(nbytes))}
    with pytest.raises(UnsupportedCheckpointError, match=f"'odd'.*{words}"):
        streamer.load(torch.nn.Linear(1, 1), MemorySource(file), {"mode": mode})


def test_metadata_only_checkpoint_has_no_tensors() -> None:
    file = {"m.safetensors": raw_file(b'{"__metadata__":{"a":"b"}}')}
    assert list(streamer.iterate(MemorySource(file))) == []


def test_broken_header_names_the_file() -> None:
    files = {
        "model-00001-of-00002.safetensors": raw_file({}),
        "model-00002-of-00002.safetensors": b"version https://git-lfs",
    }
    with pytest.raises(CheckpointError, match="memory://objects/model-00002-of-00002.safetensors is a Git LFS pointer"):
        list(streamer.iterate(MemorySource(files)))


def test_long_headers_cost_exactly_one_more_request() -> None:
    state = {f"tensor.{'x' * 200}.{n}": torch.zeros(1) for n in range(50)}
    source = MemorySource({"model.safetensors": safetensors.torch.save(state)})
    with FetchEngine(source, StreamConfig(header_read_bytes=1000)) as engine:
        assert len(engine.open_checkpoint().checkpoint.tensors) == 50
    assert source.stats.requests == 2
    with FetchEngine(source, StreamConfig()) as engine:
        engine.open_checkpoint()
    assert source.stats.requests == 3
