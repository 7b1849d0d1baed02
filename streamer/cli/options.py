"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "Anonymous",
    "Endpoint",
    "EngineName",
    "Experts",
    "IgnoreIndex",
    "Json",
    "Options",
    "PipelineParallel",
    "Profile",
    "Quiet",
    "Rank",
    "Region",
    "TensorParallel",
    "Url",
]

Url = Annotated[str, typer.Argument(help="s3://bucket/folder, gs://bucket/folder, a path, or any URL of fsspec")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr; errors still go there.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Any option of StreamConfig, such as buffer_bytes=4GiB, for which S3STREAM_BUFFER_BYTES is the variable; "
        "may be repeated.",
    ),
]
Endpoint = Annotated[str | None, typer.Option(help="URL of the store's API, for others than AWS and Google.")]
Region = Annotated[str | None, typer.Option(help="Region of the bucket; if not given, found as the AWS CLI finds it.")]
Profile = Annotated[
    str | None, typer.Option(help="Profile of the shared AWS configuration, for credentials and endpoint.")
]
Anonymous = Annotated[
    bool, typer.Option("--anonymous", help="Sign nothing and look for no credentials, for public buckets.")
]
IgnoreIndex = Annotated[
    bool, typer.Option("--ignore-index", help="Go by the files' headers alone, without the index beside them.")
]
TensorParallel = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size: ranks that split each layer.")]
PipelineParallel = Annotated[
    int, typer.Option("--pp", min=1, help="Pipeline-parallel size: stages that the layers are dealt to.")
]
Experts = Annotated[bool, typer.Option("--ep", help="Spread whole experts over the ranks, instead of splitting each.")]
Rank = Annotated[int | None, typer.Option(min=0, help="Show this rank only, counted from 0.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Whose loading code to trace: reference (Llama, Mistral, Qwen2), or vllm where that is installed.",
    ),
]
