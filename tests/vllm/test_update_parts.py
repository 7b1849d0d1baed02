"""What an update is made of, each by itself: engines that are refused, grafts, and the driver's order of things."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm_s3stream
from streamer.errors import CheckpointError, ConfigError, LoadError, MissingDependencyError, RollbackError
from vllm_s3stream.update import Updates, gates
from vllm_s3stream.update.driver import Updated, update_weights, update_weights_async
from vllm_s3stream.update.graft import graft

Change = Callable[[Any], None]


def config(**options: Any) -> Any:
    """As much of a ``VllmConfig`` as is looked at."""
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format="s3stream", model_loader_extra_config=options),
        model_config=SimpleNamespace(quantization=None),
        parallel_config=SimpleNamespace(enable_eplb=False, data_parallel_size=1, worker_extension_cls="x"),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        compilation_config=SimpleNamespace(mode=0),
        kv_transfer_config=None,
    )


# -- gates -----------------------------------------------------------------------------------------------------


def test_an_engine_that_can_be_updated() -> None:
    assert gates.refuse_engine(config(mode="eager")).stream.mode == "eager"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: setattr(it.load_config, "load_format", "auto"), "load format is auto"),
        (lambda it: it.load_config.model_loader_extra_config.update(sharded=True), "sharded state"),
        (lambda it: setattr(it.model_config, "quantization", "torchao"), "torchao"),
        (lambda it: setattr(it.parallel_config, "enable_eplb", True), "--enable-eplb"),
        (lambda it: setattr(it.offload_config.uva, "cpu_offload_gb", 1), "offloaded"),
        (lambda it: setattr(it.offload_config.prefetch, "offload_group_size", 1), "offloaded"),
        (lambda it: setattr(it.compilation_config, "mode", 3), "--enforce-eager"),
    ],
    ids=["format", "sharded", "torchao", "eplb", "uva", "prefetch", "compiled"],
)
def test_engines_that_are_refused(change: Change, message: str) -> None:
    it = config()
    change(it)
    with pytest.raises(ConfigError, match=message):
        gates.refuse_engine(it)


def test_a_vllm_that_reloads_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import meta

    monkeypatch.delattr(meta, "materialize_layer")
    with pytest.raises(MissingDependencyError, match="has no materialize_layer"):
        gates.refuse_engine(config())


def test_models_that_are_refused() -> None:
    model: Any = torch.nn.Linear(1, 1)
    gates.refuse_model(model, parts=1)
    with pytest.raises(ConfigError, match="made of 2 checkpoints"):
        gates.refuse_model(model, parts=2)
    model.process_weights_after_loading = lambda: None
    with pytest.raises(ConfigError, match="Linear processes its weights as a whole"):
        gates.refuse_model(model, parts=1)


def test_an_engine_in_the_middle_of_another_update() -> None:
    gates.refuse_transfer(SimpleNamespace(_weight_update_active=False))
    with pytest.raises(ConfigError, match="another update has begun"):
        gates.refuse_transfer(SimpleNamespace(_weight_update_active=True))


@pytest.mark.parametrize("asleep", [False, True])
def test_an_engine_that_sleeps(asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.platforms import current_platform

    allocations = {1: SimpleNamespace(is_asleep=False), 2: SimpleNamespace(is_asleep=asleep)}
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=allocations))
    if asleep:
        with pytest.raises(ConfigError, match="it sleeps"):
            gates.refuse_asleep()
    else:
        gates.refuse_asleep()


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_that_step_together(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_dp_group", lambda: SimpleNamespace(world_size=size))
    if size > 1:
        with pytest.raises(ConfigError, match="step together"):
            gates.refuse_replicas()
    else:
        gates.refuse_replicas()


def test_the_extension_has_no_names_that_a_worker_has() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    own = {name for name in dir(Updates) if not name.startswith("__")}
    assert own == {"s3stream_update", "s3stream_version"}
    assert not own & set(dir(CPUWorker))


def test_the_package_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_s3stream, vllm_s3stream.update; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- grafts ----------------------------------------------------------------------------------------------------


def test_a_graft_keeps_objects_and_memory_and_takes_values() -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantDesc

    def make(value: float) -> dict[str, Any]:
        desc = FusedMoEQuantDesc(scale=torch.full((2,), value), alpha_or_gscale=torch.full((2,), value))
        return {"desc": desc, "list": [torch.full((3,), value)], "number": value, "function": lambda: value}

    old, new = make(1.0), make(2.0)
    old["added later"] = "stays"
    desc, scale, item = old["desc"], old["desc"].scale, old["list"][0]
    assert graft(old, new) is old
    assert old["desc"] is desc
    assert desc.scale is scale
    assert old["list"][0] is item
    assert scale.tolist() == [2.0, 2.0]
    assert desc.alpha_or_gscale.tolist() == [2.0, 2.0]
    assert item.tolist() == [2.0] * 3
    assert (old["number"], old["function"](), old["added later"]) == (2.0, 2.0, "stays")


@pytest.mark.parametrize("new", [torch.ones(3), torch.ones(2, dtype=torch.float16), [1, 2], None])
def test_what_is_made_otherwise_is_taken_as_it_is(new: Any) -> None:
    assert graft(torch.zeros(2), new) is new


def test_objects_that_refer_to_each_other_are_grafted_once() -> None:
    old: dict[str, Any] = {"value": torch.zeros(1)}
    new: dict[str, Any] = {"value": torch.ones(1)}
    old["self"], new["self"] = old, new
    assert graft(old, new)["self"] is old
    assert old["value"].tolist() == [1.0]


# -- the driver ------------------------------------------------------------------------------------------------


def answer(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "updated": True,
        "url": "s3://b/v2/",
        "version": "2",
        "error": None,
        "error_type": None,
        "seconds": 1.0 + rank,
        "bytes": 10,
        "lost": False,
        **changes,
    }


class Engine:
    """Takes down what it is asked for, as ``LLM`` with its engine, or as ``AsyncLLM``."""

    def __init__(self, answers: list[dict[str, Any]], *, resets: bool = True, busy: bool = False) -> None:
        self.calls: list[Any] = []
        self.vllm_config = config()
        self.llm_engine = self
        self._answers, self._resets, self._busy = answers, resets, busy

    def has_unfinished_requests(self) -> bool:
        return self._busy

    def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        self.calls.append(("reset", reset_connector))
        return self._resets

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append((method, *args))
        return self._answers

    def set_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))


class AsyncEngine(Engine):
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:  # type: ignore[override]
        return super().reset_prefix_cache(reset_connector=reset_connector)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:  # type: ignore[override]
        return super().collective_rpc(method, args)

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))


def test_the_names_of_the_package() -> None:
    assert vllm_s3stream.update_weights is update_weights
    assert vllm_s3stream.update_weights_async is update_weights_async
    with pytest.raises(AttributeError, match="has no attribute 'update_waits'"):
        vllm_s3stream.update_waits  # noqa: B018


def test_caches_are_dropped_before_and_the_version_is_told_after() -> None:
    engine = Engine([answer(0), answer(1)])
    updated = update_weights(engine, "s3://b/v2", "2")
    assert updated == Updated("s3://b/v2/", "2", ranks=2, seconds=2.0, nbytes=20)
    assert engine.calls == [("reset", False), ("s3stream_update", "s3://b/v2", "2"), ("version", "2")]


def test_a_cache_that_cannot_be_dropped_or_a_running_request_stops_it() -> None:
    engine = Engine([answer(0)], resets=False)
    with pytest.raises(LoadError, match="the prefix cache could not be reset"):
        update_weights(engine, "s3://b/v2")
    assert engine.calls == [("reset", False)]
    engine = Engine([answer(0)], busy=True)
    with pytest.raises(ConfigError, match="unfinished requests"):
        update_weights(engine, "s3://b/v2")
    assert engine.calls == []


def test_caches_elsewhere_are_dropped_too() -> None:
    engine = Engine([answer(0)])
    engine.vllm_config.kv_transfer_config = object()
    update_weights(engine, "s3://b/v2")
    assert engine.calls[0] == ("reset", True)


FAILED = {"updated": False, "error": "it is bad", "error_type": "CheckpointError"}
LOST = {"updated": False, "error": "a mixture", "error_type": "RollbackError", "lost": True}


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ([answer(0, **FAILED), answer(1, **FAILED)], CheckpointError, "it is bad"),
        ([answer(0, **FAILED), answer(1, **LOST)], RollbackError, "a mixture"),
        ([answer(0), answer(1, version="3")], RollbackError, "ranks have different weights"),
        (
            [
                answer(
                    0,
                    **FAILED,
                )
                | {"error_type": "shorten"}
            ],
            LoadError,
            "it is bad",
        ),
    ],
)
def test_what_ranks_say_is_raised(answers: list[dict[str, Any]], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        update_weights(Engine(answers), "s3://b/v2")


def test_replicas_whose_answers_are_lost_are_refused() -> None:
    engine = Engine([answer(0)])
    engine.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(ConfigError, match="of the first only"):
        update_weights(engine, "s3://b/v2")


def test_an_engine_without_the_extension_says_so() -> None:
    engine = Engine([answer(0)])
    engine.vllm_config.parallel_config.worker_extension_cls = ""
    with pytest.raises(ConfigError, match=r"worker_extension_cls='vllm_s3stream\.update\.Updates'"):
        update_weights(engine, "s3://b/v2")
    assert engine.calls == []


def test_an_asynchronous_engine_is_paused_meanwhile() -> None:
    engine = AsyncEngine([answer(0)])
    updated = asyncio.run(update_weights_async(engine, "s3://b/v2", "2", mode="abort"))
    assert updated.version == "2"
    assert engine.calls == [
        ("pause", "abort", True),
        ("reset", False),
        ("s3stream_update", "s3://b/v2", "2"),
        ("version", "2"),
        ("resume",),
    ]


def test_it_goes_on_after_a_failure_but_not_with_a_mixture() -> None:
    engine = AsyncEngine([answer(0, **FAILED)])
    with pytest.raises(CheckpointError):
        asyncio.run(update_weights_async(engine, "s3://b/v2"))
    assert engine.calls[-1] == ("resume",)
    engine = AsyncEngine([answer(0, **LOST)])
    with pytest.raises(RollbackError):
        asyncio.run(update_weights_async(engine, "s3://b/v2"))
    assert ("resume",) not in engine.calls


def test_requests_are_not_kept_with_what_the_old_weights_made_of_them() -> None:
    engine = AsyncEngine([answer(0)])
    with pytest.raises(ConfigError, match="mode must be wait or abort"):
        asyncio.run(update_weights_async(engine, "s3://b/v2", mode="keep"))
    assert engine.calls == []
