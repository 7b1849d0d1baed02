"""What a model's loading code did, as data: which bytes of the checkpoint went where in the model."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from streamer.plan_cache.expressions import Expression, Geometry, Source

__all__ = ["Attribute", "CopyStep", "FillStep", "Recipe", "Returned", "Step"]

#: Names of parameters, as ``load_weights`` returns them, or nothing.
Returned: TypeAlias = "set[str] | frozenset[str] | list[str] | tuple[str, ...] | None"

_KINDS: Mapping[str, Callable[[Iterable[str]], Any]] = {kind.__name__: kind for kind in (set, frozenset, list, tuple)}


class CopyStep(NamedTuple):
    """Elements of a tensor of the checkpoint are copied into the model.

    A tuple, like `Source`, because there may be a hundred thousand and frozen dataclasses take three times as long.

    Attributes:
        position: how often the code had asked for a tensor by then.
        source: of the checkpoint, or computed.
        target: name of a parameter or buffer.
        destination: in the storage of that.
    """

    position: int
    source: Source
    target: str
    destination: Geometry


@dataclass(frozen=True, slots=True)
class FillStep:
    """A part of the model is filled with one number, such as the padding of an embedding table."""

    position: int
    target: str
    destination: Geometry
    value: bool | int | float


Step: TypeAlias = CopyStep | FillStep


@dataclass(frozen=True, slots=True)
class Attribute:
    """The code set an attribute of a module.

    Attributes:
        module: its name.
        value: as a literal of Python.
    """

    module: str
    name: str
    value: str

    @classmethod
    def of(cls, module: str, name: str, value: object) -> Attribute:
        """Take down `value`.

        Raises:
            ValueError: it is no plain value, such as a number, a string, or a list of them.
        """
        text = repr(value)
        try:
            again = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"{type(value).__name__} is no plain value") from error
        if repr(again) != text or again != value:
            raise ValueError(f"{type(value).__name__} is no plain value")
        return cls(module, name, text)

    def new_value(self) -> object:
        return ast.literal_eval(self.value)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that one load did.

    Attributes:
        steps: in the order in which they were done, and have to be: later ones may overwrite earlier ones.
        asked: how often the code asked for a tensor, the time included when it was told that there are no more.
        returned: by ``load_weights``.
        attributes: that were set.
        looked_at: names of tensors that the code took nothing from, but looked at.
        expressions: that steps and later expressions refer to by number.
    """

    steps: tuple[Step, ...]
    asked: int
    returned: Returned
    attributes: tuple[Attribute, ...] = ()
    looked_at: tuple[str, ...] = ()
    expressions: tuple[Expression, ...] = ()

    def to_json(self) -> str:
        """Return the recipe as text; what repeats is written once, since a step may be one of a hundred thousand."""
        names, geometries = _Table(), _Table()
        copies, fills = [], []
        known: dict[int, tuple[int, int]] = {}  # by the id of a geometry, which a step keeps

        def geometry(given: Geometry) -> tuple[int, int]:
            found = known.get(id(given))
            if found is None:
                loose = given.dtype, given.shape, given.strides
                found = known[id(given)] = geometries.add(loose), given.offset
            return found

        def source(given: Source) -> list[int]:
            of = given.of if isinstance(given.of, int) else -1 - names.add(given.of)
            return [of, *geometry(given.geometry)]

        for number, step in enumerate(self.steps):
            place = [number, step.position, names.add(step.target), *geometry(step.destination)]
            if isinstance(step, CopyStep):
                copies.append([*place, *source(step.source)])
            else:
                fills.append([*place, step.value])
        kind = None if self.returned is None else type(self.returned).__name__
        listed = self.returned if isinstance(self.returned, (list, tuple)) else sorted(self.returned or ())
        document: dict[str, Any] = {
            "expressions": [
                [expression.function, expression.arguments, [source(given) for given in expression.sources]]
                for expression in self.expressions
            ],
            "names": names.rows,
            "geometries": [[str(dtype).removeprefix("torch."), *rest] for dtype, *rest in geometries.rows],
            "copies": copies,
            "fills": fills,
            "asked": self.asked,
            "returned": [kind, [names.add(name) for name in listed]],
            "attributes": [[attribute.module, attribute.name, attribute.value] for attribute in self.attributes],
            "looked_at": [names.add(name) for name in self.looked_at],
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: it is something else.
        """
        document = json.loads(text)
        names = [str(name) for name in document["names"]]
        geometries = [
            (getattr(torch, dtype), tuple(shape), tuple(strides)) for dtype, shape, strides in document["geometries"]
        ]
        known: dict[tuple[int, int], Geometry] = {}

        def geometry(number: int, offset: int) -> Geometry:
            found = known.get((number, offset))
            if found is None:
                found = known[number, offset] = Geometry(*geometries[number], offset)
            return found

        def source(of: int, number: int, offset: int) -> Source:
            return Source(of if of >= 0 else names[-1 - of], geometry(number, offset))

        steps: dict[int, Step] = {}
        for number, position, target, destination, at, *given in document["copies"]:
            steps[number] = CopyStep(position, source(*given), names[target], geometry(destination, at))
        for number, position, target, destination, at, value in document["fills"]:
            steps[number] = FillStep(position, names[target], geometry(destination, at), value)
        kind, listed = document["returned"]
        return cls(
            steps=tuple(steps[number] for number in range(len(steps))),
            asked=int(document["asked"]),
            returned=None if kind is None else _KINDS[kind](names[number] for number in listed),
            attributes=tuple(Attribute(*attribute) for attribute in document["attributes"]),
            looked_at=tuple(names[number] for number in document["looked_at"]),
            expressions=tuple(
                Expression(function, arguments, tuple(source(*given) for given in sources))
                for function, arguments, sources in document["expressions"]
            ),
        )


class _Table:
    """Rows, each once, and their numbers."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, row: Hashable) -> int:
        number = self._numbers.get(row)
        if number is None:
            number = self._numbers[row] = len(self.rows)
            self.rows.append(row)
        return number
