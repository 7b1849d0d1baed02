"""Every kind of name that S3 has: where requests for it go, and how they are signed.

Hosts are those of https://docs.aws.amazon.com/general/latest/gr/s3.html and the user guide's pages about access points,
directory buckets, Multi-Region Access Points and Outposts.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from streamer.config import StreamConfig
from streamer.errors import AccessDeniedError, ConfigError, MissingDependencyError, ObjectNotFoundError
from streamer.sources import ObjectInfo, open_source, s3_signing
from streamer.sources.s3 import S3Source
from streamer.sources.s3_url import parse_s3_url
from tests.conftest import ACCESS_KEY
from tests.servers.express import Express
from tests.servers.object_server import ObjectServer

ACCOUNT = "123456789012"
POINT = f"arn:aws:s3:eu-west-1:{ACCOUNT}:accesspoint"
OUTPOST = f"arn:aws:s3-outposts:eu-west-1:{ACCOUNT}:outpost"
ALIAS = "point-hrzrlukc5m36ft7okagglf3gmwluquse1b-s3alias"
OUTPOST_ALIAS = "point-o01ac5d28a6a232904e8783afe72eb8f8aaa24zg3d1--op-s3"
LAMBDA = f"arn:aws:s3-object-lambda:eu-west-1:{ACCOUNT}:accesspoint"
MULTI_REGION = f"arn:aws:s3::{ACCOUNT}:accesspoint/mfzwi23gnjvgw.mrap"
EXPRESS = "bucket--use1-az4--x-s3"
EXPRESS_POINT = "point--use1-az4--xa-s3"
FIPS = {"AWS_USE_FIPS_ENDPOINT": "true"}
DUALSTACK = {"AWS_USE_DUALSTACK_ENDPOINT": "true"}
KEY = "m/a b+c.bin"
QUOTED = "m/a%20b%2Bc.bin"


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/a//b", "bucket", "a//b/"),
        ("s3://dotted.bucket/m", "dotted.bucket", "m/"),
        (f"s3://{POINT}/name/a/b", f"{POINT}/name", "a/b/"),
        (f"s3://{POINT}/name", f"{POINT}/name", ""),
        (f"s3://{POINT}:name/a", f"{POINT}:name", "a/"),
        (f"s3://{POINT}/name/accesspoint/other", f"{POINT}/name", "accesspoint/other/"),
        (f"s3://{MULTI_REGION}/a", MULTI_REGION, "a/"),
        (f"s3://{OUTPOST}/op-1/accesspoint/name/a", f"{OUTPOST}/op-1/accesspoint/name", "a/"),
        (f"s3://{OUTPOST}:op-1:accesspoint:name/a", f"{OUTPOST}:op-1:accesspoint:name", "a/"),
        (f"s3://{LAMBDA}/name/a", f"{LAMBDA}/name", "a/"),
        (f"s3://{EXPRESS}/a", EXPRESS, "a/"),
        (f"s3://{EXPRESS_POINT}/a", EXPRESS_POINT, "a/"),
    ],
)
def test_urls_name_a_bucket_and_a_prefix(url: str, bucket: str, prefix: str) -> None:
    location = parse_s3_url(url)
    assert (location.bucket, location.prefix) == (bucket, prefix)
    assert location.is_multi_region == (bucket == MULTI_REGION)
    assert location.is_directory == (bucket in (EXPRESS, EXPRESS_POINT))
    assert parse_s3_url(location.url) == location


@pytest.mark.parametrize(
    "url",
    [
        "s3://arn:aws:s3:::bucket/m",
        f"s3://{POINT}",
        f"s3://{OUTPOST}/op-1/m",
        f"s3://arn:aws:sns:eu-west-1:{ACCOUNT}:m",
    ],
)
def test_other_arns_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no ARN of an access point.*accesspoint/NAME"):
        parse_s3_url(url)


async def presigned(url: str, **options: Any) -> str:
    source = open_source(f"s3://{url}/m", StreamConfig(**{"region": "eu-west-1", **options}))
    assert isinstance(source, S3Source)
    try:
        address = await source._address(ObjectInfo("a b+c.bin", 1), None)
        return f"{address.origin.scheme}://{address.origin.authority}{address.request_target}"
    finally:
        await source.close()


@pytest.mark.parametrize(
    ("bucket", "environ", "options", "host", "path", "scope"),
    [
        ("bucket", {}, {}, "bucket.s3.eu-west-1.amazonaws.com", "", "eu-west-1/s3"),
        ("bucket", {}, {"region": "us-east-1"}, "bucket.s3.amazonaws.com", "", "us-east-1/s3"),
        ("bucket", {}, {"region": "cn-north-1"}, "bucket.s3.cn-north-1.amazonaws.com.cn", "", "cn-north-1/s3"),
        ("bucket", {}, {"addressing_style": "path"}, "s3.eu-west-1.amazonaws.com", "bucket/", "eu-west-1/s3"),
        # A dot would not match the wildcard of S3's certificate, so path style is right, whatever is asked for.
        ("a.bucket", {}, {}, "s3.eu-west-1.amazonaws.com", "a.bucket/", "eu-west-1/s3"),
        ("a.bucket", {}, {"addressing_style": "virtual"}, "s3.eu-west-1.amazonaws.com", "a.bucket/", "eu-west-1/s3"),
        ("bucket", FIPS, {"region": "us-east-1"}, "bucket.s3-fips.us-east-1.amazonaws.com", "", "us-east-1/s3"),
        ("bucket", DUALSTACK, {}, "bucket.s3.dualstack.eu-west-1.amazonaws.com", "", "eu-west-1/s3"),
        (
            "bucket",
            {**FIPS, **DUALSTACK},
            {"region": "us-east-1"},
            "bucket.s3-fips.dualstack.us-east-1.amazonaws.com",
            "",
            "us-east-1/s3",
        ),
        (f"{POINT}/name", {}, {}, f"name-{ACCOUNT}.s3-accesspoint.eu-west-1.amazonaws.com", "", "eu-west-1/s3"),
        (f"{POINT}:name", {}, {}, f"name-{ACCOUNT}.s3-accesspoint.eu-west-1.amazonaws.com", "", "eu-west-1/s3"),
        # The ARN says where the access point is, whatever the client's region.
        (
            f"{POINT}/name".replace("eu-west-1", "us-west-2"),
            {},
            {},
            f"name-{ACCOUNT}.s3-accesspoint.us-west-2.amazonaws.com",
            "",
            "us-west-2/s3",
        ),
        (
            f"{POINT}/name",
            {},
            {"addressing_style": "path"},
            f"name-{ACCOUNT}.s3-accesspoint.eu-west-1.amazonaws.com",
            "",
            "eu-west-1/s3",
        ),
        (
            f"{POINT}/name".replace("eu-west-1", "us-east-1"),
            FIPS,
            {"region": "us-east-1"},
            f"name-{ACCOUNT}.s3-accesspoint-fips.us-east-1.amazonaws.com",
            "",
            "us-east-1/s3",
        ),
        (ALIAS, {}, {}, f"{ALIAS}.s3.eu-west-1.amazonaws.com", "", "eu-west-1/s3"),
        (
            f"{OUTPOST}/op-01ac5d28a6a232904/accesspoint/name",
            {},
            {},
            f"name-{ACCOUNT}.op-01ac5d28a6a232904.s3-outposts.eu-west-1.amazonaws.com",
            "",
            "eu-west-1/s3-outposts",
        ),
        (
            OUTPOST_ALIAS,
            {},
            {},
            f"{OUTPOST_ALIAS}.op-01ac5d28a6a232904.s3-outposts.eu-west-1.amazonaws.com",
            "",
            "eu-west-1/s3-outposts",
        ),
        (
            f"{LAMBDA}/name",
            {},
            {},
            f"name-{ACCOUNT}.s3-object-lambda.eu-west-1.amazonaws.com",
            "",
            "eu-west-1/s3-object-lambda",
        ),
        (
            EXPRESS,
            {"AWS_S3_DISABLE_EXPRESS_SESSION_AUTH": "true"},
            {"region": "us-east-1"},
            f"{EXPRESS}.s3express-use1-az4.us-east-1.amazonaws.com",
            "",
            "us-east-1/s3express",
        ),
    ],
)
def test_host_path_and_scope(
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    environ: dict[str, str],
    options: dict[str, Any],
    host: str,
    path: str,
    scope: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parts = urlsplit(asyncio.run(presigned(bucket, **options)))
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == f"https://{host}/{path}{QUOTED}"
    assert query["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
    assert re.fullmatch(rf"{ACCESS_KEY}/\d{{8}}/{scope}/aws4_request", query["X-Amz-Credential"])


def test_a_multi_region_access_point_is_signed_for_all_regions() -> None:
    parts = urlsplit(asyncio.run(presigned(MULTI_REGION)))
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert parts.netloc == "mfzwi23gnjvgw.mrap.accesspoint.s3-global.amazonaws.com"
    assert parts.path == f"/{QUOTED}"
    assert query["X-Amz-Algorithm"] == "AWS4-ECDSA-P256-SHA256"
    assert query["X-Amz-Region-Set"] == "*"
    assert re.fullmatch(rf"{ACCESS_KEY}/\d{{8}}/s3/aws4_request", query["X-Amz-Credential"])


def test_without_awscrt_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_signing, "HAS_CRT", False)
    with pytest.raises(MissingDependencyError, match="signed with SigV4A, which needs awscrt.*pip install awscrt"):
        asyncio.run(presigned(MULTI_REGION))
    assert asyncio.run(presigned("bucket"))
    assert asyncio.run(presigned(MULTI_REGION, anonymous=True)).endswith(QUOTED)


# -- directory buckets ---------------------------------------------------------------------------------------

BODY = bytes(range(256)) * 40


@pytest.fixture
def express(server: ObjectServer) -> Express:
    server.put(EXPRESS, "org/m/a.bin", BODY)
    return Express(server)


def open_express(server: ObjectServer, url: str = f"s3://{EXPRESS}/org/m", **options: Any) -> S3Source:
    config = StreamConfig(endpoint_url=server.url, retry_attempts=2, retry_first_wait_seconds=0.01, **options)
    source = open_source(url, config)
    assert isinstance(source, S3Source)
    return source


async def read(source: S3Source, item: ObjectInfo) -> bytes:
    body = bytearray(item.size - 5)
    await source.read_into(item, 5, [memoryview(body)])
    return bytes(body)


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_a_directory_bucket_is_read_in_a_session(server: ObjectServer, express: Express, transport: str) -> None:
    server.bucket_region = "use1-az4"

    async def run() -> None:
        source = open_express(server, transport=transport)
        (item,) = await source.list()
        assert await source.stat("a.bin") == item
        assert await read(source, item) == BODY[5:]
        assert (express.sessions, express.refused) == (1, 0)
        express.end_sessions()
        assert await read(source, item) == BODY[5:]
        assert (express.sessions, express.refused) == (2, 1)
        express.end_sessions()
        assert await source.stat("a.bin") == item
        await source.close()

    asyncio.run(run())
    assert set(express.prefixes) == {"org/m/"}


def test_addresses_of_a_directory_bucket_are_renewed_before_the_session_ends(
    server: ObjectServer, express: Express
) -> None:
    now = 0.0

    async def run() -> None:
        nonlocal now
        config = StreamConfig(endpoint_url=server.url)
        source = S3Source(parse_s3_url(f"s3://{EXPRESS}/org/m"), config, clock=lambda: now)
        item = ObjectInfo("a.bin", 1)
        first = await source._address(item, None)
        now = 9.9
        assert await source._address(item, None) is first
        now = 10.1  # botocore gives out a session with ten seconds left
        assert await source._address(item, None) is not first
        await source.close()

    asyncio.run(run())


def test_a_wrong_folder_of_a_directory_bucket_has_neighbours(server: ObjectServer, express: Express) -> None:
    async def run() -> None:
        source = open_express(server, f"s3://{EXPRESS}/org/mm")
        with pytest.raises(ObjectNotFoundError, match=rf"there is s3://{EXPRESS}/org/m/"):
            await source.list()
        await source.close()

    asyncio.run(run())
    assert express.prefixes == ["org/mm/", "org/"]


def test_the_permission_for_sessions_is_named(server: ObjectServer) -> None:
    server.put(EXPRESS, "org/m/a.bin", BODY)
    Express(server, denied=True)

    async def run() -> None:
        source = open_express(server)
        with pytest.raises(AccessDeniedError, match="needs s3express:CreateSession"):
            await source.list()
        await source.close()

    asyncio.run(run())


def test_a_directory_bucket_has_no_versions(server: ObjectServer, express: Express) -> None:
    async def run() -> None:
        source = open_express(server, pin="version")
        with pytest.raises(ConfigError, match="has no version to pin"):
            await source.list()
        await source.close()

    asyncio.run(run())
