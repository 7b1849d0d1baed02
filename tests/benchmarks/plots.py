"""Plots of the results, as SVG files beside them.

``python -m tests.benchmarks.plots`` draws those of which there are results. The same results give the same files. They
keep their text as text, which makes them small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.benchmarks.rig import GIB, RESULTS
from tests.benchmarks.tables import read_results

__all__ = ["PLOTS", "draw"]

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "s3stream",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def _axes(count: int) -> tuple[Any, Any]:
    figure = Figure(figsize=(4.2 * count, 3.2), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def sharing(found: Mapping[str, Any]) -> Any:
    """Bytes that the store sends, wall time and memory, by number of ranks."""
    settings = {int(name.split(", ")[1].split()[0]): one for name, one in found["settings"].items()}
    figure, axes = _axes(3)
    fields = {
        "median_served_ratio": "bytes sent / checkpoint",
        "median_wall_seconds": "seconds",
        "peak_node_mib": "memory above the parameters, MiB",
    }
    for axis, (field, title) in zip(axes, fields.items(), strict=True):
        for row in dict.fromkeys(row for one in settings.values() for row in one[field]):
            points = [(size, one[field][row]) for size, one in settings.items() if row in one[field]]
            axis.plot(*zip(*points, strict=True), marker="o", label=row)
        axis.set(xlabel="ranks", ylabel=title, xticks=list(settings), ylim=(0, None))
    axes[0].legend()
    return figure


def scale(found: Mapping[str, Any]) -> Any:
    """CPU seconds by tensors, and seconds by bytes, on logarithmic scales."""
    figure, axes = _axes(2)
    tensors = found["by_tensors"]["sizes"]
    for name, label in (("headers_cpu_seconds", "headers"), ("trace_and_plan_cpu_seconds", "trace and plan")):
        axes[0].loglog([size["tensors"] for size in tensors], [size[name] for size in tensors], marker="o", label=label)
    axes[0].set(xlabel="tensors", ylabel="CPU seconds")
    for row, one in found["by_bytes"]["rows"].items():
        gib = [size["fetched_bytes"] / GIB for size in one["sizes"]]
        for name, label in (("cpu_seconds", "CPU"), ("wall_seconds", "wall")):
            axes[1].loglog(gib, [size[name] for size in one["sizes"]], marker="o", label=f"{row}, {label}")
    axes[1].set(xlabel="GiB fetched", ylabel="seconds")
    for axis in axes:
        axis.legend()
    return figure


def predict(found: Mapping[str, Any]) -> Any:
    """Measured seconds over predicted ones; on the line they are equal."""
    figure, (axis,) = _axes(1)
    predicted = [point["predicted_seconds"] for point in found["points"]]
    most = 1.1 * max(*predicted, *(point["measured_load_seconds"] for point in found["points"]))
    axis.plot([0, most], [0, most], color="grey", linewidth=1)
    axis.plot(predicted, [point["measured_load_seconds"] for point in found["points"]], "o", label="whole load")
    reads = [point for point in found["points"] if "measured_read_seconds" in point]
    seconds = [point["measured_read_seconds"] for point in reads]
    axis.plot([point["predicted_seconds"] for point in reads], seconds, "x", label="its reads")
    axis.set(xlabel="predicted seconds", ylabel="measured seconds", xlim=(0, most), ylim=(0, most))
    axis.legend()
    return figure


def peers(found: Mapping[str, Any]) -> Any:
    """CPU seconds per GiB of each client."""
    return _bars(found["median_cpu_seconds_per_gib"], "client CPU seconds per GiB")


def engine(found: Mapping[str, Any]) -> Any:
    """Seconds of vLLM's load, and memory."""
    figure, axes = _axes(2)
    _bar(axes[0], found["median_wall_seconds"], "seconds to load")
    _bar(axes[1], found["median_peak_extra_mib"], "memory above the parameters, MiB")
    return figure


def _bars(values: Mapping[str, float], title: str) -> Any:
    figure, (axis,) = _axes(1)
    _bar(axis, values, title)
    return figure


def _bar(axis: Any, values: Mapping[str, float], title: str) -> None:
    axis.barh(list(values)[::-1], list(values.values())[::-1])
    axis.set(xlabel=title)


PLOTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    function.__name__: function for function in (sharing, scale, predict, peers, engine)
}


def draw(folder: Path) -> list[Path]:
    """Draw what there are results of in `folder`; return the files."""
    results, drawn = read_results(folder), []
    with mpl.rc_context(_STYLE):
        for name, plot in PLOTS.items():
            if name in results:
                path = folder / f"{name}.svg"
                plot(results[name]).savefig(path, metadata={"Date": None})
                drawn.append(path)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the raw results")
    for path in draw(parser.parse_args().results):
        print(path)


if __name__ == "__main__":
    main()
