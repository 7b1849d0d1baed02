"""Fetches that are ended from outside, at any point, and those that go on after them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.artifacts.check import check
from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.fetch import fetch
from streamer.artifacts.journal import Journal, part_id
from streamer.artifacts.metadata import read_marker
from streamer.errors import SourceUnavailableError
from streamer.sources.base import ObjectInfo
from tests.artifacts.fetching import ALL, METADATA, URL, WEIGHTS, config_for, left_over, put_all, start, tree
from tests.servers.object_server import Fault, ObjectServer, Request, Response

KILLS = 10
TOTAL = sum(map(len, ALL.values()))
#: So many reads may be on their way, and so many written and not yet synced.
UNDER_WAY = 2 * 8 * 65536


@pytest.fixture
def throttled() -> Iterator[ObjectServer]:
    """A fetch of everything takes about two seconds."""
    with ObjectServer(bytes_per_second=400_000.0) as server:
        put_all(server)
        yield server


def known_ranges(server: ObjectServer, folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Return, by key, what a killed fetch has recorded, files with names included."""
    if not (folder / WORK_FOLDER / "journal").exists():
        return {}
    known: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with Destination(folder) as destination, Journal(destination) as journal:
        for key, body in ALL.items():
            stored = server.objects["models"][f"org/m/{key}"]
            version = part_id(f"{URL}/", ObjectInfo(key, len(body), stored.etag))
            for name in destination.parts():
                if name.startswith(version):
                    known[key] += journal.arrived(name).spans()
            if key in journal.finished:
                known[key].append((0, len(body)))
    return known


def overlaps(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return max(first[0], second[0]) < min(first[1], second[1])


def wait_for_bytes(server: ObjectServer, count: int) -> None:
    limit = time.monotonic() + 30
    while server.counters.body_bytes < count:
        assert time.monotonic() < limit
        time.sleep(0.005)


def finish(server: ObjectServer, folder: Path) -> dict[str, Any]:
    process = start(server, folder, "--mode", "all", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_killed_ten_times_and_then_finished(throttled: ObjectServer, tmp_path: Path) -> None:
    rng = random.Random(7)
    known: dict[str, list[tuple[int, int]]] = {}
    largest = 0

    def check_reads(first: int) -> None:
        for name, low, high in throttled.counters.ranges[first:]:
            for span in known.get(name.removeprefix("org/m/"), []):
                assert not overlaps(span, (low, high)), f"{name} {low}-{high} is fetched again"

    kills = 0
    while kills < KILLS or largest <= TOTAL // 4:  # how far each gets is up to the machine
        kills += 1
        assert kills < 10 * KILLS
        begun, first = throttled.counters.body_bytes, len(throttled.counters.ranges)
        process = start(throttled, tmp_path, "--mode", "all")
        wait_for_bytes(throttled, begun + rng.randrange(TOTAL // 20, TOTAL // 5))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        check_reads(first)
        assert check(tmp_path)[1], "it is not complete"
        for key, body in tree(tmp_path).items():
            assert body == ALL[key], "what has a name is whole"
        known = known_ranges(throttled, tmp_path)
        largest = max(largest, sum(end - start for spans in known.values() for start, end in spans))
    assert largest < TOTAL
    first = len(throttled.counters.ranges)
    done = finish(throttled, tmp_path)
    check_reads(first)
    assert tree(tmp_path) == ALL
    assert done["fetched_bytes"] <= TOTAL - largest
    assert throttled.counters.body_bytes < TOTAL + (KILLS + 1) * UNDER_WAY
    assert left_over(tmp_path) == []
    assert not check(tmp_path)[1]


def test_sigterm_ends_it_at_once_and_loses_nothing(throttled: ObjectServer, tmp_path: Path) -> None:
    process = start(throttled, tmp_path, "--mode", "all")
    wait_for_bytes(throttled, TOTAL // 3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, "its own exit code, and no death by the signal"
    assert time.monotonic() - began < 3
    assert err.splitlines()[-1] == "s3stream: ended by SIGTERM"
    assert "Traceback" not in err
    known = sum(end - start for spans in known_ranges(throttled, tmp_path).values() for start, end in spans)
    # All but what was on its way.
    assert known >= TOTAL // 3 - UNDER_WAY
    before = len(throttled.counters.ranges)
    finish(throttled, tmp_path)
    assert tree(tmp_path) == ALL
    refetched = sum(end - start for _, start, end in throttled.counters.ranges[before:])
    assert refetched == TOTAL - known


def test_sigint_has_its_own_code(throttled: ObjectServer, tmp_path: Path) -> None:
    process = start(throttled, tmp_path, "--mode", "all")
    wait_for_bytes(throttled, 100_000)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "s3stream: ended by SIGINT"


def _may_be_first() -> bool:
    return not subprocess.run(["unshare", "-rpf", "--mount-proc", "true"], capture_output=True).returncode


@pytest.mark.skipif(not _may_be_first(), reason="the kernel lets us make no PID namespace")
def test_sigterm_ends_the_first_process_of_a_container(throttled: ObjectServer, tmp_path: Path) -> None:
    """The kernel gives it no default handlers."""
    process = start(throttled, tmp_path, "--mode", "all", before=("unshare", "-rpf", "--mount-proc"))
    wait_for_bytes(throttled, 100_000)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert f"NSpid:\t{child}\t1\n" in Path(f"/proc/{child}/status").read_text()
    os.kill(int(child), signal.SIGTERM)
    assert process.wait(timeout=5) == 143
    process.communicate()


def test_one_that_waits_for_another_can_be_ended(throttled: ObjectServer, tmp_path: Path) -> None:
    with Destination(tmp_path) as held:
        held.lock(lambda: None)
        process = start(throttled, tmp_path)
        assert process.stderr is not None
        assert "another process fetches into" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
        assert process.returncode == 143
    assert not throttled.counters.requests["LIST"]


def test_what_a_changed_object_left_behind_is_not_gone_on_with(throttled: ObjectServer, tmp_path: Path) -> None:
    key = next(iter(WEIGHTS))
    process = start(throttled, tmp_path, "--mode", "all")
    wait_for_bytes(throttled, TOTAL // 4)
    process.kill()
    process.communicate()
    newer = bytes(len(WEIGHTS[key]))
    throttled.put("models", f"org/m/{key}", newer)
    before = len(throttled.counters.ranges)
    finish(throttled, tmp_path)
    assert tree(tmp_path) == {**ALL, key: newer}
    anew = sum(end - start for name, start, end in throttled.counters.ranges[before:] if name == f"org/m/{key}")
    assert anew == len(newer)
    assert left_over(tmp_path) == []


def test_a_store_that_stalls_is_an_error_and_what_came_is_kept(server: ObjectServer, tmp_path: Path) -> None:
    put_all(server)
    key = list(WEIGHTS)[1]
    options = {"idle_timeout_seconds": 0.3, "retry_attempts": 2, "concurrency": 2}

    def stall(request: Request, response: Response) -> None:
        response.stall_after = 100

    server.faults = [Fault(stall, key=f"org/m/{key}", times=None, method="GET", skip=5)]
    began = time.monotonic()
    with pytest.raises(SourceUnavailableError):
        fetch(URL, tmp_path, config_for(server, **options), mode="all")
    assert time.monotonic() - began < 10
    assert read_marker(tmp_path) is None
    server.faults = []
    before = len(server.counters.ranges)
    done = fetch(URL, tmp_path, config_for(server, **options), mode="all")
    assert tree(tmp_path) == ALL
    assert done.skipped == len(METADATA) + 1
    assert done.resumed_bytes >= 3 * 65536
    refetched = {name for name, _, _ in server.counters.ranges[before:]}
    assert f"org/m/{next(iter(WEIGHTS))}" not in refetched
