"""Where checkpoints are stored: S3, GCS, local files, memory. Open one by URL with `open_source`."""

from streamer.sources.base import ObjectInfo, Source
from streamer.sources.open import open_source, split_file

__all__ = ["ObjectInfo", "Source", "open_source", "split_file"]
