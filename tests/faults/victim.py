"""Pulls the metadata of a model and loads its weights, to be killed on the way: ``ENDPOINT CACHE``."""

from __future__ import annotations

import sys

from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from tests.faults.loading import OPTIONS, load_once


def main(endpoint: str, cache: str) -> None:
    options = {**OPTIONS, "endpoint_url": endpoint, "cache_dir": cache, "retry_attempts": 8}
    print("ready", flush=True)
    folder = pull("s3://bucket/m", StreamConfig.resolve(options)).folder
    outcome = load_once(endpoint, "trace", options)
    assert outcome.is_exact, outcome
    print(folder, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
