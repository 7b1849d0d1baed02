"""Turns what variables and command lines say into values of options, and checks their types."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from streamer.errors import ConfigError

__all__ = ["check_type", "convert", "parse_byte_count"]

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 1000,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 1000**2,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 1000**3,
}


def parse_byte_count(text: str) -> int:
    """Read ``"8 MiB"``, ``"512k"`` or ``"1000"`` as a number of bytes.

    Raises:
        ConfigError: it is not a non-negative number with a known unit.
    """
    number = text.strip().replace("_", "")
    digits = number.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = number[len(digits) :].lower()
    try:
        count = float(digits) * _BYTE_UNITS[unit]
        if count != int(count) or count < 0:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is not a number of bytes", hint="examples: 8388608, 8MiB, 512k") from None
    return int(count)


def convert(where: str, value: Any, hint: Any, *, is_bytes: bool = False) -> Any:
    """Turn a string from a variable or a command line into the option's type."""
    if not isinstance(value, str):
        return value
    allowed = _alternatives(hint)
    if str in allowed or typing.get_origin(hint) is Literal:
        return value or None if type(None) in allowed else value
    try:
        if bool in allowed:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        if int in allowed:
            return parse_byte_count(value) if is_bytes or "_BYTES" in where else int(value)
        return float(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (KeyError, ValueError) as error:
        kind = "yes or no" if bool in allowed else "a number"
        raise ConfigError(f"{where} must be {kind}, not {value!r}") from error


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def check_type(name: str, value: Any, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"option {name} must be one of {', '.join(choices)}, not {value!r}")
        return
    allowed = _alternatives(hint)
    # bool is an int to Python, but `concurrency=True` is a mistake.
    if float in allowed and type(value) is int:
        return
    if type(value) not in allowed:
        wanted = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ConfigError(f"option {name} must be {wanted}, not {value!r}")
