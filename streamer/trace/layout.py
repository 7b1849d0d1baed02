"""How elements lie in a storage: what a tensor on meta knows, at a fraction of its cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from streamer.plan.geometry import View, sort_dims

__all__ = ["Layout", "Windows", "alias_of", "view_of"]

#: Views remembered per layout. Loaders slice all tensors of a shape alike; one that does not may not fill memory.
_REMEMBERED = 1024

#: What a view op gives: one layout, or the type of a sequence and its items.
Views: TypeAlias = "Layout | tuple[type, tuple[Layout, ...]]"


class Layout:
    """Shape, strides and offset, in elements, and dtype. Never changed.

    A checkpoint has thousands of tensors and few shapes, and what a view op makes of a layout depends on nothing
    else. So the tensors of one shape share one, which remembers what torch made of it.
    """

    __slots__ = ("_is_ordered", "_views", "dtype", "itemsize", "ndim", "offset", "shape", "strides")

    def __init__(self, meta: torch.Tensor) -> None:
        self.shape = meta.size()
        self.strides = meta.stride()
        self.offset = int(meta.storage_offset())
        self.dtype = meta.dtype
        self.itemsize = meta.element_size()
        self.ndim = len(self.shape)
        self._is_ordered: bool | None = None
        # By the function's id, since its hash is Python code; the entry keeps the function alive.
        self._views: dict[tuple[Any, ...], tuple[Callable[..., Any], Views]] = {}

    def empty(self, device: str = "meta") -> torch.Tensor:
        """Return a tensor of this layout's shape, strides and dtype, at offset 0 of a storage of its own."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def view(self, origin: int = 0) -> View:
        """Return the geometry in bytes, the storage beginning at `origin`."""
        itemsize = self.itemsize
        return View(
            origin + self.offset * itemsize,
            itemsize,
            tuple(self.shape),
            tuple([stride * itemsize for stride in self.strides]),
        )

    @property
    def is_ordered(self) -> bool:
        """Whether, with its dimensions by descending strides, index order is address order and no elements overlap."""
        if self._is_ordered is None:
            self._is_ordered = sort_dims(self.view())[0].is_ordered
        return self._is_ordered

    def recall(self, func: Callable[..., Any], arguments: tuple[Any, ...]) -> Views | None:
        """Return what `func` with `arguments`, after the tensor itself, is known to make of this layout."""
        try:
            known = self._views.get((id(func), arguments))
        except TypeError:  # lists, such as the sizes that `view` takes
            known = self._views.get((id(func), _hashable(arguments)))
        return None if known is None else known[1]

    def learn(self, func: Callable[..., Any], arguments: tuple[Any, ...] | None, result: Any) -> Views | None:
        """Return the layouts of `result`, tensors on meta, and remember them for `arguments`, if given.

        None when layouts do not tell all of it.
        """
        single = isinstance(result, torch.Tensor)
        metas = (result,) if single else tuple(result)
        if any(meta.is_conj() or meta.is_neg() for meta in metas):
            return None
        layouts = tuple(Layout(meta) for meta in metas)
        views: Views = layouts[0] if single else (type(result), layouts)
        if arguments is not None:
            self.remember(func, arguments, views)
        return views

    def remember(self, func: Callable[..., Any], arguments: tuple[Any, ...], views: Views) -> None:
        """Let `recall` know that `func` with `arguments` makes `views` of this layout."""
        if any(isinstance(argument, torch.Tensor) for argument in arguments):
            return  # equal by identity, and different later
        if len(self._views) >= _REMEMBERED:
            self._views.clear()
        self._views[id(func), _hashable(arguments)] = func, views


def _hashable(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(argument) if type(argument) is list else argument for argument in arguments)


def view_of(tensor: torch.Tensor, origin: int = 0) -> View:
    """Return the geometry of a tensor in bytes, its storage beginning at `origin`."""
    itemsize = tensor.element_size()
    return View(
        origin + int(tensor.storage_offset()) * itemsize,
        itemsize,
        tuple(tensor.size()),
        tuple([stride * itemsize for stride in tensor.stride()]),
    )


class Windows:
    """`view_of`, for many tensors of few shapes: what depends on shape, strides and dtype is worked out once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, tuple[int, ...], tuple[int, ...], int]] = {}

    def of(self, tensor: torch.Tensor) -> tuple[View, int]:
        """Return the geometry of a tensor in bytes, its storage beginning at 0, and where it ends."""
        key = tensor.size(), tensor.stride(), tensor.dtype
        known = self._known.get(key)
        if known is None:
            view = view_of(tensor)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = view.itemsize, view.shape, view.strides, view.end - view.offset
        itemsize, shape, strides, length = known
        offset = int(tensor.storage_offset()) * itemsize
        return View(offset, itemsize, shape, strides), offset + length


def alias_of(root: torch.Tensor, layout: Layout) -> torch.Tensor:
    """View `root`, which begins its storage, as `layout` says."""
    if root.dtype == layout.dtype:
        return root.as_strided(layout.shape, layout.strides, layout.offset)
    alias = torch.empty(0, dtype=layout.dtype, device=root.device)
    return alias.set_(root.untyped_storage(), layout.offset, layout.shape, layout.strides)
