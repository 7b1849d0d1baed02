"""JSON as serde reads it, which is how safetensors reads headers.

Python's ``json`` accepts ``NaN`` and lone surrogates, merges duplicate keys, and has no limit on
numbers; serde does not. Objects come back as `JsonObject`, which keeps every pair, because whether a
duplicate is an error depends on which key it is.
"""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["JsonObject", "StrictJsonError", "loads"]

_MAX_DEPTH = 128  # serde_json's recursion limit
_MAX_U64 = (1 << 64) - 1


class StrictJsonError(ValueError):
    """The text is not JSON that serde would read."""


class JsonObject:
    """An object's pairs, duplicates included, in the order written."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def loads(raw: bytes) -> Any:
    """Parse `raw`.

    Raises:
        StrictJsonError: serde would refuse it.
    """
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not valid UTF-8 at byte {error.start}") from error
    except RecursionError:
        raise StrictJsonError(f"nested deeper than {_MAX_DEPTH} levels") from None
    except StrictJsonError:
        raise
    except ValueError as error:
        raise StrictJsonError(str(error)) from error
    lowered = raw.lower()
    # Both walks are only needed for headers that no writer makes on purpose.
    if b"\\ud" in lowered:
        _refuse_lone_surrogates(value)
    if raw.count(b"[") + raw.count(b"{") >= _MAX_DEPTH:
        _refuse_depth(value)
    return value


def _parse_int(text: str) -> int | float:
    if text == "-0":
        return -0.0
    if len(text) < 20:
        return int(text)
    number = _parse_float(text)  # serde falls back to a float beyond 64 bits
    exact = int(text)
    return exact if -(1 << 63) <= exact <= _MAX_U64 else number


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictJsonError("number out of range")
    return number


def _refuse_constant(text: str) -> Any:
    raise StrictJsonError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=JsonObject,
    parse_int=_parse_int,
    parse_float=_parse_float,
    parse_constant=_refuse_constant,
)


def _strings(value: Any) -> Any:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, JsonObject):
            for key, inner in item.pairs:
                yield key
                stack.append(inner)


def _refuse_lone_surrogates(value: Any) -> None:
    for text in _strings(value):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise StrictJsonError("a string holds a lone surrogate")


def _refuse_depth(value: Any) -> None:
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, JsonObject):
            children = [inner for _, inner in item.pairs]
        elif isinstance(item, list):
            children = item
        else:
            continue
        if depth >= _MAX_DEPTH:
            raise StrictJsonError(f"nested deeper than {_MAX_DEPTH} levels")
        stack.extend((child, depth + 1) for child in children)
