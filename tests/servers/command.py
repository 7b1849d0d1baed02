"""What a server in a process of its own says to whoever started it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.servers.object_server import ObjectServer


def answer(server: ObjectServer) -> None:
    """Print the server's URL, then for every line of standard input what it has counted; close it at the end."""
    print(server.url, flush=True)
    for _ in sys.stdin:  # until whoever started us goes away
        counters = server.counters
        limit = time.monotonic() + 5
        while counters.answering and time.monotonic() < limit:
            time.sleep(0.001)  # a client may have the last byte before we have counted it
        counted = {
            "requests": sum(counters.requests.values()),
            "connections": counters.connections,
            "served_bytes": counters.body_bytes,
        }
        print(json.dumps(counted), flush=True)
    server.close()
