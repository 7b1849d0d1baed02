"""The faults we know, by name: how a store breaks, and what a load must then end in.

A fault is installed on an `ObjectServer` at a `Where`: the listing, or the reads of one range of one
object. Wherever a header lies, the body is scrambled too, so that a client that believes it loads wrong bytes.

Alone, ``python -m tests.servers.faults ROOT --rate 0.1 --seed 1`` is the object server with survivable faults
in that part of its answers.
"""

from __future__ import annotations

import argparse
import functools
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamer.errors import (
    AccessDeniedError,
    BadResponseError,
    CredentialsError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    SourceUnavailableError,
    StreamError,
)
from tests.servers.command import answer
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response

__all__ = ["BY_NAME", "CATALOGUE", "Mixture", "NamedFault", "Where"]

Change = Callable[[Request, Response], Response | None]
Make = Callable[[ObjectServer, "Where"], Change]
Kinds = tuple[type[StreamError], ...]

#: Bytes per second of a trickle; whoever loads must ask for a higher rate than this.
TRICKLE = 2_000.0
_SCRAMBLE = bytes(255 - value for value in range(256))


@dataclass(frozen=True)
class Where:
    """Which requests a fault hits.

    Args:
        kind: LIST or GET.
        key: of the object; "" for any.
        end: where the range that the request reads ends, half open; None for any request.
        part: how far into the body faults of bodies strike: 0 before its first byte, 1 before its last.
        untrusted: a context with a certificate that the client does not trust.
    """

    kind: str = "GET"
    key: str = ""
    end: int | None = None
    part: float = 0.5
    untrusted: ssl.SSLContext | None = None


@dataclass(frozen=True)
class NamedFault:
    """One way to break.

    Args:
        make: builds the change of responses, for a server and a place.
        ends_in: the error classes that are right; empty: the load must be exact.
        in_sdk: the same for a body that the SDK receives; None: as `ends_in`.
        sdk_may_survive: whether the SDK survives depends on which bytes it sees first.
        in_listing: the same for a fault of the listing; None: it cannot happen there.
        times: how often it strikes; None for ever.
        retries: what a load that survives it must at least report.
        in_body: it strikes within a body, so `Where.part` matters.
        seconds: how long it takes beyond what the timeouts of the client explain.
        options: what the client must be configured with to survive it.
    """

    name: str
    make: Make
    ends_in: Kinds = ()
    in_listing: Kinds | None = None
    times: int | None = 1
    retries: int = 1
    in_body: bool = False
    seconds: float = 0.0
    options: dict[str, object] = field(default_factory=dict)
    in_sdk: Kinds | None = None
    sdk_may_survive: bool = False

    @property
    def is_survivable(self) -> bool:
        return not self.ends_in

    def install(self, server: ObjectServer, where: Where) -> None:
        change = self.make(server, where)
        server.faults.append(Fault(change, key=where.key, times=self.times, method=where.kind, end=where.end))


# -- changes -----------------------------------------------------------------------------------------------


def _refusal(status: int, code: str, **headers: str) -> Make:
    return lambda server, where: lambda request, response: error_response(status, code, "because", **headers)


def _setting(**values: object) -> Make:
    def change(request: Request, response: Response) -> None:
        for name, value in values.items():
            setattr(response, name, value)

    return lambda server, where: change


def _in_body(name: str) -> Make:
    """Strike after so many bytes of the body: none, half of them, all but one."""

    def make(server: ObjectServer, where: Where) -> Change:
        def change(request: Request, response: Response) -> None:
            setattr(response, name, int((response.count - 1) * where.part))

        return change

    return make


def _after_body(name: str) -> Make:
    def change(request: Request, response: Response) -> None:
        setattr(response, name, response.count)

    return lambda server, where: change


def _content(response: Response) -> bytes:
    body = response.body if isinstance(response.body, bytes) else response.body.read_bytes()
    return body[response.start : response.start + response.count]


def _replace_body(response: Response, body: bytes) -> None:
    response.body, response.start, response.count = body, 0, len(body)


def _lying(**headers: str | None) -> Make:
    """Change headers by templates of ``{start} {last} {total} {count}`` (None: leave out), and scramble the body."""

    def change(request: Request, response: Response) -> None:
        numbers = _numbers(response)
        for name, template in headers.items():
            field_name = name.replace("_", "-")
            response.headers.pop(field_name, None)
            if template is not None:
                response.headers[field_name] = template.format(**numbers)
        _replace_body(response, _content(response).translate(_SCRAMBLE))

    return lambda server, where: change


def _header(name: str, value: str | None) -> Make:
    """Change one header of a right answer."""

    def change(request: Request, response: Response) -> None:
        response.headers.pop(name, None)
        if value is not None:
            response.headers[name] = value

    return lambda server, where: change


def _numbers(response: Response) -> dict[str, int]:
    total = int(response.headers.get("Content-Range", "/0").rpartition("/")[2])
    start, count = response.start, response.count
    return {
        "start": start,
        "last": start + count - 1,
        "total": total,
        "count": count,
        "next": start + 1,
        "beyond": start + count,
        "more": total + 1,
        "fewer": count - 1,
    }


def _whole_object(request: Request, response: Response) -> Response:
    size = int(response.headers["Content-Range"].rpartition("/")[2])
    headers = {"ETag": response.headers["ETag"], "Content-Length": str(size)}
    return Response(200, headers, response.body, 0, size)


def _slice_in_200(request: Request, response: Response) -> None:
    numbers = _numbers(response)
    response.status = 200
    del response.headers["Content-Range"]
    if numbers["count"] == numbers["total"]:
        return  # the whole object was asked for, and a 200 is how that may be answered
    _replace_body(response, _content(response).translate(_SCRAMBLE))


def _answered_twice(request: Request, response: Response) -> None:
    """A second answer to the same request follows, which the next request must not take for its own."""
    head = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    response.extra = f"HTTP/1.1 206 OK\r\n{head}\r\n".encode() + _content(response).translate(_SCRAMBLE)


def _honestly_shorter(request: Request, response: Response) -> None:
    size = response.headers["Content-Range"].rpartition("/")[2]
    response.count //= 2
    response.headers["Content-Length"] = str(response.count)
    response.headers["Content-Range"] = f"bytes {response.start}-{response.start + response.count - 1}/{size}"


def _in_chunks(response: Response) -> None:
    body = _content(response)
    pieces = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    encoded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    del response.headers["Content-Length"]
    response.headers["Transfer-Encoding"] = "chunked"
    _replace_body(response, encoded)


def _chunked(request: Request, response: Response) -> None:
    _in_chunks(response)


def _chunked_refusal(status: int, code: str) -> Make:
    """What AWS sends: the error document in chunks, and the connection stays open."""

    def change(request: Request, response: Response) -> Response:
        refusal = error_response(status, code, "because")
        _in_chunks(refusal)
        return refusal

    return lambda server, where: change


def _stalled_refusal(request: Request, response: Response) -> Response:
    refusal = error_response(403, "AccessDenied", "because")
    refusal.stall_after = 10
    return refusal


def _cut_refusal(request: Request, response: Response) -> Response:
    refusal = error_response(400, "ExpiredToken", "because")
    refusal.cut_after = refusal.count - 30  # after the code, which nobody can read before the document ends
    return refusal


def _unreadable_refusal(request: Request, response: Response) -> Response:
    refusal = error_response(400, "ExpiredToken", "because")
    _replace_body(refusal, b"x" * refusal.count)
    return refusal


def _error_in_200(request: Request, response: Response) -> Response:
    failed = error_response(503, "SlowDown", "because")
    failed.status = 200
    return failed


def _replaced(*, honours_if_match: bool) -> Make:
    """Another object of the same size takes the place of the one that is asked for, before the answer."""

    def make(server: ObjectServer, where: Where) -> Change:
        replaced = set()

        def change(request: Request, response: Response) -> Response:
            for key, stored in list(server.objects[request.bucket].items()):
                if (key == request.key or not request.key) and key.endswith(".safetensors") and key not in replaced:
                    assert isinstance(stored.content, bytes)
                    server.put(request.bucket, key, stored.content.translate(_SCRAMBLE))
                    replaced.add(key)
            if not request.key:
                return response  # the listing was made before
            if not honours_if_match:
                request.headers.pop("if-match", None)
            return server.route(request)

        return change

    return make


def _shortened(server: ObjectServer, where: Where) -> Change:
    def change(request: Request, response: Response) -> Response:
        server.put(request.bucket, request.key, b"short")
        request.headers.pop("if-match", None)
        return server.route(request)

    return change


def _refused(seconds: float | None) -> Make:
    """Every connection is dropped, and new ones are refused: for so long, or for ever."""

    def make(server: ObjectServer, where: Where) -> Change:
        def change(request: Request, response: Response) -> None:
            server.refuse()
            response.reset_after = -1
            if seconds is not None:
                threading.Timer(seconds, server.accept_again).start()

        return change

    return make


def _drop_all(server: ObjectServer, response: Response) -> None:
    """Make every client connect anew."""
    server.refuse()
    server.accept_again()
    response.reset_after = -1


def _slow_accept(seconds: float) -> Make:
    def make(server: ObjectServer, where: Where) -> Change:
        def change(request: Request, response: Response) -> None:
            server.accept_seconds = seconds
            _drop_all(server, response)

        return change

    return make


def _untrusted(server: ObjectServer, where: Where) -> Change:
    def change(request: Request, response: Response) -> None:
        server.tls = where.untrusted
        _drop_all(server, response)

    return change


def _plainly(change: Change) -> Make:
    return lambda server, where: change


# -- the catalogue -----------------------------------------------------------------------------------------

_GONE = (SourceUnavailableError,)
_BAD = (BadResponseError,)
_CHANGED = (ObjectChangedError,)


def _pair(
    name: str,
    make: Make,
    kinds: Kinds,
    *,
    listing: bool = False,
    listing_kinds: Kinds | None = None,
    in_body: bool = False,
    in_sdk: Kinds | None = None,
) -> list[NamedFault]:
    """The same fault once, which is survived, and for ever, which is an error."""
    return [
        NamedFault(f"{name} once", make, in_listing=() if listing else None, in_body=in_body),
        NamedFault(
            f"{name} for ever",
            make,
            kinds,
            in_listing=(listing_kinds or kinds) if listing else None,
            times=None,
            in_body=in_body,
            in_sdk=in_sdk,
        ),
    ]


CATALOGUE: Sequence[NamedFault] = (
    *_pair("500", _refusal(500, "InternalError"), _GONE, listing=True),
    *_pair("503 SlowDown", _refusal(503, "SlowDown"), _GONE, listing=True),
    NamedFault("503 SlowDown in a burst", _refusal(503, "SlowDown"), in_listing=(), times=2, retries=2),
    NamedFault("429 with Retry-After", _refusal(429, "TooManyRequests", Retry_After="1"), in_listing=(), seconds=1.0),
    *_pair("503 in chunks", _chunked_refusal(503, "SlowDown"), _GONE, listing=True),
    *_pair("expired token in chunks", _chunked_refusal(400, "ExpiredToken"), (CredentialsError,), listing=True),
    NamedFault("403", _refusal(403, "AccessDenied"), (AccessDeniedError,), (AccessDeniedError,), None),
    NamedFault(
        "403 in chunks", _chunked_refusal(403, "AccessDenied"), (AccessDeniedError,), (AccessDeniedError,), None
    ),
    # The SDK does not tell the status before it has the whole document.
    NamedFault("403 that stalls", _plainly(_stalled_refusal), (AccessDeniedError,), None, None, in_sdk=_GONE),
    NamedFault("404", _refusal(404, "NoSuchKey"), _CHANGED, (ObjectNotFoundError,), None),
    *_pair("expired token", _refusal(400, "ExpiredToken"), (CredentialsError,), listing=True),
    *_pair(
        "expired token cut short",
        _plainly(_cut_refusal),
        (CredentialsError,),
        listing=True,
        listing_kinds=_GONE,
        in_sdk=_GONE,
    ),
    *_pair("400 without a reason", _plainly(_unreadable_refusal), (CredentialsError,), listing=True),
    NamedFault("redirect", _refusal(307, "TemporaryRedirect"), (SourceError,), (SourceError,), None),
    NamedFault(
        "connection refused for a while",
        _refused(0.03),
        in_listing=(),
        # Waits are drawn at random from zero on, so a few tries may all fall into the while.
        options={"retry_attempts": 12, "retry_first_wait_seconds": 0.02},
    ),
    NamedFault("connection refused for ever", _refused(None), _GONE, _GONE),
    *_pair("reset before the head", _setting(reset_after=-1), _GONE, listing=True),
    *_pair("reset in the head", _setting(head_bytes=40, reset_after=0), _GONE, listing=True),
    *_pair("close in the head", _setting(head_bytes=40), _GONE, listing=True),
    *_pair("reset in the body", _in_body("reset_after"), _GONE, listing=True, in_body=True),
    *_pair("short body", _in_body("cut_after"), _GONE, listing=True, in_body=True),
    NamedFault("extra bytes once", _setting(extra=b"x" * 100), retries=0),
    # aiohttp takes them for the next answer.
    NamedFault(
        "extra bytes for ever",
        _setting(extra=b"x" * 100),
        retries=0,
        times=None,
        in_sdk=_GONE,
        sdk_may_survive=True,
    ),
    NamedFault("answered twice", _plainly(_answered_twice), retries=0),
    NamedFault("always answered twice", _plainly(_answered_twice), retries=0, times=None),
    *_pair("stall before the head", _setting(stall_after=-1), _GONE, listing=True),
    *_pair("stall in the head", _setting(head_bytes=40, stall_after=0), _GONE, listing=True),
    *_pair("stall in the body", _in_body("stall_after"), _GONE, listing=True, in_body=True),
    *_pair("trickle", _setting(bytes_per_second=TRICKLE), _GONE),
    *_pair("200 for a range", _plainly(_whole_object), _BAD),
    *_pair("200 of the right length", _plainly(_slice_in_200), _BAD),
    *_pair("wrong start", _lying(Content_Range="bytes {next}-{last}/{total}"), _BAD),
    *_pair("wrong end", _lying(Content_Range="bytes {start}-{beyond}/{total}"), _BAD),
    *_pair("wrong start and end", _lying(Content_Range="bytes {next}-{beyond}/{total}"), _BAD),
    *_pair("wrong total", _lying(Content_Range="bytes {start}-{last}/{more}"), _BAD),
    *_pair("wrong unit", _lying(Content_Range="items {start}-{last}/{total}"), _BAD),
    *_pair("no Content-Range", _lying(Content_Range=None), _BAD),
    *_pair("honestly shorter", _plainly(_honestly_shorter), _BAD),
    *_pair("wrong Content-Length", _lying(Content_Length="{fewer}"), _BAD, in_sdk=(*_BAD, *_GONE)),
    NamedFault("no Content-Length", _header("Content-Length", None), in_listing=None, retries=0, times=None),
    *_pair("chunked", _plainly(_chunked), _BAD),
    *_pair("false gzip", _header("Content-Encoding", "gzip"), _BAD),
    *_pair("error document in a 200", _plainly(_error_in_200), _BAD, listing=True, listing_kinds=_GONE),
    *_pair("other ETag", _lying(ETag='"another"'), _BAD),
    *_pair("not HTTP", _setting(head_bytes=0, extra=b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), _BAD, in_sdk=_GONE),
    NamedFault("object replaced", _replaced(honours_if_match=True), _CHANGED, _CHANGED),
    NamedFault("object replaced, If-Match ignored", _replaced(honours_if_match=False), (*_BAD, *_CHANGED), None, None),
    NamedFault("object shortened, If-Match ignored", _shortened, (*_CHANGED, *_BAD), None, None),
    NamedFault("closed while idle", _after_body("cut_after"), in_listing=(), retries=0),
    NamedFault("always closed while idle", _after_body("cut_after"), in_listing=(), retries=0, times=None),
    NamedFault("reset while idle", _after_body("reset_after"), in_listing=(), retries=0),
    NamedFault("certificate not trusted", _untrusted, (SourceError,), (SourceError,)),
    NamedFault("slow accept", _slow_accept(0.1), in_listing=()),
    NamedFault("no accept for ever", _slow_accept(60.0), _GONE, _GONE),
)
BY_NAME = {fault.name: fault for fault in CATALOGUE}


class Mixture:
    """Strikes each request with some probability, by a fault drawn at random; the same ones for the same seed.

    What is drawn for a request depends on its range and how often it was asked for, not on the order in which
    concurrent requests arrive.

    Args:
        faults: to draw from; those that cannot happen to a listing are not drawn for one.
        rate: of requests that are struck.
    """

    def __init__(
        self,
        server: ObjectServer,
        faults: Sequence[NamedFault],
        *,
        rate: float,
        seed: int,
        untrusted: ssl.SSLContext | None = None,
    ) -> None:
        self.struck: Counter[str] = Counter()
        self._server = server
        self._faults = {"GET": faults, "LIST": [fault for fault in faults if fault.in_listing is not None]}
        self._rate = rate
        self._seed = seed
        self._untrusted = untrusted
        self._asked: Counter[str] = Counter()
        for kind in self._faults:
            server.faults.append(Fault(functools.partial(self._strike, kind), times=None, method=kind))

    def _strike(self, kind: str, request: Request, response: Response) -> Response | None:
        what = f"{kind} {request.key} {request.headers.get('range')}"
        self._asked[what] += 1
        draw = random.Random(f"{self._seed} {what} {self._asked[what]}")
        faults = self._faults[kind]
        if draw.random() >= self._rate or not faults or response.status not in (200, 206):
            return None
        fault = draw.choice(faults)
        self.struck[fault.name] += 1
        where = Where(kind, request.key, part=draw.random(), untrusted=self._untrusted)
        return fault.make(self._server, where)(request, response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-byte-seconds", type=float, default=0.0)
    parser.add_argument("--bytes-per-second", type=float, default=None)
    options = parser.parse_args()
    server = ObjectServer(
        options.root, first_byte_seconds=options.first_byte_seconds, bytes_per_second=options.bytes_per_second
    )
    Mixture(server, [fault for fault in CATALOGUE if fault.is_survivable], rate=options.rate, seed=options.seed)
    answer(server)


if __name__ == "__main__":
    main()
