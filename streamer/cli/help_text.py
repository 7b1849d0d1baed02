"""What ``--help`` says below the options: ways to call each command, and exit codes."""

from __future__ import annotations

from collections.abc import Mapping

from streamer.cli.exit_codes import EXIT_CODES, FAILED

__all__ = ["EXAMPLES", "epilog", "exit_codes"]

#: By command.
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "demo": ("s3stream demo --tp 4",),
    "inspect": ("s3stream inspect s3://bucket/org/model", "s3stream inspect gs://bucket/org/model --anonymous --json"),
    "fetch": ("s3stream fetch s3://bucket/org/model /models/model", "s3stream fetch --check /models/model"),
    "verify": (
        "s3stream verify s3://bucket/org/model --write",
        "s3stream verify s3://bucket/org/model",
        "s3stream verify s3://bucket/org/model /models",
    ),
    "doctor": ("s3stream doctor s3://bucket/org/model --endpoint-url https://minio.example.com:9000",),
    "bench": ("s3stream bench s3://bucket/org/model --concurrency 16,32,64 --sizes 8MiB",),
    "plan": ("s3stream plan s3://bucket/org/model --tp 8", "s3stream plan s3://bucket/m --engine vllm --tp 8 --ep"),
    "explain": ("s3stream explain s3://bucket/llama model.layers.0.self_attn.k_proj.weight --tp 8 --rank 3",),
}


def epilog(command: str) -> str:
    """Return the last lines of a command's help, as Markdown."""
    calls = "\n\n".join(f"    {example}" for example in EXAMPLES[command])
    return (
        f"Examples:\n\n{calls}\n\nExit codes: `s3stream --help`. More: docs/operations.md and docs/troubleshooting.md."
    )


def exit_codes() -> str:
    """Return all exit codes with their meanings, as Markdown."""
    meanings: dict[int, list[str]] = {
        0: ["success"],
        FAILED: ["the command ran, and its result is not as it should be"],
    }
    for _, code, meaning in sorted(EXIT_CODES, key=lambda row: row[1]):
        meanings.setdefault(code, []).append(meaning)
    lines = [f"- {code}: {'; or '.join(said)}" for code, said in meanings.items()]
    return "\n".join(["Exit codes:\n", *lines, "- 130, 143: ended by SIGINT or SIGTERM"])
