"""Which tensors were made without values, such as parameters by ``torch.empty``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.trace.ops import Kind, kind_of
from streamer.trace.pending import storage_key

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["Unset"]

_EMPTY = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)


class Unset(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers, of what is made while it is active, what nobody has written to.

    Engines give some parameters values when they build a model, and load over others. A parameter without either
    holds whatever its memory held before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which must have lived until now, was made here and never written to here."""
        return storage_key(tensor) in self._keys

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if kind_of(func) is not Kind.VIEW:
            is_empty = func._schema.name in _EMPTY
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                # In-place operations return what they wrote to; and memory that was freed may come back.
                if isinstance(tensor, torch.Tensor):
                    (self._keys.add if is_empty else self._keys.discard)(storage_key(tensor))
        return result
