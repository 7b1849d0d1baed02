"""Paragraphs and tables in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

__all__ = ["paragraph", "table"]

_WIDTH = 120
_CODE = re.compile("`[^`]*`")


def paragraph(*sentences: str) -> str:
    """Join and wrap; what is code stays in one line."""
    joined = _CODE.sub(lambda found: found[0].replace(" ", "\0"), " ".join(sentences))
    lines = textwrap.wrap(joined, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def table(titles: str, rows: Iterable[Iterable[object]]) -> str:
    names = titles.split(" | ")
    lines = [f"| {titles} |", f"|{' --- |' * len(names)}"]
    for row in rows:
        cells = [str(cell) for cell in row]
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} cells under {len(names)} titles: {cells}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
