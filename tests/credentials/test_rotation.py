"""Credentials that expire while a load goes on: renewed before that, asked for once more after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from streamer.config import StreamConfig
from streamer.errors import CredentialsError
from streamer.sources.s3 import S3Source
from streamer.sources.s3_url import parse_s3_url
from tests.credentials.conftest import BODY
from tests.credentials.reading import PIECES, open_for, read, visit, visit_once
from tests.credentials.services import Guard, Issuer, serve, sts, sts_error, temporary
from tests.credentials.ways import RENEWABLE, WAYS, Setup, container, run_process, web_identity
from tests.servers.object_server import ObjectServer

OLD, NEW = temporary(1), temporary(2)


@pytest.mark.parametrize("way", RENEWABLE)
@pytest.mark.parametrize(
    ("transport", "when"), [("native", "LIST"), ("native", "HEAD"), ("native", "GET"), ("sdk", "GET")]
)
def test_expired_at_the_store_is_asked_again_with_new_ones(
    server: ObjectServer, guard: Guard, setup: Setup, transport: str, way: str, when: str
) -> None:
    """The store stops taking the old keys in the middle of the load, before the client thought they would expire."""
    setup.issue = Issuer(OLD, NEW)
    WAYS[way](setup)

    async def run() -> None:
        source = open_for(server, transport=transport, **setup.options)
        try:
            if when == "LIST":
                guard.expired.add(OLD.access)
                await visit(source)
                return
            (item,) = await source.list()
            if when == "HEAD":
                guard.expired.add(OLD.access)
                assert await source.stat("a.bin") == item
            else:
                await source.read_into(item, 0, [memoryview(bytearray(10))])
                guard.expired.add(OLD.access)
                buffer = bytearray(item.size)
                step = item.size // PIECES
                await asyncio.gather(
                    *(
                        source.read_into(item, start, [memoryview(buffer)[start : start + step]])
                        for start in range(0, item.size, step)
                    )
                )
                assert buffer == BODY
        finally:
            await source.close()

    asyncio.run(run())
    assert setup.issue.issued == 2, "new ones are asked for once, whoever notices"
    assert when in guard.methods_by(NEW)
    assert len(guard.methods_by(OLD)) + len(guard.methods_by(NEW)) == len(guard.seen)


@pytest.mark.parametrize(
    ("transport", "when"), [("native", "LIST"), ("native", "HEAD"), ("native", "GET"), ("sdk", "GET")]
)
def test_expired_for_good_is_an_error_that_says_what_to_do(
    server: ObjectServer, guard: Guard, setup: Setup, transport: str, when: str
) -> None:
    setup.issue = Issuer(OLD, NEW, temporary(3))
    web_identity(setup)
    everything = {OLD.access, NEW.access, temporary(3).access}

    async def run() -> None:
        source = open_for(server, transport=transport)
        try:
            if when == "LIST":
                guard.expired |= everything
                await source.list()
            (item,) = await source.list()
            guard.expired |= everything
            if when == "HEAD":
                await source.stat("a.bin")
            await source.read_into(item, 0, [memoryview(bytearray(10))])
        finally:
            await source.close()

    with pytest.raises(CredentialsError, match=r"s3://bucket/m/.*expired.*log in again or refresh"):
        asyncio.run(run())
    assert setup.issue.issued == 2, "one renewal, not a loop"
    tried = [method for method, signed in guard.seen if signed.access == NEW.access]
    assert tried == ([when] if when != "HEAD" else ["HEAD", "HEAD"]), "botocore asks for the bucket's region as well"


def test_keys_about_to_expire_are_never_used(server: ObjectServer, guard: Guard, setup: Setup, transport: str) -> None:
    """Nine minutes are left of the first ones when they are found: no request is signed with them."""
    setup.issue = Issuer(temporary(1, lifetime_seconds=540), NEW)
    container(setup)
    visit_once(server, transport=transport)
    assert len(guard.methods_by(NEW)) == len(guard.seen)
    assert setup.issue.issued == 2


def test_signed_addresses_follow_the_renewal(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    """A signed URL is used for five minutes, and botocore's keys are good for ten: the new URL has the new keys."""
    log = run_process(setup, [temporary(number, lifetime_seconds=540) for number in range(1, 20)])
    now = 0.0

    async def run() -> None:
        nonlocal now
        config = StreamConfig.resolve({"endpoint_url": server.url})
        source = S3Source(parse_s3_url("s3://bucket/m"), config, clock=lambda: now)
        try:
            item = await source.stat("a.bin")
            for now in (0.0, 299.0, 301.0):  # noqa: B007 - the clock reads it
                await source.read_into(item, 0, [memoryview(bytearray(10))])
        finally:
            await source.close()

    asyncio.run(run())
    first, second, third = [signed.access for method, signed in guard.seen if method == "GET"]
    assert first == second != third
    assert third == f"ASIATEMP{log.stat().st_size}", "the newest ones"


def test_the_token_file_is_read_again(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    """Kubernetes replaces the web identity token long before it ends; STS takes only the current one."""
    setup.issue = Issuer(OLD, NEW)
    web_identity(setup)

    async def run() -> None:
        source = open_for(server)
        try:
            await visit(source)
            setup.write("web-token", "the.next.token")
            guard.expired.add(OLD.access)
            await read(source)
        finally:
            await source.close()

    asyncio.run(run())
    assert setup.service is not None
    assert ["the.next.token" in call.body for call in setup.service.calls] == [False, True]


def test_a_token_that_ended_is_named_by_sts(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    web_identity(setup)
    with serve(lambda _: sts_error(400, "ExpiredTokenException", "Token expired: current date/time ...")) as service:
        setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
        with pytest.raises(CredentialsError, match="AssumeRoleWithWebIdentity was refused: Token expired.*token"):
            visit_once(server)


def test_a_busy_sts_is_asked_again(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    web_identity(setup)
    healthy = sts(setup.issue, web_token=(setup.folder / "web-token").read_text)
    failures = [sts_error(503, "ServiceUnavailable", "later"), sts_error(400, "Throttling", "Rate exceeded")]
    with serve(lambda call: failures.pop() if failures else healthy(call)) as service:
        setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
        visit_once(server, retry_attempts=3)
    assert failures == []
    assert guard.methods_by(OLD)


def test_keys_that_come_out_expired(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    """A helper that prints what it cached yesterday."""
    run_process(setup, [temporary(lifetime_seconds=-3600)])
    with pytest.raises(CredentialsError, match="have expired.*log in again, and check this machine's clock"):
        visit_once(server)
    assert guard.seen == []


def _remove(path: Path) -> None:
    path.unlink()


def _garble(path: Path) -> None:
    path.write_text("print('not JSON: secret/of+1')\n")


@pytest.mark.parametrize("spoil", [_remove, _garble])
def test_a_helper_that_breaks_in_the_middle(
    server: ObjectServer, guard: Guard, setup: Setup, transport: str, spoil: Callable[[Path], None]
) -> None:
    run_process(setup, [temporary(number, lifetime_seconds=540) for number in range(1, 20)])

    async def run() -> None:
        source = open_for(server, transport=transport)
        try:
            (item,) = await source.list()
            spoil(setup.folder / "helper.py")
            await source.read_into(item, 0, [memoryview(bytearray(10))])
        finally:
            await source.close()

    with pytest.raises(CredentialsError, match=r"a\.bin: .*could not be had|a\.bin bytes.*could not be had") as caught:
        asyncio.run(run())
    assert "secret/of+1" not in str(caught.value)
