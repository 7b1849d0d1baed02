"""Files and ranges through fsspec, which finds ``s3stream://`` once the package is installed.

    MODEL_URL=s3stream://bucket/org/model python examples/python/fsspec_files.py

``s3stream+gs://`` is the same for Google Cloud Storage. Options are ``storage_options``, or ``S3STREAM_*`` variables
as everywhere: ``S3STREAM_ENDPOINT_URL=http://127.0.0.1:9000``. Needs ``pip install 's3stream[fsspec]'``.
"""

from __future__ import annotations

import json
import os
import struct

import fsspec


def main() -> None:
    url = os.environ["MODEL_URL"].rstrip("/")

    # A file as any other; what is opened stays that object, even if it is replaced meanwhile.
    with fsspec.open(f"{url}/config.json", "rt") as file:
        print("model_type:", json.load(file)["model_type"])

    # Options are given to the filesystem; all that take `storage_options`, such as pandas, pass them on.
    filesystem, folder = fsspec.url_to_fs(url, request_bytes="4MiB", concurrency=16)
    paths = sorted(path for path in filesystem.find(folder) if path.endswith(".safetensors"))

    # Many ranges at once: of each file the length of its header, then the headers. An error comes in its range's
    # place, unless on_error="raise".
    lengths = filesystem.cat_ranges(paths, 0, 8, on_error="raise")
    ends = [8 + struct.unpack("<Q", length)[0] for length in lengths]
    for path, header in zip(paths, filesystem.cat_ranges(paths, 8, ends, on_error="raise"), strict=True):
        tensors = [name for name in json.loads(header) if name != "__metadata__"]
        print(f"{path}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
