"""A journal says less than there is after a crash, never more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.journal import Journal, part_id
from streamer.sources.base import ObjectInfo

SPANS = [(0, 10), (20, 35), (10, 20), (100, 12345678)]


def write(folder: Path) -> None:
    with Destination(folder) as destination, Journal(destination) as journal:
        for span in SPANS:
            journal.add_spans("a.part", [span])
        journal.add_spans("b.part", [(5, 6)])
        journal.add_finished("c.part", "config.json", 42)


def test_what_was_recorded_is_known_to_the_next(tmp_path: Path) -> None:
    write(tmp_path)
    with Destination(tmp_path) as destination, Journal(destination) as journal:
        assert journal.arrived("a.part").spans() == [(0, 35), (100, 12345678)]
        assert journal.arrived("b.part").spans() == [(5, 6)]
        assert journal.arrived("c.part").spans() == []
        assert journal.finished == {"config.json": {42: "c.part"}}
        journal.forget("a.part")
    with Destination(tmp_path) as destination, Journal(destination) as journal:
        assert journal.arrived("a.part").spans() == []
        assert journal.arrived("b.part").spans() == [(5, 6)]


def test_a_torn_or_damaged_record_counts_for_nothing_and_spoils_no_other(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / WORK_FOLDER / "journal"
    whole = path.read_bytes()
    rng = random.Random(3)
    for _ in range(200):
        body = bytearray(whole)
        if rng.random() < 0.5:
            del body[rng.randrange(len(body)) :]
        else:
            body[rng.randrange(len(body))] = rng.randrange(256)
        path.write_bytes(body)
        with Destination(tmp_path) as destination, Journal(destination) as journal:
            found = journal.arrived("a.part").spans()
            assert all(any(start >= low and end <= high for low, high in [(0, 35), SPANS[3]]) for start, end in found)
            assert journal.finished in ({}, {"config.json": {42: "c.part"}})
            journal.add_spans("d.part", [(1, 2)])
        with Destination(tmp_path) as destination, Journal(destination) as journal:
            assert journal.arrived("d.part").spans() == [(1, 2)]


@pytest.mark.parametrize(
    "other",
    [
        ("s3://b/other/", ObjectInfo("k", 10, '"e"', "v")),
        ("s3://b/m/", ObjectInfo("l", 10, '"e"', "v")),
        ("s3://b/m/", ObjectInfo("k", 11, '"e"', "v")),
        ("s3://b/m/", ObjectInfo("k", 10, '"f"', "v")),
        ("s3://b/m/", ObjectInfo("k", 10, '"e"', "w")),
    ],
)
def test_versions_have_names_of_their_own(other: tuple[str, ObjectInfo]) -> None:
    mine = part_id("s3://b/m/", ObjectInfo("k", 10, '"e"', "v"))
    assert mine == part_id("s3://b/m/", ObjectInfo("k", 10, '"e"', "v"))
    assert mine != part_id(*other)


def test_without_a_pin_no_two_are_the_same() -> None:
    item = ObjectInfo("k", 10)
    assert part_id("s3://b/m/", item) != part_id("s3://b/m/", item)
