"""The Grafana dashboard asks for what loads write, by its right names and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from streamer.metrics import METRICS

PATH = Path(__file__).parent.parent.parent / "examples" / "grafana" / "s3stream.json"
LABELS = {metric.name: {"url", "rank", *metric.labels} for metric in METRICS}
#: Values that these labels have; see `streamer.metrics`.
KINDS = {"checkpoint", "needed", "fetched", "over_read", "header", "resumed", "node_fetched"}


def queries() -> list[tuple[str, str]]:
    """Return every query with what its legend refers to."""
    dashboard: dict[str, Any] = json.loads(PATH.read_text())
    found = [(target["expr"], target["legendFormat"]) for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return found + [(query, "") for query in variables]


def test_queries_name_metrics_and_labels_that_there_are() -> None:
    used = set()
    for query, legend in queries():
        names = re.findall(r"\bs3stream_\w+", query)
        assert names, query
        used |= set(names)
        for name, selector in re.findall(r"\b(s3stream_\w+)\{([^}]*)\}", query):
            wanted = set(re.findall(r"(\w+)\s*=", selector))
            assert wanted <= LABELS[name], (query, wanted - LABELS[name])
        for value in re.findall(r'kind=~?"([^"]*)"', query):
            assert set(value.split("|")) <= KINDS, value
        grouped = re.findall(r"by \((\w+)\)", query) + re.findall(r"\{\{(\w+)\}\}", legend)
        assert all(label in LABELS[names[0]] for label in grouped), query
    assert used == set(LABELS), "each metric is on the dashboard, and no other"


def test_panels_do_not_overlap_and_have_a_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(PATH.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"]
