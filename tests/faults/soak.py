"""Loads under random mixtures of faults, for as long as you like: ``python -m tests.faults.soak --rounds N --seed S``.

Every request draws a fault with some probability. A load must end in exact parameters or in an error about the
store, in time; an error about the checkpoint would mean that wrong bytes got through. A round that fails is run
again alone with ``--first ROUND --rounds 1``.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from streamer import errors
from streamer.errors import SourceError
from tests.conftest import SECRET_KEY
from tests.faults.loading import OPTIONS, Outcome, load_once, load_together, longest_seconds, new_server
from tests.servers.faults import CATALOGUE, Mixture

#: All but the certificate, which needs a server with TLS.
FAULTS = [fault for fault in CATALOGUE if fault.name != "certificate not trusted"]
SURVIVABLE = [fault for fault in FAULTS if fault.is_survivable]
#: What it is safe to call a hang.
_HANG_SECONDS = 120.0
#: A try that delivered this much starts the count of a range's failures anew; see `streamer.transport.reader`.
_PROGRESS_BYTES = 256 << 10
_READS = 60  # more than any of the loads here has


@dataclass
class Summary:
    """What came of the rounds.

    Attributes:
        struck: how often each fault struck.
        violations: loads that broke the promise: round and what happened.
    """

    rounds: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    longest: float = 0.0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    @property
    def loads(self) -> int:
        return sum(self.ended.values())

    def __str__(self) -> str:
        failed = ", ".join(f"{count} {name}" for name, count in self.ended.most_common() if name != "exact")
        lines = [
            f"{self.rounds} rounds, {self.loads} loads in {self.seconds:.0f} s, the longest {self.longest:.2f} s",
            f"exact: {self.ended['exact']}, with {self.retries} retries; errors: {failed or 'none'}",
            f"faults struck: {sum(self.struck.values())}, of {len(self.struck)} kinds",
            f"violations: {len(self.violations)}",
        ]
        return "\n".join([*lines, *self.violations])


@dataclass(frozen=True)
class Round:
    """How one round is set up; everything follows from the seed and the number.

    Attributes:
        together: the ranks share what they read, else they load one after the other.
    """

    number: int
    mode: str
    ranks: int
    rate: float
    only_survivable: bool
    options: dict[str, object]
    together: bool

    @classmethod
    def draw(cls, seed: int, number: int) -> Round:
        rng = random.Random(f"{seed} {number}")
        options = {
            "request_bytes": rng.choice([64 << 10, 128 << 10, 512 << 10]),
            "header_read_bytes": rng.choice([64, 4096]),  # too little, so that a second read follows
            "concurrency": rng.choice([1, 4, 16]),
            "retry_attempts": rng.choice([2, 4, 8]),
            "retry_deadline_seconds": 2.0,
            "idle_timeout_seconds": 0.2,
            "min_rate_bytes_per_second": 50_000,
            "transport": rng.choice(["native"] * 7 + ["sdk"]),
            "use_uvloop": rng.random() < 0.25,
            **({"hedge_after_seconds": 0.05} if rng.random() < 0.5 else {}),
        }
        mode, ranks = rng.choice(["trace", "eager"]), rng.choice([1, 2])
        return cls(
            number,
            mode=mode,
            ranks=ranks,
            rate=rng.choice([0.02, 0.1, 0.3, 0.6]),
            only_survivable=rng.random() < 0.7,
            options=options,
            together=mode == "trace" and ranks == 2 and rng.random() < 0.7,
        )


def run(rounds: int, seed: int, *, first: int = 0, say: Callable[[str], None] = lambda line: None) -> Summary:
    """Run `rounds` rounds, from number `first` on; nothing is raised, see `Summary.violations`."""
    summary = Summary()
    began = time.monotonic()
    for number in range(first, first + rounds):
        one = Round.draw(seed, number)
        for rank in range(1 if one.together else one.ranks):
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
            _run_load(one, rank, seed, summary)
            faulthandler.cancel_dump_traceback_later()
        summary.rounds += 1
        summary.seconds = time.monotonic() - began
        if summary.rounds % 100 == 0:
            say(f"{summary}\n")
    return summary


def _run_load(one: Round, rank: int, seed: int, summary: Summary) -> None:
    faults = SURVIVABLE if one.only_survivable else FAULTS
    with new_server() as server:
        mixture = Mixture(server, faults, rate=one.rate, seed=seed * 1_000_003 + one.number * 2 + rank)
        try:
            if one.together:
                outcomes = load_together(server.url, one.options, size=one.ranks)
            else:
                outcomes = [load_once(server.url, one.mode, one.options, rank=rank, size=one.ranks)]
            wrong = next(filter(None, (_judge(one, outcome) for outcome in outcomes)), "")
            if len({outcome.ended for outcome in outcomes}) > 1:
                wrong = f"the ranks ended differently: {outcomes}"
        except Exception:
            outcomes = [Outcome("not our error", 0.0)]
            wrong = traceback.format_exc()
    summary.ended.update(outcome.ended for outcome in outcomes)
    summary.struck += mixture.struck
    summary.retries += sum(outcome.retries or 0 for outcome in outcomes)
    summary.longest = max(summary.longest, *(outcome.seconds for outcome in outcomes))
    if wrong:
        struck = ", ".join(f"{count} {name}" for name, count in mixture.struck.items())
        summary.violations.append(f"{one}, rank {rank}: {wrong}; struck: {struck}")


def _judge(one: Round, outcome: Outcome) -> str:
    """Return what is wrong, or an empty string."""
    config = {**OPTIONS, **one.options}
    request_bytes, concurrency, attempts = config["request_bytes"], config["concurrency"], config["retry_attempts"]
    assert isinstance(request_bytes, int)
    assert isinstance(concurrency, int)
    assert isinstance(attempts, int)
    # Every try may be told to wait for a second, which the deadline allows but once or twice.
    for_one_range = (1 + request_bytes // _PROGRESS_BYTES) * longest_seconds(one.options, extra=2.0)
    if outcome.elapsed_seconds > for_one_range:
        return f"{outcome} took longer than {for_one_range:.1f} s to give up one range"
    for_all = (3 + math.ceil(_READS / concurrency)) * for_one_range
    if outcome.seconds > min(for_all, _HANG_SECONDS):
        return f"{outcome} took longer than {for_all:.1f} s"
    if outcome.is_exact:
        return ""
    kind = getattr(errors, outcome.ended, None)
    if kind is None or not issubclass(kind, SourceError):
        return str(outcome)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    options = parser.parse_args()
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3STREAM_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "soak",
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    summary = run(options.rounds, options.seed, first=options.first, say=lambda line: print(line, flush=True))
    print(summary)
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
