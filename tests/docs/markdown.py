"""What the documentation shows: code blocks, commands in them and in the text, and names of options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCUMENTS", "ROOT", "Block", "Command", "blocks", "calls", "commands", "named_options"]

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`]+)`")
#: Where a variable's name stands for many of them, as in S3STREAM_* and S3STREAM_<KEY>.
_VARIABLE = re.compile(r"\bS3STREAM_([A-Z][A-Z_]*)\b")
_OPTION = re.compile(r"(?:--option|-o)[ =](?!key=value)([A-Za-z_]+)=")
_EXTRA_CONFIG = re.compile(r"--model-loader-extra-config '(\{.*?\})'")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code.

    Attributes:
        line: of its first fence.
        not_run: why no test runs it; None if one has to.
    """

    document: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A call of s3stream: the subcommand, empty if there is none, and the names of the options given to it."""

    name: str
    options: tuple[str, ...]


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document. A comment right above one may say why it is not run."""
    text = document.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(document, line, found["language"], found["text"], found["why"])


def commands(document: Path) -> Iterator[Command]:
    """Yield the calls of s3stream in blocks of bash and console, and in code within the text."""
    prose = _BLOCK.sub("", document.read_text())
    lines = [line.replace("\n", " ") for line in _INLINE.findall(prose)]
    for block in blocks(document):
        if block.language in {"bash", "console"}:
            lines += block.text.replace("\\\n", " ").splitlines()
    for line in lines:
        yield from calls(line)


def calls(line: str) -> Iterator[Command]:
    """Yield the calls of s3stream in one line of a shell, or of a synopsis."""
    # Brackets and bars of a synopsis are not part of what is typed.
    for part in re.split(r"&&|\|\||;|(?<!\\)\|", line):
        try:
            words = shlex.split(re.sub(r"[\[\]]|\\\|\w+", " ", part), comments=True)
        except ValueError:  # an apostrophe in output that is shown
            continue
        words = words[1:] if words[:1] == ["$"] else words
        while words and "=" in words[0] and not words[0].startswith("-"):
            words = words[1:]  # variables of this call
        if words and Path(words[0]).name == "s3stream" and "://" not in words[0]:
            name = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
            yield Command(name, tuple(word.partition("=")[0] for word in words[1:] if word.startswith("-")))


def named_options(document: Path) -> Iterator[str]:
    """Yield options of `StreamConfig` that the document names, as variables, for the command line and for vLLM."""
    text = document.read_text()
    for variable in _VARIABLE.findall(text):
        yield variable.lower()
    yield from _OPTION.findall(text)
    for given in _EXTRA_CONFIG.findall(text):
        yield from json.loads(given)
