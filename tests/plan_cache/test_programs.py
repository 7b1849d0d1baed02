"""Random loading programs give the same bytes from a plan as from their code.

The programs are those of ``tests/trace/test_programs.py``, without what a plan cannot say: no values are looked at.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamer
from streamer.report import PlanCacheUse
from tests.trace.loading import Model, load_from_plan, source_of
from tests.trace.test_programs import PARAMETERS, STATE, Step, program

VIEW, COPY, EXPRESSION, FILL = 0, 1, 2, 5
#: Which of `Interpreter.touch_parameter` fill a part of the model with a number.
FILLS = (1, 2, 10)

numbers = st.integers(0, 200)
steps = st.one_of(
    st.tuples(st.sampled_from([VIEW, COPY, COPY, COPY, EXPRESSION]), numbers, numbers, numbers),
    st.tuples(st.just(FILL), numbers, numbers, st.sampled_from(FILLS)),
)


def test_programs_give_the_same_without_their_code() -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=250, deadline=None)
    @given(steps=st.lists(steps, min_size=12, max_size=60), listed=st.booleans())
    def check(steps: list[Step], listed: bool) -> None:
        loader = program(steps, listed=listed)
        plain = Model(loader, PARAMETERS)
        weights = dict(streamer.iterate(source_of(STATE)))
        with torch.no_grad():
            plain.load_weights(weights.items())
        with TemporaryDirectory() as folder:
            use = load_from_plan(plain, partial(Model, loader, PARAMETERS), STATE, cache_dir=folder)
        assert isinstance(use, PlanCacheUse)
        outcomes[use.outcome] += 1

    check()
    assert outcomes["kept"] > outcomes["not used"]
