"""The error for parameters that got no values."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from streamer.errors import MissingParametersError, shorten
from streamer.report import LoadReport

__all__ = ["missing_parameters"]


def missing_parameters(report: LoadReport, names: Sequence[str], tensors: Sequence[str]) -> MissingParametersError:
    """Return the error for the parameters `names`, with the nearest of the checkpoint's `tensors` for each.

    Those that the model has not used are likelier than those that it has.
    """
    unused = [name for name in tensors if name in report.ignored or name in report.unexpected]
    near = {name: _nearest(name, unused or tensors) for name in names[:5]}
    found = [f"{name} (nearest in the checkpoint: {other})" if other else name for name, other in near.items()]
    return MissingParametersError(
        f"{report.url} has no values for {len(names)} parameters: {shorten([*found, *names[5:]])}",
        names=names,
        hint="check that this checkpoint belongs to this model, or set strict=false",
    )


def _nearest(name: str, candidates: Sequence[str]) -> str | None:
    """Find the most similar name, among those that end alike when there are any."""
    alike = [other for other in candidates if other.rpartition(".")[2] == name.rpartition(".")[2]]
    found = difflib.get_close_matches(name, (alike or candidates)[:2000], n=1, cutoff=0.4)
    return found[0] if found else None
