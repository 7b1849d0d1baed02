"""Ranks as processes, over gloo: bytes counted by the server, and what happens when one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from streamer.errors import IntegrityError, LoadError, SourceUnavailableError, StreamError
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel
from tests.servers.checksums import keep
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.share import rank as rank_module

DOCUMENT = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, torch.Tensor]:
    """Under the names that a checkpoint has, which are those of the model before its layers are fused."""
    generator = torch.Generator().manual_seed(0)
    hidden, wide, head = DOCUMENT["hidden_size"], DOCUMENT["intermediate_size"], 16
    assert isinstance(hidden, int)
    assert isinstance(wide, int)
    shapes = {
        "model.embed_tokens.weight": (512, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (512, hidden),
    }
    for number in range(4):
        layer = f"model.layers.{number}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (8 * head, hidden),
            layer + "self_attn.k_proj.weight": (2 * head, hidden),
            layer + "self_attn.v_proj.weight": (2 * head, hidden),
            layer + "self_attn.o_proj.weight": (hidden, 8 * head),
            layer + "mlp.gate_proj.weight": (wide, hidden),
            layer + "mlp.up_proj.weight": (wide, hidden),
            layer + "mlp.down_proj.weight": (hidden, wide),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@dataclass
class Outcome:
    """What a rank said last, and when."""

    kind: str
    value: Any
    seconds: float


class Ranks:
    """Processes that load together, forked from one that has everything imported."""

    def __init__(self, size: int, task: Mapping[str, Any], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.share.rank"])
        folder.mkdir()
        self._stack = ExitStack()
        self.processes: list[ForkServerProcess] = []
        self._said: list[Connection] = []
        for number in range(size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_module.run,
                args=(number, size, f"file://{folder}/rendezvous", task, sending),
                daemon=True,
            )
            process.start()
            sending.close()
            self.processes.append(process)
            self._said.append(receiving)
        for said in self._said:
            assert said.poll(90)
            assert said.recv()[0] == "ready"
        self._began = time.monotonic()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def kill(self, number: int) -> None:
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def outcomes(self, seconds: float) -> list[Outcome | None]:
        """Wait for what every rank says; None for one that says nothing because it was killed."""
        found: list[Outcome | None] = [None] * len(self._said)
        waiting = dict(zip(self._said, range(len(self._said)), strict=True))
        limit = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), limit - time.monotonic())
            assert ready, f"ranks {sorted(waiting.values())} hang"
            for said in ready:
                assert isinstance(said, Connection)
                number = waiting.pop(said)
                try:
                    kind, value = said.recv()
                except EOFError:
                    continue
                found[number] = Outcome(kind, value, time.monotonic() - self._began)
        return found


def fill(server: ObjectServer, checkpoint: Mapping[str, torch.Tensor]) -> None:
    names = list(checkpoint)
    for number, some in enumerate((names[:20], names[20:])):
        body = safetensors.torch.save({name: checkpoint[name] for name in some})
        server.put("bucket", f"m/model-{number + 1:05d}-of-00002.safetensors", body)


@pytest.fixture
def store(checkpoint: Mapping[str, torch.Tensor]) -> Iterator[ObjectServer]:
    with ObjectServer(require_signature=True) as server:
        fill(server, checkpoint)
        yield server


def task_of(server: ObjectServer, **changes: Any) -> dict[str, Any]:
    options = {
        "endpoint_url": server.url,
        "region": "us-east-1",
        "header_read_bytes": 8192,
        "share_timeout_seconds": 30.0,
    }
    return {
        "url": "s3://bucket/m",
        "document": DOCUMENT,
        **changes,
        "options": {**options, **changes.get("options", {})},
    }


def check_exact(checkpoint: Mapping[str, torch.Tensor], states: Sequence[bytes]) -> None:
    for place, body in enumerate(states):
        state = safetensors.torch.load(body)
        plain = build_llama(LlamaConfig.from_dict(DOCUMENT), Parallel(place, len(states)), load_device="cpu")
        plain.load_weights(checkpoint.items())
        for name, value in plain.state_dict().items():
            assert torch.equal(value, state[name]), f"{name} at rank {place}"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_server_sends_every_byte_once(
    store: ObjectServer, checkpoint: Mapping[str, torch.Tensor], tmp_path: Path, size: int
) -> None:
    with Ranks(size, task_of(store), tmp_path / "ranks") as ranks:
        loaded = [outcome for outcome in ranks.outcomes(120) if outcome]
    assert [outcome.kind for outcome in loaded] == ["loaded"] * size, loaded
    check_exact(checkpoint, [outcome.value[1] for outcome in loaded])
    total = sum(value.nbytes for value in checkpoint.values())
    sent = sum(end - start for _, start, end in store.counters.ranges)
    assert total <= sent <= total + 2 * 8192  # the headers of two files, which one rank reads
    assert {outcome.value[0].sharing.node_fetched_bytes for outcome in loaded} == {sent}


def test_stored_checksums_are_asked_for_once_and_hold_for_all(
    store: ObjectServer, checkpoint: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    for key, stored in store.objects["bucket"].items():
        body = stored.content
        assert isinstance(body, bytes)
        part = len(body) // 3
        store.checksums["bucket", key] = keep("CRC32", body, [part, part, len(body) - 2 * part])
    task = task_of(store, options={"integrity": "checksums"})
    with Ranks(2, task, tmp_path / "ranks") as ranks:
        loaded = [outcome for outcome in ranks.outcomes(120) if outcome]
    assert [outcome.kind for outcome in loaded] == ["loaded"] * 2, loaded
    check_exact(checkpoint, [outcome.value[1] for outcome in loaded])
    first, second = (outcome.value[0].checksums for outcome in loaded)
    assert first == second
    assert (first.checked_files, first.checked_bytes) == (
        2,
        sum(stored.size for stored in store.objects["bucket"].values()),
    )
    assert store.counters.requests["ATTRIBUTES"] == 2

    def flip(request: Request, response: Response) -> None:
        assert isinstance(response.body, bytes)
        at = response.start + response.count // 2
        response.body = response.body[:at] + bytes([response.body[at] ^ 1]) + response.body[at + 1 :]

    store.faults.append(Fault(flip, key="model-00002", skip=1))
    with Ranks(2, task, tmp_path / "again") as ranks:
        outcomes = [outcome for outcome in ranks.outcomes(120) if outcome]
    assert [type(outcome.value) for outcome in outcomes] == [IntegrityError] * 2, outcomes
    assert all("s3://bucket/m/model-00002-of-00002.safetensors bytes" in str(outcome.value) for outcome in outcomes)


def test_a_group_that_is_not_everybody(
    store: ObjectServer, checkpoint: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    with Ranks(3, task_of(store, members=[1, 2]), tmp_path / "ranks") as ranks:
        outcomes = ranks.outcomes(120)
    assert [outcome and outcome.kind for outcome in outcomes] == ["idle", "loaded", "loaded"], outcomes
    check_exact(checkpoint, [outcome.value[1] for outcome in outcomes[1:] if outcome])


def test_a_rank_that_comes_late_is_named(store: ObjectServer, tmp_path: Path) -> None:
    task = task_of(store, late={1: 60}, options={"share_timeout_seconds": 1.0})
    with Ranks(4, task, tmp_path / "ranks") as ranks:
        time.sleep(4)
        ranks.kill(1)
        first, late, _, last = ranks.outcomes(20)
    assert late is None
    assert first is not None
    assert isinstance(first.value, LoadError)
    assert "rank 1 did not come within 1 s" in str(first.value)
    assert "share_timeout_seconds" in str(first.value)
    assert last is not None
    assert isinstance(last.value, LoadError)


def test_a_range_that_cannot_be_read_fails_all_with_the_same_cause(store: ObjectServer, tmp_path: Path) -> None:
    broken = Fault(lambda *_: error_response(500, "InternalError"), key="model-00002", skip=1, times=None)
    store.faults.append(broken)  # all but the header, which is read first
    task = task_of(store, options={"retry_attempts": 2, "retry_first_wait_seconds": 0.01})
    with Ranks(4, task, tmp_path / "ranks") as ranks:
        outcomes = [outcome for outcome in ranks.outcomes(60) if outcome]
    assert [type(outcome.value) for outcome in outcomes] == [SourceUnavailableError] * 4
    assert all("InternalError" in str(outcome.value) for outcome in outcomes)
    # Several may have come upon it themselves; then all raise what the first of these says.
    culprits = {outcome.value.rank for outcome in outcomes} - {None}
    assert len(culprits) == 1, [str(outcome.value) for outcome in outcomes]
    assert sum(outcome.value.rank is None for outcome in outcomes) == 1


def test_a_rank_killed_at_any_moment_ends_the_others_and_leaves_nothing(
    checkpoint: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    with ObjectServer(bytes_per_second=150_000.0) as slow:  # per connection: the load takes a second or two
        fill(slow, checkpoint)
        check_kills(slow, tmp_path)


def check_kills(store: ObjectServer, tmp_path: Path) -> None:
    rng = random.Random(3)
    with Ranks(4, task_of(store), tmp_path / "whole") as ranks:
        outcomes = ranks.outcomes(120)
        assert all(outcome and outcome.kind == "loaded" for outcome in outcomes)
        seconds = max(outcome.seconds for outcome in outcomes if outcome)
    memory = set(os.listdir("/dev/shm"))
    interrupted = 0
    for number in range(4):
        victim = number % 4
        with Ranks(4, task_of(store), tmp_path / f"killed-{number}") as ranks:
            time.sleep(rng.random() * seconds)
            ranks.kill(victim)
            killed = time.monotonic() - ranks._began
            outcomes = ranks.outcomes(30)
        for outcome in (outcome for place, outcome in enumerate(outcomes) if place != victim):
            assert outcome is not None, "a rank ended without a word"
            if outcome.kind == "loaded":
                continue  # it had all its bytes already
            interrupted += 1
            assert isinstance(outcome.value, StreamError)
            assert "end" in str(outcome.value), outcome.value  # ended, or did not come or ended
            assert outcome.seconds - killed < 15
    assert interrupted >= 4, "hardly any rank was killed in the middle of a load"
    assert not [name for name in set(os.listdir("/dev/shm")) - memory if "s3stream" in name]
