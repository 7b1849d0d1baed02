"""All checks of a URL, in the order in which a load would stumble."""

from __future__ import annotations

from collections.abc import Callable

from streamer.config import StreamConfig
from streamer.doctor.access import Access
from streamer.doctor.checks import Chart, Diagnosis, Finding
from streamer.doctor.identity import identify
from streamer.doctor.network import Network
from streamer.doctor.settings import Settings
from streamer.errors import AccessDeniedError
from streamer.sources import Source, open_source, split_file
from streamer.sources.s3_url import S3Location, parse_s3_url

__all__ = ["CHECKS", "diagnose"]

_SETTINGS = ("profile", "endpoint", "region", "addressing", "proxy", "ca_bundle")
_NETWORK = ("dns", "connect", "tls", "store", "clock")
_ACCESS = ("list", "head", "read", "pin", "checkpoint", "throughput")
#: Names of all checks, in order.
CHECKS = ("url", *_SETTINGS, *_NETWORK, "credentials", *_ACCESS)


async def diagnose(url: str, config: StreamConfig, *, progress: Callable[[str], None] = lambda name: None) -> Diagnosis:
    """Look at `url` as a load on this machine would, and go on after a failure where that can tell more.

    Nothing is written. Of S3 only ListObjectsV2, HeadObject and GetObject are used, and for a single file no listing.

    Args:
        progress: called with the name of each check.
    """
    chart = Chart(progress)
    opened: list[tuple[Source, str | None]] = []

    async def parse() -> Finding:
        root, key = split_file(url)
        # A store that does not answer will not at the eighth try either, and somebody is waiting.
        opened.append((open_source(root, config.replace(retry_attempts=min(config.retry_attempts, 2))), key))
        source = opened[0][0]
        return Finding(f"{source.label(key)}, a single file" if key else source.url)

    await chart.run("url", parse)
    if not opened:
        for name in CHECKS[1:]:
            chart.skip(name, "the URL cannot be used")
        return Diagnosis("", tuple(chart.checks))
    source, key = opened[0]
    try:
        region = advice = None
        if source.url.startswith("s3://"):
            region, advice = await _before_s3(chart, parse_s3_url(source.url), config)
        # A clock that is wrong is the store's to refuse.
        failed = [check.name for check in chart.checks if check.ok is False and check.name != "clock"]
        if failed:
            for name in _ACCESS:
                chart.skip(name, f"needs {', '.join(failed)}")
        else:
            await _use(chart, Access(source, config, key, region, advice), is_single=key is not None)
        return Diagnosis(source.url, tuple(chart.checks))
    finally:
        await source.close()


async def _before_s3(chart: Chart, location: S3Location, config: StreamConfig) -> tuple[str | None, str | None]:
    """Settings, network and identity; return the region that requests begin in, and what `Access` calls advice."""
    settings = Settings(config, location)
    network = Network(settings)
    try:
        for name in _SETTINGS:
            if not chart.passed("profile", "endpoint"):
                chart.skip(name, "needs a usable profile and endpoint")
            else:
                await chart.run(name, getattr(settings, name))
        if not chart.passed(*_SETTINGS):
            for name in (*_NETWORK, "credentials"):
                chart.skip(name, "needs usable settings")
            return None, None
        await _reach(chart, settings, network)
        region = settings.client.region
        # A source of credentials answers or does not, whether or not S3 can be reached.
        await chart.run("credentials", lambda: identify(config, location.url, region))
        return region, settings.advice
    finally:
        network.close()
        await settings.close()


async def _reach(chart: Chart, settings: Settings, network: Network) -> None:
    reached = True
    for name in _NETWORK:
        if settings.only_sdk_reaches:
            chart.skip(name, "the way leads through a proxy that only the SDK speaks to")
        elif not reached:
            chart.skip(name, "needs the check before")
        elif name == "tls" and settings.origin.scheme == "http":
            chart.skip(name, "the endpoint speaks plain HTTP")
        elif name == "clock" and not network.tells_time:
            chart.skip(name, "the store's answer has no Date")
        else:
            reached = await chart.run(name, getattr(network, name))


async def _use(chart: Chart, access: Access, *, is_single: bool) -> None:
    if is_single:
        chart.skip("list", "not needed for a single file")
    else:
        await chart.run("list", access.list)
    # Who may not list may still read; any other refusal would only be repeated.
    blocked = [check for check in chart.checks if check.name == "list" and check.ok is False]
    if blocked and not isinstance(blocked[0].error, AccessDeniedError):
        for name in _ACCESS[1:]:
            chart.skip(name, "needs the listing")
        return
    await chart.run("head", access.head)
    steps = {"read": access.read, "pin": access.pin, "checkpoint": access.checkpoint, "throughput": access.throughput}
    for name, check in steps.items():
        if not chart.passed("head", "read"):
            chart.skip(name, "needs an object that can be read")
        elif name == "checkpoint" and blocked:
            chart.skip(name, "needs the listing")
        else:
            await chart.run(name, check)
