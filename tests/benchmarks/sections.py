"""What the README says of each part of the suite, written from its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.benchmarks.markdown import paragraph, table
from tests.benchmarks.rig import GIB, spread

__all__ = ["SECTIONS", "Results"]

Results = Mapping[str, Mapping[str, Any]]

MIB = 1 << 20
_FOLDER = "tests/benchmarks/results"


def _raw(name: str, command: str, title: str = "raw results") -> str:
    return f"([{title}]({_FOLDER}/{name}.json), `python -m tests.benchmarks.{command}`)"


def _plot(name: str, what: str) -> str:
    return f"![{what}]({_FOLDER}/{name}.svg)\n"


def _store(found: Mapping[str, Any]) -> str:
    first, rate = found["first_byte_seconds"] * 1000, found["bytes_per_second"] / 1e6
    return f"a store that takes {first:.0f} ms to the first byte and sends {rate:.0f} MB/s per connection"


def _runai(found: Mapping[str, Any]) -> str:
    return str(found["environment"].get("runai-model-streamer", "(not measured)"))


def _growth(exponents: Mapping[str, float | None]) -> str:
    fitted = [f"{name} {value:.3f}" for name, value in exponents.items() if value is not None]
    return f"Exponents of the growth: {', '.join(fitted)}; 1 is linear." if fitted else ""


def _spoken(name: str) -> str:
    return name.removesuffix("_cpu_seconds").replace("_", " ")


def end_to_end(results: Results) -> str:
    found = results["end_to_end"]
    bare, sdk = found["cpu_ratio_to_bare_protocol"], found["cpu_ratio_to_aiobotocore_read"]
    cpu, wall = found["median_cpu_seconds_per_gib"], found["median_wall_seconds"]
    text = paragraph(
        f"Measured on {found['environment']['processors']} shared cores over loopback HTTP, a",
        f"{found['checkpoint_bytes'] / GIB:.1f} GiB bf16 Llama into the reference engine's parameters, medians of",
        f"{len(found['rounds'])} rounds in which all rows run side by side {_raw('end_to_end', 'end_to_end')}:",
    )
    rows = [
        (row, f"{cpu[row]:.2f}", f"{bare[row]['median']:.2f}", f"{sdk[row]['median']:.2f}", f"{wall[row]:.2f}")
        for row in cpu
    ]
    note = paragraph(
        "The bare protocol is the least an asyncio client can do: ranged GETs into memory, without a check, a retry or",
        "a model. `rank 1 of 2` is one rank's half, whose row-parallel slices are copied out of whole rows.",
    )
    titles = "client | CPU s/GiB | to bare protocol | to aiobotocore read() | wall s"
    return f"{text}\n{table(titles, rows)}\n{note}"


def peers(results: Results) -> str:
    plain, tls = results["peers"], results["peers_tls"]
    text = paragraph(
        f"Other clients, reading a {plain['checkpoint_bytes'] / GIB:.1f} GiB checkpoint into memory, over HTTP and",
        f"over TLS, medians of {len(plain['rounds'])} rounds ([raw results]({_FOLDER}/peers.json),",
        f"[TLS]({_FOLDER}/peers_tls.json), `python -m tests.benchmarks.peers`, with the extra `bench`):",
    )
    rows = []
    for row, cpu in plain["median_cpu_seconds_per_gib"].items():
        over = ["", ""]
        if row in tls["median_cpu_seconds_per_gib"]:
            over = [f"{tls['median_cpu_seconds_per_gib'][row]:.2f}", spread(tls["cpu_ratio_to_s3stream"][row])]
        ratio = spread(plain["cpu_ratio_to_s3stream"][row])
        rows.append((row, f"{cpu:.2f}", ratio, *over, plain["median_peak_extra_mib"][row]))
    titles = "client | CPU s/GiB | to s3stream (min-max) | over TLS | to s3stream (min-max) | extra memory, MiB"
    return f"{text}\n{table(titles, rows)}"


def sharing(results: Results) -> str:
    found = results["sharing"]
    (store,) = found["stores"].values()  # the README has room for one
    sizes = [name.partition(", ")[2].removesuffix(" ranks") for name in found["settings"]]
    rounds = {len(one["rounds"]) for one in found["settings"].values()}
    text = paragraph(
        f"{_listing(sizes)} ranks of one machine loading a {found['checkpoint_bytes'] / GIB:.1f} GiB Llama together,",
        f"from {_store(store)}, with {found['buffer_bytes'] // MIB} MiB of buffers; beside them Run:ai Model Streamer",
        f"{_runai(found)}, by default and limited to as much memory; medians of",
        f"{_listing(map(str, sorted(rounds)))} rounds {_raw('sharing', 'sharing')}:",
    )
    rows = []
    for name, one in zip(sizes, found["settings"].values(), strict=True):
        for row, wall in one["median_wall_seconds"].items():
            rows.append(
                (
                    name,
                    row,
                    f"{wall:.2f}",
                    f"{one['wall_ratio_to_share_auto'][row]['median']:.2f}",
                    f"{one['median_cpu_seconds'][row]:.2f}",
                    f"{one['median_served_ratio'][row]:.3f}",
                    f"{one['median_requests'][row]:.0f}",
                    one["peak_node_mib"][row],
                )
            )
    titles = (
        "ranks | load | wall s | to share=auto | CPU s | bytes sent to checkpoint | requests | peak of the node, MiB"
    )
    note = paragraph("The peak is what the node's processes have above the parameters, shared memory counted once.")
    plot = f"\n{_plot('sharing', 'bytes sent and wall time, by ranks')}" if len(sizes) > 1 else ""
    return f"{text}\n{table(titles, rows)}\n{note}{plot}"


def engine(results: Results) -> str:
    found = results["engine"]
    cpu = found["median_cpu_seconds"]
    text = paragraph(
        f"The real engine: {found['environment']['vllm']} on one core loading a Llama of",
        f"{found['checkpoint_bytes'] / 1e6:.0f} MB, from {_store(found['store'])}, with this plugin, with its",
        f"`runai_streamer` {_runai(found)}, and with its default loader from disk, where all of the file is in the",
        f"page cache; medians of {len(found['rounds'])} rounds {_raw('engine', 'engine')}:",
    )
    rows = [
        (
            row,
            f"{wall:.2f}",
            spread(found["wall_ratio_to_s3stream"][row]),
            f"{found['median_logged_seconds'][row]:.2f}" if row in found["median_logged_seconds"] else "",
            f"{cpu[row]:.2f}",
            spread(found["cpu_ratio_to_s3stream"][row]),
            found["median_peak_extra_mib"][row],
            f"{found['median_served_ratio'][row]:.3f}",
        )
        for row, wall in found["median_wall_seconds"].items()
    ]
    titles = (
        "load | wall s | to s3stream (min-max) | vLLM's own log, s | CPU s | to s3stream (min-max) | "
        "peak above the parameters, MiB | bytes sent to checkpoint"
    )
    return f"{text}\n{table(titles, rows)}\n{_plot('engine', 'time and memory of the load in vLLM')}"


def trace_cost(results: Results) -> str:
    found = results["trace_cost"]
    text = paragraph(
        "What tracing adds to vLLM's own `load_weights` for DeepSeek-V3 at TP=8, rank 3, by number of tensors, on",
        "parameters without memory: as `plan` runs it, and as a load does, whose plain code is faster",
        f"{_raw('trace_cost', 'trace_cost')[:-1]} beside vLLM). `idle adds` is what a mode of torch's dispatcher adds",
        "that hears of every operation and does nothing, which was not run at every size.",
        _growth({name: found["growth_exponents"].get(name) for name in ("plan: traced", "load: traced")}),
    )
    rows = []
    for size in found["sizes"]:
        each, more = size["median_microseconds_per_tensor"], size["added_to_plain"]
        columns: list[object] = [size["tensors"], size["files"]]
        for setting in ("plan", "load"):
            idle = more.get(f"{setting}: plain in an idle dispatch mode")
            columns += [each[f"{setting}: plain"], f"{more[f'{setting}: traced']['median']:.2f}"]
            columns.append(f"{idle['median']:.2f}" if idle else "")
        rows.append([*columns, f"{size['headers_trace_and_plan_cpu_seconds']['median']:.2f}"])
    titles = (
        "tensors | files | plan, us each | traced adds | idle adds | load, us each | traced adds | idle adds | "
        "headers, trace and plan, CPU s"
    )
    return f"{text}\n{table(titles, rows)}"


def plan_cache(results: Results) -> str:
    found = results["plan_cache"]
    largest = found["sizes"][-1]
    whole, rest = (largest[f"{name}_ratio_to_traced"] for name in ("cpu_seconds", "trace_cpu_seconds"))
    (used, used_rest), (kept, kept_rest) = (
        (f"{whole[row]['median']:.2f}", f"{rest[row]['median']:.2f}") for row in ("used", "traced and kept")
    )
    text = paragraph(
        "A restart with `plan_cache` runs none of the engine's loading code. At",
        f"{largest['tensors']} tensors, it takes {used} times the CPU of a traced load, {used_rest} times without",
        f"headers and fetching, and the first load, which keeps the plan, {kept} and {kept_rest} times.",
        "Measured is vLLM loading DeepSeek-V3's names, layers and experts at TP=8, rank 3, from local files, each time",
        "in a process of its own; tensors are small, and what longer ones add in fetching is not saved. Medians of",
        f"{len(found['raw'][0]['rounds'])} rounds, ratios within a round",
        f"{_raw('plan_cache', 'plan_cache')[:-1]} beside vLLM).",
        _growth(found["growth_exponents"]),
    )
    rows = []
    for size in found["sizes"]:
        for row, cpu in size["median_cpu_seconds"].items():
            columns = [size["tensors"], row, f"{cpu:.2f}", _spread(size["cpu_seconds_ratio_to_traced"].get(row))]
            beside = size["median_trace_cpu_seconds"].get(row)
            columns += ["" if beside is None else f"{beside:.2f}"]
            columns += [_spread(size["trace_cpu_seconds_ratio_to_traced"].get(row))]
            rows.append([*columns, f"{size['kept_bytes'] / 1e6:.2f}" if row == "traced and kept" else ""])
    titles = (
        "tensors | load | CPU s | to traced (min-max) | without headers and fetching, CPU s | to traced (min-max) | "
        "plan, MB"
    )
    return f"{text}\n{table(titles, rows)}"


def _spread(found: Mapping[str, float] | None) -> str:
    return "" if found is None else spread(found)


def scale(results: Results) -> str:
    found = results["scale"]
    tensors, rows_of = found["by_tensors"], found["by_bytes"]["rows"]
    text = paragraph(
        "How it grows with the number of tensors, with the reference engine's code, at TP=2, headers from the object",
        f"server; medians of {len(tensors['rounds'])} rounds {_raw('scale', 'scale')}.",
        _growth({_spoken(name): value for name, value in tensors["growth_exponents"].items()}),
    )
    by_tensors = table(
        "tensors | files | headers, CPU s | trace and plan, CPU s | peak memory, MiB",
        [
            (
                size["tensors"],
                size["files"],
                f"{size['headers_cpu_seconds']:.2f}",
                f"{size['trace_and_plan_cpu_seconds']:.2f}",
                f"{size['peak_extra_mib']:.0f}",
            )
            for size in tensors["sizes"]
        ],
    )
    second = paragraph(
        f"And with bytes, into memory that was touched before, with {found['buffer_bytes'] // MIB} MiB of buffers.",
        "What every load costs, a listing and a connection, keeps the exponents below 1 where little is read:",
    )
    rows: list[list[object]] = []
    for row, one in rows_of.items():
        for size in one["sizes"]:
            seconds = [f"{size[name]:.2f}" for name in ("cpu_seconds", "wall_seconds")]
            peak = f"{size['peak_extra_mib']:.0f}"
            rows.append([row, f"{size['fetched_bytes'] / MIB:.0f}", *seconds, f"{size['requests']:.0f}", peak])
        if grown := one["growth_exponents"]:
            exponents = [f"{grown[name]:.2f}" for name in ("cpu_seconds", "wall_seconds", "requests")]
            rows.append([f"{row}, exponent", "", *exponents, ""])
    by_bytes = table("load | MiB fetched | CPU s | wall s | requests | peak above the parameters, MiB", rows)
    plot = _plot("scale", "CPU seconds by number of tensors, and seconds by bytes")
    return f"{text}\n{by_tensors}\n{second}\n{by_bytes}\n{plot}"


def predict(results: Results) -> str:
    found = results["predict"]
    text = paragraph(
        "What `s3stream plan` predicts of a simulated store, and what a load from it then took, median of",
        f"{len(found['points'][0]['rounds']['load_seconds'])} {_raw('predict', 'predict')}. Predicted are the reads of",
        "weights; the load also lists, reads headers and traces. A store that is faster than this machine is not what",
        "the model knows of.",
    )
    rows = [
        (
            row["ranks"],
            f"{row['checkpoint_bytes'] / 1e6:.0f}",
            f"{row['first_byte_ms']:g}",
            f"{row['connection_mbps']:g}",
            f"{row['link_gbps']:g}" if row["link_gbps"] else "",
            row["concurrency"],
            f"{row['predicted_seconds']:.2f}",
            f"{row['measured_load_seconds']:.2f}",
            f"{row['relative_error_to_load_seconds']:+.0%}",
            f"{row['relative_error_to_read_seconds']:+.0%}" if "relative_error_to_read_seconds" in row else "",
        )
        for row in found["points"]
    ]
    titles = (
        "ranks | MB | first byte, ms | MB/s per connection | link, Gbit/s | at once | predicted s | load, s | error | "
        "error to its reads"
    )
    return f"{text}\n{table(titles, rows)}\n{_plot('predict', 'predicted and measured seconds')}"


def memory(results: Results) -> str:
    found = results["memory"]
    parts = []
    for what, one in (("", found), (", two ranks of one machine together", found.get("ranks"))):
        if one is None:
            continue
        link = ", which both ranks need a part of in every row" if what else f" {_raw('memory', 'memory')}"
        cap, largest, limit = (one[f"{name}_bytes"] / MIB for name in ("cap", "largest_tensor", "limit"))
        text = paragraph(
            f"Peak memory above the parameters{what}, with a buffer cap of {cap:.0f} MiB and a largest tensor of",
            f"{largest:.0f} MiB{link}; the cap and 200 MB are {limit:.0f} MiB:",
        )
        rows = [(row, f"{measured['peak_extra_bytes'] / MIB:.0f}") for row, measured in one["rows"].items()]
        parts.append(f"{text}\n{table('load | peak, MiB', rows)}")
    parts[0] += "\n" + paragraph(
        "Two rows are not bounded by that cap: `cast, larger than the model` has a larger one, of which it takes what",
        "the load needs, and `eager` gives the engine's code whole tensors.",
    )
    return "\n".join(parts)


def throughput(results: Results) -> str:
    found = results["throughput"]["pairs"]
    more, tracing = found["more requests"], found["while tracing"]
    asked, traced = (pair["median_wall_seconds"] for pair in (more, tracing))
    return paragraph(
        "Requests in flight are doubled while that brings more:",
        f"{more['checkpoint_bytes'] / 1e9:.1f} GB from a store that sends 20 MB/s per connection take",
        f"{asked['with']:.1f} s, beginning with 16 requests, and {asked['without']:.1f} s with 16 throughout",
        f"(ratio {spread(more['wall_ratio'])}). What was traced is fetched while the trace goes on: 30,000 small",
        f"tensors behind a link of 2 Gbit/s take {traced['with']:.1f} s, and {traced['without']:.1f} s one after the",
        f"other (ratio {spread(tracing['wall_ratio'])}); medians of {len(more['rounds'])} rounds",
        f"{_raw('throughput', 'throughput')}.",
    )


def faults(results: Results) -> str:
    found = results["faults"]
    wall = found["median_wall_seconds"]
    return paragraph(
        f"A load of {found['checkpoint_bytes'] / 1e6:.0f} MB from a store that breaks a tenth of its answers at random",
        f"is exact and takes {found['wall_ratio']['median']:.1f} times as long as from one in good health",
        f"({wall['with faults']:.2f} s beside {wall['in good health']:.2f} s, [raw results]({_FOLDER}/faults.json)):",
        "it waits for its unluckiest request.",
    )


SECTIONS: dict[str, Callable[[Results], str]] = {
    function.__name__: function
    for function in (
        end_to_end,
        peers,
        sharing,
        engine,
        trace_cost,
        plan_cache,
        scale,
        throughput,
        predict,
        memory,
        faults,
    )
}


def _listing(items: Iterable[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last
