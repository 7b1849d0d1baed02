"""Arguments and options; each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from streamer import __version__
from streamer.cli.exit_codes import FAILED, exit_code
from streamer.cli.help_text import epilog, exit_codes
from streamer.cli.options import (
    Anonymous,
    Endpoint,
    EngineName,
    Experts,
    IgnoreIndex,
    Json,
    Options,
    PipelineParallel,
    Profile,
    Quiet,
    Rank,
    Region,
    TensorParallel,
    Url,
)
from streamer.cli.output import Output
from streamer.config import StreamConfig
from streamer.errors import ConfigError, StreamError
from streamer.option_values import parse_byte_count

__all__ = ["app"]

app = typer.Typer(
    help="Load LLM weights straight from object storage, each rank only the bytes it needs.",
    epilog=exit_codes(),
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"s3stream {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Load LLM weights straight from object storage, each rank only the bytes it needs."""


@contextlib.contextmanager
def _reporting(as_json: bool, quiet: bool) -> Iterator[Output]:
    """Turn our errors into one message on stderr and an exit code."""
    output = Output(as_json=as_json, quiet=quiet)
    try:
        yield output
    except StreamError as error:
        output.stderr.print(f"s3stream: {error}", markup=False)
        raise typer.Exit(exit_code(error)) from error


def _config(
    options: list[str] | None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    ignore_index: bool = False,
) -> StreamConfig:
    values: dict[str, Any] = {}
    for option in options or ():
        key, separator, value = option.partition("=")
        if not separator:
            raise ConfigError(f"--option {option!r} has no value", hint="write --option key=value")
        values[key.strip().replace("-", "_")] = value
    named = {"endpoint_url": endpoint_url, "region": region, "profile": profile}
    values.update((key, value) for key, value in named.items() if value)
    if anonymous:
        values["anonymous"] = True
    if ignore_index:
        values["index"] = "ignore"
    return StreamConfig.resolve(values)


@app.command(epilog=epilog("demo"))
def demo(tp: TensorParallel = 2, json: Json = False, quiet: Quiet = False) -> None:
    """Show the main job: load a sharded checkpoint from an S3 store into a tensor-parallel model.

    Starts a store in this process, uploads a small Llama, loads it in TP processes, each fetching only
    its own bytes, and compares the logits with the unsharded model.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.demo import run_demo

        if not run_demo(tp, output):
            raise typer.Exit(1)


@app.command(epilog=epilog("inspect"))
def inspect(
    url: Url,
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    ignore_index: IgnoreIndex = False,
) -> None:
    """Show what a checkpoint holds, and what would be skipped and why. Reads headers only.

    Index and headers are compared in both directions; a shard that is missing or damaged is an error that names it.
    Needs no torch.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.inspect import run_inspect

        run_inspect(url, _config(option, endpoint_url, region, profile, anonymous, ignore_index), output)


@app.command(epilog=epilog("fetch"))
def fetch(
    pairs: Annotated[
        list[str],
        typer.Argument(metavar="SRC DEST [SRC DEST ...]", help="A URL and the folder for it, as often as you like."),
    ],
    mode: Annotated[
        str | None,
        typer.Option(
            help="metadata (all but weights, the default), weights (those that a load would take, and their index), "
            "or all."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Say whether the folders are complete, without the network, for probes. SRC may be left out.",
        ),
    ] = False,
    max_bytes: Annotated[str | None, typer.Option(help="Fail if there is more to hold, such as 20GiB.")] = None,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Of the weights, only what this rank needs; may be repeated.")
    ] = None,
    engine: EngineName = "reference",
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    ep: Experts = False,
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    ignore_index: IgnoreIndex = False,
) -> None:
    """Fill folders with checkpoints, or with what an engine needs beside the weights: an init container.

    May be killed at any time; started again, it goes on where it was. The folder says which versions of the weights
    belong to it, and engines stream these. With --rank, only s3stream reads the weights, and loads these ranks alone.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.fetch import parse_layout, parse_mode, run_check, run_fetch

        wanted = parse_mode(mode)
        layout = parse_layout(rank or (), engine, tp, pp, ep, wanted)
        if check:
            if not run_check(pairs, output, mode=wanted, layout=layout):
                raise typer.Exit(FAILED)
            return
        config = _config(option, endpoint_url, region, profile, anonymous, ignore_index)
        limit = None if max_bytes is None else parse_byte_count(max_bytes)
        run_fetch(pairs, config, output, mode=wanted, layout=layout, max_bytes=limit)


@app.command(epilog=epilog("verify"))
def verify(
    url: Url,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="A copy on this machine, to compare with the checkpoint.", show_default=False
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Make the manifest anew and write it beside the weights.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Make the manifest anew and write it to this file.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    ignore_index: IgnoreIndex = False,
) -> None:
    """Read a whole checkpoint and hold every tensor against its manifest, or make the manifest; or compare a copy.

    Files for which S3 keeps a checksum are held against that as well. Loads with integrity=manifest then check the
    digests of what they fetch. With DIR, that folder is compared with the checkpoint: by its manifest, or by reading
    both. A difference ends in exit code 1 and names the tensors. Needs no torch.
    """
    with _reporting(json, quiet) as printed:
        from streamer.cli.verify import run_verify, run_verify_copy

        config = _config(option, endpoint_url, region, profile, anonymous, ignore_index)
        if folder is not None:
            if write or output is not None:
                raise ConfigError("a folder to compare and --write or --output contradict each other; give one")
            if not run_verify_copy(url, folder, config, printed):
                raise typer.Exit(FAILED)
            return
        if not run_verify(url, config, printed, write=write, target=output):
            raise typer.Exit(FAILED)


@app.command(epilog=epilog("doctor"))
def doctor(
    url: Url,
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Say what stands between this machine and a checkpoint: settings, network, identity, access; and what to do.

    Goes the way of a load, one step at a time, and prints no secret. The exit code is that of the first failure.
    Needs no torch.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.doctor import run_doctor

        code = run_doctor(url, _config(option, endpoint_url, region, profile, anonymous), output)
        if code:
            raise typer.Exit(code)


@app.command(epilog=epilog("bench"))
def bench(
    url: Url,
    concurrency: Annotated[str, typer.Option(help="Requests in flight to try, as numbers with commas.")] = "8,32,64",
    sizes: Annotated[str, typer.Option(help="Sizes of a request to try, with commas.")] = "1MiB,8MiB",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each pair of the two.")] = 3.0,
    max_bytes: Annotated[str, typer.Option(help="Read no more than this in all, whatever the rest says.")] = "20GiB",
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    ignore_index: IgnoreIndex = False,
) -> None:
    """Measure this store from this machine, with ranges of a checkpoint's weights, and say which options suit it.

    What is read costs requests and traffic as a load's reads do, and is not kept. Needs no torch.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.bench import run_bench
        from streamer.cli.measure import Grid

        config = _config(option, endpoint_url, region, profile, anonymous, ignore_index)
        run_bench(url, config, Grid.parse(concurrency, sizes, seconds, max_bytes), output)


@app.command(epilog=epilog("plan"))
def plan(
    url: Url,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    ep: Experts = False,
    rank: Rank = None,
    engine: EngineName = "reference",
    first_byte_ms: Annotated[float, typer.Option(help="Milliseconds to the first byte of an answer.")] = 30.0,
    connection_mbps: Annotated[float, typer.Option(help="Megabytes per second of one connection.")] = 90.0,
    link_gbps: Annotated[float | None, typer.Option(help="Gigabits per second of a node's link.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    ignore_index: IgnoreIndex = False,
) -> None:
    """Show what each rank would fetch, from headers alone, without a GPU or memory for the weights.

    Times are predicted for a store like S3, or for one as `s3stream bench` found it; also for 8, 64 and 512 nodes
    that start together.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.plan import Question, run_plan
        from streamer.engines import ParallelLayout
        from streamer.plan.timing import StoreModel

        config = _config(option, endpoint_url, region, profile, anonymous, ignore_index)
        link = None if link_gbps is None else link_gbps * 1e9 / 8
        store = StoreModel(first_byte_ms / 1e3, connection_mbps * 1e6, link)
        run_plan(Question(url, engine, ParallelLayout(tp, pp, ep), rank), config, output, store)


@app.command(epilog=epilog("explain"))
def explain(
    url: Url,
    name: Annotated[str, typer.Argument(help="A tensor of the checkpoint.")],
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    ep: Experts = False,
    rank: Rank = None,
    engine: EngineName = "reference",
    json: Json = False,
    quiet: Quiet = False,
    option: Options = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    ignore_index: IgnoreIndex = False,
) -> None:
    """Show where one tensor's bytes go: which of its rows, into which rows of which parameter, per rank.

    The engine's own loading code says so, on parameters without memory.
    """
    with _reporting(json, quiet) as output:
        from streamer.cli.plan import Question, run_explain
        from streamer.engines import ParallelLayout

        config = _config(option, endpoint_url, region, profile, anonymous, ignore_index)
        run_explain(Question(url, engine, ParallelLayout(tp, pp, ep), rank), name, config, output)
