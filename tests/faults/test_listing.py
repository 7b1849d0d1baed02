"""A listing that never ends: by the time it takes, or by the pages it has."""

from __future__ import annotations

from tests.faults.loading import load_once, new_server
from tests.servers.object_server import Fault, Request, Response


def test_a_listing_that_trickles_has_the_deadline() -> None:
    def trickle(request: Request, response: Response) -> None:
        response.bytes_per_second = 100.0  # fifteen seconds, and never a pause as long as the idle timeout

    with new_server() as server:
        server.faults = [Fault(trickle, times=None, method="LIST")]
        outcome = load_once(server.url, "trace", {"retry_deadline_seconds": 1.0})
    assert outcome.ended == "SourceUnavailableError"
    assert "not complete within 1 s" in outcome.text
    assert 1.0 <= outcome.seconds < 3.0


def test_a_listing_that_repeats_itself_is_refused() -> None:
    def first_page(request: Request, response: Response) -> Response:
        request.query.pop("continuation-token", None)
        return server.route(request)

    with new_server() as server:
        server.page_size = 1
        server.faults = [Fault(first_page, times=None, method="LIST")]
        outcome = load_once(server.url, "trace")
        assert outcome.ended == "BadResponseError", outcome
        assert "no end" in outcome.text
        assert server.counters.requests["LIST"] == 2
