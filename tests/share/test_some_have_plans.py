"""Ranks that load together, some from a plan: they meet as often, and share as much, as if all of them traced."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer.config import StreamConfig
from streamer.plan_cache.cache import Circumstances
from streamer.session import LoadSession
from tests.plan_cache.models import KEPT, USED
from tests.share.test_sharing import STATE, check, expected, fetched, header_bytes, objects_of, part
from tests.share.together import CountingSource, LoadSessionFactory, Rank, on_ranks

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Sharded(torch.nn.Module):
    """A rank's part of `STATE`."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        for name, value in expected(STATE, rank, size).items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(value), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            getattr(self, name).data.copy_(part(name, tensor, self.rank, self.size))
            loaded.add(name)
        return loaded


@pytest.mark.parametrize("with_plan", [{0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize("overlap_tensors", [0, 1, 3])
def test_some_ranks_have_a_plan(tmp_path: Path, with_plan: set[int], overlap_tensors: int) -> None:
    objects = objects_of(STATE)
    config: dict[str, Any] = {
        "plan_cache": True,
        "overlap_tensors": overlap_tensors,
        "header_read_bytes": header_bytes(objects),
        "buffer_bytes": 256 << 10,
    }

    def load(rank: Rank, _: LoadSessionFactory) -> None:
        number, size = rank.group.rank, rank.group.size
        for turn in (0, 1):
            if turn == 0 and number not in with_plan:
                continue
            model: Any = Sharded(number, size)
            options = StreamConfig(**{**config, "cache_dir": str(tmp_path / "cache")})
            group = rank.group if turn else None  # alone at first, to get a plan
            source = rank.source if turn else CountingSource(objects)
            circumstances = Circumstances({"rank": str(number)})
            with LoadSession(model, options, group=group, circumstances=circumstances) as session:
                opened = session.open(source)
                assert session.run(model.load_weights, session.weights(opened)) == set(STATE)
                rank.model, rank.report = model, session.report()

    ranks = on_ranks(2, load, lambda _: CountingSource(objects), **config)
    check(ranks)
    for rank in ranks:
        assert rank.report is not None
        assert rank.report.plan_cache == (USED if rank.group.rank in with_plan else KEPT)
    assert fetched(ranks, header_bytes(objects)) == sum(tensor.nbytes for tensor in STATE.values())
