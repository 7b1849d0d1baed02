"""Which tensors of a checkpoint a model took nothing from, and why."""

from __future__ import annotations

from collections.abc import Iterable

from streamer.trace.tracer import Tracer

__all__ = ["unused_tensors"]


def unused_tensors(tracer: Tracer, names: Iterable[str]) -> dict[str, str]:
    """Return a reason, as far as it is known, for each tensor that no byte was taken from."""
    unused = {}
    for name in names:
        base = tracer.bases.get(name)
        if base is None:
            unused[name] = "the model stopped reading before it"
        elif base.used:
            continue
        elif name in tracer.copies.superseded:
            unused[name] = f"overwritten by {tracer.copies.superseded[name]}"
        elif base.looked_at:
            unused[name] = "the model looked at it and took nothing"
        else:
            unused[name] = "the model passed over it"
    return unused
