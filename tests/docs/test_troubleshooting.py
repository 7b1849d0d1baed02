"""The messages that `docs/troubleshooting.md` quotes are those of the code, and each has its cause and remedy."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from streamer import errors
from streamer.cli.exit_codes import exit_code
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^### `(.+?)`\n\n(.+?)(?=\n#|\Z)", PAGE, re.M | re.S))


@cache
def texts() -> tuple[str, ...]:
    """Every string of the code that users may see, with `…` where something is filled in."""
    found = []
    for folder in ("streamer", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    found.append(node.value)
    return tuple(found)


def occurs(message: str) -> bool:
    """Whether the fixed parts of `message` follow each other in one string of the code."""
    parts = [re.escape(part) for part in re.split(r"\s*…\s*", message) if part]
    pattern = re.compile(".*".join(parts), re.S)
    return any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("message", SECTIONS)
def test_messages_are_those_of_the_code(message: str) -> None:
    assert occurs(message)


def test_messages_quoted_within_the_text_are_those_of_the_code() -> None:
    # Words in code that are a sentence, and not a command or an option.
    quoted = set(re.findall(r"`((?:the|was) [a-z][^`]+)`", PAGE))
    assert len(quoted) > 5
    assert [text for text in quoted if not occurs(text)] == []


def test_a_message_that_the_code_does_not_have_is_found_out() -> None:
    assert not occurs("the store is out of coffee")
    assert not occurs("the store kept refusing politely")
    assert not occurs("refusing … the store kept")


def test_each_has_cause_and_remedy() -> None:
    assert len(SECTIONS) == PAGE.count("\n### ") > 30
    for message, text in SECTIONS.items():
        assert re.match(r"Cause: .+\nRemedy: .+", text, re.S), message


def test_all_classes_are_there_with_their_exit_codes() -> None:
    rows = re.findall(r"^\| (`\w+Error`.*?) \| ([\d, ]+) \|", PAGE, re.M)
    found = {name: codes for names, codes in rows for name in re.findall(r"\w+Error", names)}
    kinds = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.StreamError)
    ]
    for kind in kinds:
        if not kind.__subclasses__() or kind is errors.DestinationError:
            assert str(exit_code(kind("x"))) in found.pop(kind.__name__).split(", "), kind
    assert not found
