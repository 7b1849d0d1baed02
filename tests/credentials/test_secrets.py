"""Secrets planted everywhere, loads that fail in every way, and not a trace of the secrets in what we say.

The loggers of botocore, aiobotocore and urllib3 stay at their usual levels: at DEBUG they print the
canonical request and the metadata services' answers, which is theirs to change.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch

import streamer
from streamer.config import StreamConfig
from streamer.errors import ConfigError, SourceError, StreamError
from streamer.sources import open_source
from streamer.sources.s3 import S3Source
from streamer.transport.pool import proxy_for
from tests.credentials.services import Keys, read_signature, sts_error
from tests.credentials.ways import Setup, log_in, process, run_process, web_identity
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.proxy import Proxy

#: In every secret; percent-encoding and cutting at the separators leave it whole.
MARK = "PLANTED"
KEYS = Keys("AKIAVISIBLE", f"{MARK}secret/key+", f"{MARK}session/token==")
PROXY_PASSWORD = f"{MARK}proxy"
SIGNED = re.compile(r"X-Amz-(?:Signature|Security-Token|Credential)(?:=|%3D)(?!\*\*\*)", re.IGNORECASE)
OTHERS = ("botocore", "aiobotocore", "urllib3")


class Listener(logging.Handler):
    """Keeps every record as it would be printed."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(OTHERS):
            self.lines.append(self.format(record))


@pytest.fixture
def heard() -> Iterator[Listener]:
    listener = Listener()
    root = logging.getLogger()
    before = root.level
    root.addHandler(listener)
    root.setLevel(logging.DEBUG)
    try:
        yield listener
    finally:
        root.removeHandler(listener)
        root.setLevel(before)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS.access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS.secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", KEYS.token or "")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(400, 400))


def put_model(server: ObjectServer) -> None:
    server.put("bucket", "m/model.safetensors", safetensors.torch.save({"weight": torch.ones(400, 400)}))


def options_for(endpoint_url: str, **options: object) -> dict[str, object]:
    return {
        "endpoint_url": endpoint_url,
        "retry_attempts": 2,
        "retry_first_wait_seconds": 0.01,
        "idle_timeout_seconds": 0.5,
        "connect_timeout_seconds": 2.0,
        **options,
    }


def everything_said(error: BaseException) -> str:
    """All that a user, a log or another rank may get to see of an error."""
    said = [str(error), repr(error), *traceback.format_exception(error)]
    seen: BaseException | None = error
    while seen is not None:
        said += [str(seen), repr(seen)]
        if isinstance(seen, StreamError):
            said.append(repr(vars(seen)))
            copied = pickle.loads(pickle.dumps(seen))
            said += [str(copied), repr(copied), repr(copy.copy(vars(copied)))]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(said)


def assert_clean(text: str, server: ObjectServer | None = None, *, unsigned: int = 0) -> None:
    """Find no secret in `text`, nor a signature of the requests to `server`, of which so many have none."""
    assert text
    assert MARK not in text, text[max(0, text.index(MARK) - 300) : text.index(MARK) + 100]
    found = SIGNED.search(text)
    assert found is None, text[max(0, found.start() - 300) : found.end() + 100]
    for sent in server.counters.authorization if server else ():
        signature = re.search(r"Signature=([0-9a-f]{64})", sent)
        if signature is None:
            unsigned -= 1
            continue
        assert signature[1] not in text
    assert unsigned >= 0, "every other request is signed"


def quoting(request: Request, response: Response) -> Response:
    """A gateway that explains itself: the whole request in its message, as a signature mismatch may."""
    names = sorted(request.headers, key=lambda name: name not in ("authorization", "x-amz-security-token"))
    quoted = f"{request.method} {request.target} " + " ".join(f"{name}: {request.headers[name]}" for name in names)
    failed = error_response(403, "SignatureDoesNotMatch", quoted)
    token = read_signature(request).token
    assert isinstance(failed.body, bytes)
    failed.body = failed.body.replace(b"</Error>", f"<Token-0>{token}</Token-0></Error>".encode())
    failed.count = len(failed.body)
    failed.headers["Content-Length"] = str(failed.count)
    return failed


def store_error(status: int, code: str) -> Callable[[Request, Response], Response]:
    return lambda request, response: error_response(status, code, "because")


def setting(**values: object) -> Callable[[Request, Response], None]:
    def change(request: Request, response: Response) -> None:
        for name, value in values.items():
            setattr(response, name, value)

    return change


def elsewhere(request: Request, response: Response) -> Response:
    """A redirect that carries the signature on, as the stores of some clouds do."""
    response = error_response(307, "TemporaryRedirect", "go there")
    response.headers["Location"] = f"http://127.0.0.1:1{request.target}"
    return response


def shifted(request: Request, response: Response) -> None:
    response.headers["Content-Range"] = "bytes 1-2/3"


FAILURES: dict[str, Callable[[Request, Response], Response | None]] = {
    "quotes the request": quoting,
    "denied": store_error(403, "AccessDenied"),
    "expired": store_error(400, "ExpiredToken"),
    "busy": store_error(503, "SlowDown"),
    "redirect": elsewhere,
    "resets": setting(reset_after=-1),
    "breaks off": setting(reset_after=1000),
    "stalls": setting(stall_after=-1),
    "shifted": shifted,
}


@pytest.mark.parametrize("transport", ["native", "sdk"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_body(
    server: ObjectServer, planted: None, heard: Listener, capfd: pytest.CaptureFixture[str], transport: str, name: str
) -> None:
    put_model(server)
    server.faults = [Fault(FAILURES[name], times=None)]
    with warnings.catch_warnings(record=True) as warned, pytest.raises(StreamError) as caught:
        warnings.simplefilter("always")
        streamer.load(Line(), "s3://bucket/m", options_for(server.url, transport=transport))
    printed = capfd.readouterr()
    assert server.counters.requests["GET"] >= 1
    said = [
        everything_said(caught.value),
        *heard.lines,
        printed.out,
        printed.err,
        *(str(each.message) for each in warned),
    ]
    assert_clean("\n".join(said), server)
    if name == "quotes the request":
        assert "***" in str(caught.value), "the store's words are kept, without what signs"


@pytest.mark.parametrize("method", ["LIST", "HEAD"])
@pytest.mark.parametrize("name", ["quotes the request", "denied", "expired", "busy", "redirect", "resets"])
def test_a_failing_control_plane(server: ObjectServer, planted: None, heard: Listener, method: str, name: str) -> None:
    put_model(server)
    server.faults = [Fault(FAILURES[name], method=method, times=None)]

    async def run() -> None:
        source = open_source("s3://bucket/m", StreamConfig.resolve(options_for(server.url)))
        try:
            await (source.list() if method == "LIST" else source.stat("model.safetensors"))
        finally:
            await source.close()

    with pytest.raises(SourceError) as caught:
        asyncio.run(run())
    assert_clean("\n".join([everything_said(caught.value), *heard.lines]), server)


def test_a_load_that_works_and_its_report(
    server: ObjectServer, planted: None, heard: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    put_model(server)
    server.faults = [Fault(FAILURES["breaks off"], skip=1), Fault(FAILURES["expired"], skip=3)]
    model = Line()
    report = streamer.load(model, "s3://bucket/m", options_for(server.url, verify=True, retry_attempts=4))
    assert bool((model.weight == 1).all())
    printed = capfd.readouterr()
    said = [json.dumps(report.to_dict()), repr(report), report.summary(), *heard.lines, printed.out, printed.err]
    assert_clean("\n".join(said), server)


def test_what_our_objects_look_like(server: ObjectServer, planted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is alive while a load goes on, as a debugger or an error page would show it."""
    put_model(server)

    async def run() -> str:
        with Proxy(f"user:{PROXY_PASSWORD}") as proxy:
            monkeypatch.setenv("HTTP_PROXY", f"http://user:{PROXY_PASSWORD}@127.0.0.1:{proxy.port}")
            config = StreamConfig.resolve(options_for(server.url))
            source = open_source("s3://bucket/m", config)
            assert isinstance(source, S3Source)
            try:
                (item,) = await source.list()
                await source.read_into(item, 0, [memoryview(bytearray(10))])
                address = await source._address(item, None)
                client = await source._open()
                assert "X-Amz-Security-Token" in address.request_target, "the test looks at the right thing"
                assert address.origin.proxy is not None
                assert PROXY_PASSWORD not in (address.origin.proxy.authorization or "")
                assert source._lanes is not None
                (lane,) = source._lanes._lanes
                connections = [each for idle in lane.pool._idle.values() for each in idle]
                assert connections
                shown = [source, vars(source), config, item, address, address.origin, client]
                shown += [source._lanes, lane, vars(lane), lane.pool, connections]
                return "\n".join(f"{each!r} {each}" for each in shown)
            finally:
                await source.close()

    said = asyncio.run(run())
    assert_clean(said, server)
    assert "Basic " not in said


@pytest.mark.parametrize("transport", ["native", "sdk"])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("trouble", ["refuses", "gone"])
def test_a_proxy_with_a_password(
    server: ObjectServer,
    planted: None,
    heard: Listener,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    scheme: str,
    trouble: str,
) -> None:
    with Proxy("user:other") as proxy:
        port = proxy.port if trouble == "refuses" else 1
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://user:{PROXY_PASSWORD}@127.0.0.1:{port}")
        options = options_for(f"{scheme}://127.0.0.1:{server.port}", transport=transport)

        async def run(step: str) -> None:
            source = open_source("s3://bucket/m", StreamConfig.resolve(options))
            try:
                if step == "list":
                    await source.list()
                await source.read_into(streamer_item(), 0, [memoryview(bytearray(10))])
            finally:
                await source.close()

        for step in ("list", "read"):
            with pytest.raises(SourceError) as caught:
                asyncio.run(run(step))
            assert_clean("\n".join([everything_said(caught.value), *heard.lines]), server)


def streamer_item() -> streamer.sources.ObjectInfo:
    return streamer.sources.ObjectInfo("model.safetensors", 1000, '"x"')


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{MARK}/half@proxy:3128",
        f"http://user:x@{MARK}/half@proxy:3128",
        f"http://user:x@{MARK}#half@proxy:3128",
        f"socks5://user:{MARK}@proxy:1080",
        f"https://user:{MARK}@proxy:1080",
        f"http://user:{MARK}@[proxy:3128",
    ],
)
def test_a_proxy_url_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        proxy_for(url, "set transport=sdk")
    assert_clean(everything_said(caught.value))


@pytest.mark.parametrize("where", ["url", "endpoint option", "endpoint variable"])
def test_keys_in_a_url_are_refused_unseen(
    server: ObjectServer, planted: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    options = options_for(server.url)
    url = f"s3://AKIA:{MARK}@bucket/m" if where == "url" else "s3://bucket/m"
    if where != "url":
        options["endpoint_url"] = f"http://AKIA:{MARK}@127.0.0.1:{server.port}"
    if where == "endpoint variable":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", str(options.pop("endpoint_url")))
    with pytest.raises(ConfigError, match="no place for keys|has a user name") as caught:
        streamer.load(Line(), url, options)
    assert_clean(everything_said(caught.value))


def _prints(code: str) -> Callable[[Setup], None]:
    def spoil(setup: Setup) -> None:
        process(setup)
        setup.write("helper.py", code)

    return spoil


def _role_refused(setup: Setup) -> None:
    web_identity(setup)
    setup.write("web-token", f"{MARK}.web.token")
    service = setup.serve(lambda _: sts_error(403, "AccessDenied", "not you"))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)


def _role_garbled(setup: Setup) -> None:
    web_identity(setup)
    setup.write("web-token", f"{MARK}.web.token")
    service = setup.serve(lambda call: sts_error(200, "x", call.body))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)


def _outdated(setup: Setup) -> None:
    run_process(setup, [Keys(KEYS.access, KEYS.secret, KEYS.token, lifetime_seconds=-60)])


IDENTITY_FAILURES: dict[str, Callable[[Setup], None]] = {
    "prose": _prints(f"print('your key is {MARK}')"),
    "cut short": _prints(f"""print('{{"Version": 1, "SecretAccessKey": "{MARK}')"""),
    "no access key": _prints(f"""print('{{"Version": 1, "SecretAccessKey": "{MARK}"}}')"""),
    "other version": _prints(f"""print('{{"Version": 9, "SecretAccessKey": "{MARK}"}}')"""),
    "not text": _prints(f"import sys; sys.stdout.buffer.write(b'\\xff{MARK}')"),
    "a list": _prints(f"""print('["{MARK}"]')"""),
    "exit code": _prints(f"import sys; print('{MARK}'); sys.exit('sealed')"),
    "outdated": _outdated,
    "role refused": _role_refused,
    "role garbled": _role_garbled,
}


@pytest.mark.parametrize("name", IDENTITY_FAILURES)
def test_credentials_that_do_not_come(server: ObjectServer, setup: Setup, heard: Listener, name: str) -> None:
    IDENTITY_FAILURES[name](setup)
    with pytest.raises(SourceError) as caught:
        streamer.load(Line(), "s3://bucket/m", options_for(server.url))
    assert_clean("\n".join([everything_said(caught.value), *heard.lines]))


def test_a_renewal_that_a_proxy_stops(
    server: ObjectServer, setup: Setup, caplog: pytest.LogCaptureFixture, heard: Listener
) -> None:
    """aiobotocore warns of it, and its traceback quotes the proxy's URL; that much of its log is on by default."""
    web_identity(setup)
    setup.patch.delenv("AWS_ENDPOINT_URL_STS")
    with Proxy("user:other") as proxy:
        setup.patch.setenv("HTTPS_PROXY", f"http://user:{PROXY_PASSWORD}@127.0.0.1:{proxy.port}")
        with caplog.at_level(logging.WARNING), pytest.raises(SourceError) as caught:
            streamer.load(Line(), "s3://bucket/m", options_for(server.url))
    assert "ClientHttpProxyError" in caplog.text, "the traceback is there"
    assert_clean("\n".join([everything_said(caught.value), caplog.text, *heard.lines]))


@pytest.mark.parametrize("name", ["proxy", "sso"])
def test_the_command_line_as_it_is(server: ObjectServer, setup: Setup, name: str) -> None:
    """Nobody asked for a log, so all there is to see is our one line."""
    if name == "proxy":
        web_identity(setup)
        setup.patch.delenv("AWS_ENDPOINT_URL_STS")
    else:
        log_in(setup, -timedelta(hours=1))
    with Proxy("user:other") as proxy:
        setup.patch.setenv("HTTPS_PROXY", f"http://user:{PROXY_PASSWORD}@127.0.0.1:{proxy.port}")
        options = [f"--option={key}={value}" for key, value in options_for(server.url).items()]
        command = [str(Path(sys.executable).parent / "s3stream"), "inspect", "s3://bucket/m", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (6 if name == "proxy" else 5)
    assert re.fullmatch(r"s3stream: s3://bucket/m/: .*\n", done.stderr), done.stderr
    assert_clean(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((["inspect"], name) for name in ("quotes the request", "breaks off", "expired", "proxy", "process")),
        *((["plan", "--tp", "2"], name) for name in ("quotes the request", "process")),
        *((["doctor"], name) for name in ("quotes the request", "breaks off", "expired", "proxy", "process")),
    ],
)
def test_the_command_line(
    server: ObjectServer, planted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], name: str
) -> None:
    """As a user runs it, in Python's development mode: asyncio's debug log, warnings and all."""
    put_model(server)
    server.put("bucket", "m/config.json", b" " * 5000 + b"{}")
    environ = {**os.environ, "PYTHONASYNCIODEBUG": "1"}
    if name == "proxy":
        environ["HTTP_PROXY"] = f"http://user:{PROXY_PASSWORD}@127.0.0.1:1"
    elif name == "process":
        (tmp_path / "helper.py").write_text(f"print('{MARK}')")
        (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {tmp_path / 'helper.py'}\n")
        environ = {key: value for key, value in environ.items() if not key.startswith("AWS_")}
        environ |= {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_EC2_METADATA_DISABLED": "true"}
        environ["AWS_SHARED_CREDENTIALS_FILE"] = str(tmp_path / "none")
    else:
        server.faults.append(Fault(FAILURES[name], times=None))
    options = [f"--option={key}={value}" for key, value in options_for(server.url).items()]
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)\n"
        f"for name in {OTHERS!r}: logging.getLogger(name).setLevel(logging.WARNING)\n"
        "from streamer.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code, command[0], "s3://bucket/m", *command[1:], *options],
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
        check=False,
    )
    assert done.returncode in {5, 6}, done.stdout + done.stderr
    assert "asyncio" in done.stderr, "the log was on"
    # The doctor's first request asks whether S3 is there at all, as nobody.
    assert_clean(done.stdout + done.stderr, server, unsigned=1 if command == ["doctor"] else 0)
