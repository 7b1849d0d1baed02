"""Requester pays and customers' keys: said in every request, signed, and never shown."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest

from streamer.config import StreamConfig
from streamer.errors import AccessDeniedError, ConfigError, StreamError
from streamer.sources import open_source
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.s3_client import s3_client
from tests.servers.seaweed import SeaweedServer

BODY = os.urandom(5000)


async def read_all(url: str, config: StreamConfig) -> bytes:
    source = open_source(url, config)
    try:
        (item,) = await source.list()
        assert await source.stat(item.key) == item
        body = bytearray(item.size)
        await source.read_into(item, 0, [memoryview(body)])
        return bytes(body)
    finally:
        await source.close()


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_every_request_says_who_pays(server: ObjectServer, transport: str) -> None:
    server.put("b", "m/x.bin", BODY)
    refused = []

    def insist(request: Request, response: Response) -> Response | None:
        if request.headers.get("x-amz-request-payer") == "requester":
            return None
        refused.append(request)
        return error_response(403, "AccessDenied")

    server.faults = [Fault(insist, times=None, method=method) for method in ("LIST", "HEAD", "GET")]
    options: dict[str, Any] = {"endpoint_url": server.url, "transport": transport}
    with pytest.raises(StreamError, match="access denied"):
        asyncio.run(read_all("s3://b/m", StreamConfig(**options)))
    refused.clear()
    assert asyncio.run(read_all("s3://b/m", StreamConfig(**options, requester_pays=True))) == BODY
    assert not refused


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_the_signature_covers_it(seaweed: SeaweedServer, transport: str) -> None:
    """A store that checks signatures refuses x-amz headers that are not signed."""
    client = s3_client(seaweed.url)
    client.create_bucket(Bucket=f"payer-{transport}")
    client.put_object(Bucket=f"payer-{transport}", Key="m/x.bin", Body=BODY)
    client.close()
    config = StreamConfig(endpoint_url=seaweed.url, transport=transport, requester_pays=True)  # type: ignore[arg-type]
    assert asyncio.run(read_all(f"s3://payer-{transport}/m", config)) == BODY


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_customers_keys_are_sent_with_heads_and_bodies(server: ObjectServer, tmp_path: Path, transport: str) -> None:
    key = bytes(range(32))
    (tmp_path / "key").write_bytes(key)
    server.put("b", "m/x.bin", BODY)
    name = "x-amz-server-side-encryption-customer-"

    def insist(request: Request, response: Response) -> Response | None:
        sent = {what: request.headers.get(name + what, "") for what in ("algorithm", "key", "key-md5")}
        right = sent["algorithm"] == "AES256" and base64.b64decode(sent["key"]) == key and sent["key-md5"]
        return None if right else error_response(400, "InvalidRequest", "encrypted with a customer's key")

    server.faults = [Fault(insist, times=None, method=method) for method in ("HEAD", "GET")]
    config = StreamConfig.resolve(
        {"endpoint_url": server.url, "transport": transport, "sse_customer_key_file": str(tmp_path / "key")}
    )
    assert asyncio.run(read_all("s3://b/m", config)) == BODY
    assert base64.b64encode(key).decode() not in repr(config)


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "cannot be read"), (tmp_path / "short", "has 5 bytes, and a key has 32")):
        if path.name == "short":
            path.write_bytes(b"12345")
        with pytest.raises(ConfigError, match=message):
            open_source("s3://b/m", StreamConfig(sse_customer_key_file=str(path)))


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_objects_encrypted_by_kms_need_nothing(moto_url: str, transport: str) -> None:
    """Their ETags are no digests of their bytes, and nobody takes them for one."""
    client, name = s3_client(moto_url), f"kms-{transport}"
    client.create_bucket(Bucket=name)
    client.put_object(
        Bucket=name, Key="m/x.bin", Body=BODY, ServerSideEncryption="aws:kms", SSEKMSKeyId="alias/of-a-key"
    )
    assert client.head_object(Bucket=name, Key="m/x.bin")["ServerSideEncryption"] == "aws:kms"
    config = StreamConfig(endpoint_url=moto_url, transport=transport)  # type: ignore[arg-type]
    assert asyncio.run(read_all(f"s3://{name}/m", config)) == BODY


DENIED = "User: arn:aws:iam::123456789012:user/x is not authorized to perform: kms:Decrypt on resource: arn:aws:kms:y"


@pytest.mark.parametrize("transport", ["native", "sdk"])
@pytest.mark.parametrize(
    ("status", "code", "message", "words"),
    [
        (403, "AccessDenied", DENIED, r"access denied: User.*\(the identity needs kms:Decrypt for the key"),
        (
            400,
            "KMS.DisabledException",
            "it is disabled",
            "KMS key cannot be used: it is disabled.*kms:Decrypt.*enabled",
        ),
        (403, "AccessDenied", "Access Denied", r"needs s3:GetObject here"),
    ],
)
def test_what_kms_refuses_is_named(
    server: ObjectServer, transport: str, status: int, code: str, message: str, words: str
) -> None:
    server.put("b", "m/x.bin", BODY)
    server.faults = [Fault(lambda request, response: error_response(status, code, message), times=None)]
    config = StreamConfig(endpoint_url=server.url, transport=transport)  # type: ignore[arg-type]
    with pytest.raises(AccessDeniedError, match=words):
        asyncio.run(read_all("s3://b/m", config))
    assert server.counters.requests["GET"] == 1


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_when_kms_is_asked_too_much_it_is_asked_again(server: ObjectServer, transport: str) -> None:
    server.put("b", "m/x.bin", BODY)
    server.faults = [Fault(lambda request, response: error_response(400, "KMS.ThrottlingException", "slower"), times=1)]
    config = StreamConfig(endpoint_url=server.url, transport=transport, retry_first_wait_seconds=0.01)  # type: ignore[arg-type]
    assert asyncio.run(read_all("s3://b/m", config)) == BODY
