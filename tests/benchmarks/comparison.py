"""What `docs/comparison.md` says in numbers, written from the results.

``python -m tests.benchmarks.comparison --write docs/comparison.md`` puts it between the marks in that file; a test
holds the file to the results that are committed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.markdown import paragraph, table
from tests.benchmarks.rig import GIB
from tests.benchmarks.tables import read_results

__all__ = ["measured", "rewrite"]

_MARKED = re.compile(r"(?<=<!-- measured: comparison -->\n).*?(?=<!-- end of comparison -->\n)", re.DOTALL)
_FOLDER = "../tests/benchmarks/results"
#: Rows of the results to the distributions whose versions the results name.
_PACKAGES = {
    "Run:ai": "runai-model-streamer",
    "Run:ai, 512 MiB": "runai-model-streamer",
    "awscrt": "awscrt",
    "s3torchconnector": "s3torchconnector",
    "obstore": "obstore",
    "boto3": "boto3",
    "aiobotocore read()": "aiobotocore",
    "s5cmd": "s5cmd",
}


def measured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return both tables: one client beside the other, and two ranks of a machine."""
    return f"{_clients(results['peers'], results['peers_tls'])}\n{_ranks(results['sharing'])}"


def rewrite(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return `text` with what is between the marks written anew.

    Raises:
        ValueError: there are no marks, or several.
    """
    written, count = _MARKED.subn(lambda _: measured(results), text)
    if count != 1:
        raise ValueError(f"marked are {count} places, and should be 1")
    return written


def _clients(plain: Mapping[str, Any], tls: Mapping[str, Any]) -> str:
    text = paragraph(
        f"A {plain['checkpoint_bytes'] / GIB:.1f} GiB checkpoint, read into memory over loopback on",
        f"{plain['environment']['processors']} shared cores: CPU and time as multiples of what s3stream took in the",
        f"same round, medians of {len(plain['rounds'])} rounds ([HTTP]({_FOLDER}/peers.json),",
        f"[TLS]({_FOLDER}/peers_tls.json)).",
        "Below 1 is better than s3stream.",
    )
    rows = []
    for row in plain["median_cpu_seconds_per_gib"]:
        ratios = [
            f"{found[kind][row]['median']:.2f}" if row in found[kind] else ""
            for kind in ("cpu_ratio_to_s3stream", "wall_ratio_to_s3stream")
            for found in (plain, tls)
        ]
        version = plain["environment"].get(_PACKAGES.get(row, ""), "")
        rows.append((row, version, *ratios, plain["median_peak_extra_mib"][row]))
    titles = "client | version | CPU, HTTP | CPU, TLS | time, HTTP | time, TLS | extra memory, MiB"
    return f"{text}\n{table(titles, rows)}"


def _ranks(found: Mapping[str, Any]) -> str:
    text = paragraph(
        f"Ranks of one machine that load a {found['checkpoint_bytes'] / GIB:.1f} GiB Llama together, from a simulated",
        f"store ([raw results]({_FOLDER}/sharing.json)), as multiples of `share=auto`, s3stream's default:",
    )
    rows = []
    for name, one in found["settings"].items():
        for row, served in one["median_served_ratio"].items():
            ratios = [f"{one[f'{kind}_ratio_to_share_auto'][row]['median']:.2f}" for kind in ("cpu", "wall")]
            rows.append((name.split()[1], row, *ratios, f"{served:.2f}", one["peak_node_mib"][row]))
    titles = "ranks | load | CPU | time | bytes sent to checkpoint | peak of the node, MiB"
    return f"{text}\n{table(titles, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", required=True, help="put it into this file")
    target: Path = parser.parse_args().write
    target.write_text(rewrite(target.read_text(), read_results()))


if __name__ == "__main__":
    main()
