"""Installs the stubs in each process that has this folder on PYTHONPATH; see `stubs`."""

import os

import stubs  # type: ignore[import-not-found]  # found beside this file

stubs.install(os.environ.get("SGLANG_STUBS", "").split(","))
