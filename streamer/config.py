"""`StreamConfig`: every option, its unit, its default and the trade-off behind it, in one place.

Values come from ``S3STREAM_<OPTION>`` variables, then from a mapping given by the engine or the
command line, which wins. Unknown names are errors that say which known name is nearest. Credentials
are never options: botocore resolves them, so they cannot leak through a configuration dump.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamer.errors import ConfigError
from streamer.option_values import check_type, convert

__all__ = ["LEAST_BUFFER_BYTES", "StreamConfig"]

KIB = 1 << 10
MIB = 1 << 20

ENVIRONMENT_PREFIX = "S3STREAM_"
LEAST_BUFFER_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How to load. Frozen and validated; build it with `resolve` to honour the environment.

    Raises:
        ConfigError: a value is out of range, of the wrong type, or contradicts another.
    """

    mode: Literal["trace", "eager"] = "trace"
    """``trace`` fetches only the bytes that this rank's parameters take; ``eager`` reads whole tensors
    in file order and works with any model code."""

    transport: Literal["native", "sdk"] = "native"
    """``native`` receives bodies straight into their destination; ``sdk`` reads them through
    aiobotocore, at several times the CPU, for set-ups that the native reader does not cover."""

    concurrency: int = 32
    """Ranged GETs in flight per process to begin with. At 90 MB/s per connection, 32 fill a 25 Gbit/s link."""

    max_concurrency: int = 128
    """Ranged GETs in flight at most. They are doubled as long as that brings 15 % more; 128 fill a 100 Gbit/s link.
    `buffer_bytes` limits them too. Not above `concurrency`: it is left as it is."""

    receive_loops: int | None = None
    """Most event loops, each in a thread, that receive bodies of this process. One is enough until a core is the limit,
    near 3 GiB/s, or 0.8 over TLS; more are added when that is measured. Default: one for each core, up to 8."""

    request_bytes: int = 8 * MIB
    """Largest single ranged GET. CPU per byte is flat from 4 MiB up; smaller requests retry cheaper,
    larger ones pay the first-byte latency less often."""

    buffer_bytes: int = 1024 * MIB
    """Cap on host memory for bytes in flight, beside the parameters; taken as it is needed. It may be smaller than
    the largest tensor. Requests shrink when the cap leaves less than `request_bytes` per connection: eight ranks
    that share a gigabyte make requests of 4 MiB. Stores limit requests per second, so less costs a large fleet time."""

    coalesce_gap_bytes: int = 512 * KIB
    """Unneeded bytes between two needed ranges that are read rather than paid for with a second
    request. The break-even is 122 KiB when CPU is the limit (34 us a request against 0.30 s per GiB)
    and 2.6 MiB when connections are (30 ms to the first byte at 90 MB/s); this is their geometric mean."""

    header_read_bytes: int = 192 * KIB
    """First, speculative read of each file; a longer header costs a second request. The best of those
    tried by ``tests/benchmarks/header_read.py`` over the headers of eleven well-known checkpoints."""

    index: Literal["auto", "ignore"] = "auto"
    """``ignore`` takes the union of the files' headers instead of ``*.safetensors.index.json``."""

    strict: bool = True
    """Whether parameters that nothing was loaded into are an error; otherwise they are only reported."""

    integrity: Literal["store", "manifest", "checksums"] = "store"
    """``manifest`` holds all weights against the digests in ``s3stream-manifest.json``, which lies beside them and
    is made by ``s3stream verify URL --write``; ``checksums`` holds files, or the parts they were uploaded in, of which
    every byte is read against the checksum that S3 keeps, and reports the others; ``store`` trusts the store to keep
    what it was given."""

    verify: bool = False
    """Whether to read a sample of every parameter's source again after the load and compare."""

    report_dir: str | None = None
    """Folder to which engine plugins write each rank's `LoadReport` as JSON."""

    report_file: str | None = None
    """File to which every load writes its `LoadReport` as JSON, or how it failed. ``{model}`` (the last part of the
    URL), ``{rank}`` and ``{pid}`` are filled in; without ``{rank}``, ranks above 0 put theirs before the suffix."""

    metrics_file: str | None = None
    """The same for metrics in Prometheus' text format, as node_exporter's textfile collector takes them:
    ``/var/lib/node_exporter/s3stream-{rank}.prom``."""

    share: Literal["auto", "off", "require"] = "auto"
    """Whether the ranks of one machine fetch each byte once and hand it to each other: if they can, never, or
    else the load fails. It takes a process group (engines have one) and ``mode=trace``. `buffer_bytes` is then what
    all ranks of the machine have together."""

    share_timeout_seconds: float = 600.0
    """How long a rank waits for the others when they meet: before weights are read, and when they have been."""

    overlap_tensors: int = 8192
    """After how many tensors what was traced so far is fetched while the trace goes on; 0: never. Tracing so many takes
    a second, and each such start costs the tail of the requests before it, which is more where there are fewer."""

    plan_cache: bool = False
    """Whether to keep what a load's trace found in `cache_dir`, for the same model, engine, layout and rank, and to do
    that the next time, instead of running the model's loading code. What that does beside the model is left out."""

    cache_dir: str | None = None
    """Folder for configuration, tokenizers and code of models served from URLs and for plans; never for weights.
    ``$XDG_CACHE_HOME/s3stream`` or ``~/.cache/s3stream`` if not given."""

    retry_attempts: int = 8
    """Consecutive failures of one range, without progress between them, before giving up."""

    retry_deadline_seconds: float = 300.0
    """Longest time one range may go without progress, waits included. Throttling can last minutes."""

    retry_first_wait_seconds: float = 0.2
    """Upper bound of the first wait; it doubles with each failure and is then drawn at random."""

    retry_longest_wait_seconds: float = 20.0
    """Cap on one wait. A longer ``Retry-After`` is honoured up to the deadline."""

    connect_timeout_seconds: float = 10.0
    """TCP and TLS establishment, proxy included."""

    idle_timeout_seconds: float = 30.0
    """A response that delivers less than `min_rate_bytes_per_second` over this long is abandoned and
    its rest asked for again. There is no total timeout: slow but moving downloads finish."""

    min_rate_bytes_per_second: int = 1024
    """Rate below which a response counts as stalled; 0 accepts any byte as a sign of life."""

    max_requests_per_second: float | None = None
    """Cap on ranged GETs of this process, for stores that bill or throttle by the request."""

    max_bytes_per_second: int | None = None
    """Cap on the bytes asked for, for links that others need too."""

    hedge: bool = True
    """Whether a read that takes far longer than its like is asked for a second time, and the first to come
    counts. At most two such duplicates are under way at once."""

    hedge_after_seconds: float = 2.0
    """How long a read must have taken, at least, before it is hedged."""

    use_uvloop: bool = False
    """Run the event loop on uvloop, which must be installed. It helps most under TLS."""

    endpoint_url: str | None = None
    """Endpoint of the store. For ``s3://`` it redirects S3 alone, never STS or SSO; default: as botocore resolves it.
    For ``gs://`` default: ``STORAGE_EMULATOR_HOST``, which is asked anonymously, or Google's."""

    region: str | None = None
    """Bucket region. Default: as botocore resolves it, else ``us-east-1``."""

    profile: str | None = None
    """Named profile of the shared AWS configuration. Default: as botocore resolves it."""

    anonymous: bool = False
    """Send requests without a signature or token and look for no credentials (public buckets)."""

    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """``auto`` uses path style for custom endpoints, as botocore does."""

    ca_bundle: str | None = None
    """PEM file of trusted authorities. Default: ``AWS_CA_BUNDLE`` or the profile's ``ca_bundle``; for ``gs://`` also
    ``REQUESTS_CA_BUNDLE``."""

    tls_verify: bool = True
    """Setting this to false accepts any certificate; a warning says so on every load."""

    requester_pays: bool = False
    """Agree to pay for the requests, which buckets with requester pays insist on. For ``gs://`` the project that
    ``GOOGLE_CLOUD_PROJECT`` names pays, or that of the credentials."""

    pin: Literal["etag", "version"] = "etag"
    """What holds an S3 object still during a load. ``etag``: one that is replaced stops the load. ``version``: it is
    read on as it was, which needs a bucket with versioning, ``s3:GetObjectVersion``, and one HEAD for each object.
    Reads from GCS name the generation of the object in any case, and get it for as long as the bucket keeps it."""

    sse_customer_key_file: str | None = None
    """File of the 32 bytes with which the customer had S3 encrypt the objects (SSE-C). Keys of S3's own and of
    KMS need nothing."""

    presign_seconds: int = 3600
    """Life of a signed object URL. It is renewed well before, and at once when the store says expired."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check_type(field.name, getattr(self, field.name), hints[field.name])
        for name, least in (
            ("concurrency", 1),
            ("max_concurrency", 1),
            ("request_bytes", 64 * KIB),
            ("buffer_bytes", LEAST_BUFFER_BYTES),
            ("coalesce_gap_bytes", 0),
            ("overlap_tensors", 0),
            ("header_read_bytes", 8),
            ("retry_attempts", 1),
            ("min_rate_bytes_per_second", 0),
            ("presign_seconds", 60),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"option {name} must be at least {least}, not {getattr(self, name)}")
        for name in (
            "retry_deadline_seconds",
            "retry_first_wait_seconds",
            "retry_longest_wait_seconds",
            "connect_timeout_seconds",
            "idle_timeout_seconds",
            "hedge_after_seconds",
            "share_timeout_seconds",
        ):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"option {name} must be a positive number of seconds, not {value}")
        for name in ("max_requests_per_second", "max_bytes_per_second"):
            cap = getattr(self, name)
            if cap is not None and not 0 < cap < float("inf"):
                raise ConfigError(f"option {name} must be a positive number or nothing, not {cap}")
        if self.receive_loops is not None and self.receive_loops < 1:
            raise ConfigError(f"option receive_loops must be at least 1, not {self.receive_loops}")
        if self.presign_seconds > 7 * 24 * 3600:
            raise ConfigError("option presign_seconds may be at most 604800 (SigV4 allows seven days)")
        if self.share == "require" and self.mode == "eager":
            raise ConfigError("options share=require and mode=eager contradict each other: eager loads share nothing")
        if self.anonymous and self.profile:
            raise ConfigError("options anonymous and profile contradict each other; give one")

    @classmethod
    def resolve(
        cls, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> StreamConfig:
        """Build a configuration from the environment and then `options`, which win.

        Args:
            options: option names to values; strings are converted, byte counts may have a unit
                (``"64 MiB"``).
            environ: defaults to ``os.environ``; only names that begin with ``S3STREAM_`` are read.

        Raises:
            ConfigError: an unknown name, or a value that does not fit.
        """
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        environ = os.environ if environ is None else environ
        for variable in sorted(environ):
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in hints:
                raise _unknown(f"environment variable {variable}", name, known, prefix=ENVIRONMENT_PREFIX)
            values[name] = convert(variable, environ[variable], hints[name])
        for name, value in (options or {}).items():
            if name not in hints:
                raise _unknown(f"option {name!r}", str(name), known)
            values[name] = convert(f"option {name}", value, hints[name], is_bytes=name.endswith("_bytes"))
        return cls(**values)

    def replace(self, **changes: Any) -> StreamConfig:
        """Return a copy with `changes`, validated anew."""
        return dataclasses.replace(self, **changes)


def _unknown(what: str, name: str, known: list[str], prefix: str = "") -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    spelled = (prefix + near[0].upper() if prefix else near[0]) if near else None
    hint = f"did you mean {spelled}?" if spelled else f"known options: {', '.join(known)}"
    return ConfigError(f"unknown {what}", hint=hint)
