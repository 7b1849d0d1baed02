"""A short soak under fixed seeds; the long ones are run by hand."""

from __future__ import annotations

import pytest

from tests.faults.soak import run


@pytest.mark.parametrize("seed", [1, 2])
def test_mixtures_of_faults_end_in_exact_parameters_or_an_error_about_the_store(seed: int) -> None:
    summary = run(20, seed)
    assert not summary.violations, str(summary)
    assert summary.rounds == 20
    # Otherwise the mixtures are too weak, or too strong, to say anything.
    assert summary.ended["exact"] >= summary.loads // 4, str(summary)
    assert summary.loads - summary.ended["exact"] >= 2, str(summary)
    assert summary.retries >= 10, str(summary)
    assert len(summary.struck) >= 20, str(summary)
