"""What the README says of the results: a section of Markdown for each part of the suite.

``python -m tests.benchmarks.tables`` prints them, ``--write README.md`` puts each between its marks in that file:

    <!-- measured: sharing -->
    ...
    <!-- end of sharing -->

A part without results has an empty section. A test holds the README to the results that are committed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from tests.benchmarks.rig import RESULTS
from tests.benchmarks.sections import SECTIONS, Results

__all__ = ["read_results", "rewrite", "section"]

_BLOCK = re.compile(r"<!-- measured: (\w+) -->\n(.*?)<!-- end of \1 -->\n", re.DOTALL)
_NEEDED = {"peers": ("peers", "peers_tls")}


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return all results of a folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def section(name: str, results: Results) -> str:
    """Return the Markdown of a part, empty if some of its results are not there.

    Raises:
        KeyError: there is no such part.
    """
    write = SECTIONS[name]
    return write(results) if all(needed in results for needed in _NEEDED.get(name, (name,))) else ""


def rewrite(text: str, results: Results) -> str:
    """Return `text` with what is between the marks of each section written anew.

    Raises:
        ValueError: the sections of `text` are not those that there are, each once.
    """
    names = [found[1] for found in _BLOCK.finditer(text)]
    if sorted(names) != sorted(SECTIONS):
        raise ValueError(f"marked are {sorted(names)}, and should be {sorted(SECTIONS)}")
    return _BLOCK.sub(
        lambda found: f"<!-- measured: {found[1]} -->\n{section(found[1], results)}<!-- end of {found[1]} -->\n", text
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the raw results")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the sections into this file")
    options = parser.parse_args()
    results = read_results(options.results)
    if options.write:
        options.write.write_text(rewrite(options.write.read_text(), results))
        return
    print("\n".join(filter(None, (section(name, results) for name in SECTIONS))))


if __name__ == "__main__":
    main()
