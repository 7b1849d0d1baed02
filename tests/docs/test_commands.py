"""What the documentation tells people to type is run as it stands, or says why not, and exists."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from streamer.cli.app import app
from streamer.cli.exit_codes import EXIT_CODES
from streamer.cli.help_text import EXAMPLES
from streamer.cli.store import start_store
from streamer.config import StreamConfig
from tests.cli.test_cli import run
from tests.docs.markdown import DOCUMENTS, ROOT, Block, Command, blocks, calls, commands, named_options
from tests.servers.s3_client import s3_client
from tests.sparse import LLAMA_3_70B, Tensor, write_sparse

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
RUN = [block for block in BLOCKS if block.language == "bash" and block.not_run is None]
CONFIG = {
    **LLAMA_3_70B,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
}
#: Options of the vLLM plugin beside those of StreamConfig.
PLUGIN_OPTIONS = {"sharded", "pattern", "enable_weights_track"}
#: Reasons for which a block may be left to others. What is said must begin with one of them.
REASONS = ("CI runs it", "needs ", "changes ")

SAMPLE = r"""
`s3stream fetch SRC DEST [SRC DEST ...] [--mode metadata\|weights]` and `s3stream://bucket/x`, `--load-format
s3stream`, S3STREAM_* and `S3STREAM_PIN`

<!-- not run: needs a GPU -->
```bash
A=1 .venv/bin/s3stream nope --tp 2 && s3stream --version # s3stream no
```
```console
$ s3stream plan u \
    --option a=1 -o b=2
it isn't
```
```bash
vllm serve --model-loader-extra-config '{"c": 1}'
```
"""


def small_llama() -> Iterator[Tensor]:
    hidden, wide, words = 512, 1408, 4096
    yield "model.embed_tokens.weight", "BF16", (words, hidden)
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", "BF16", (hidden, hidden)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            yield f"{prefix}mlp.{name}_proj.weight", "BF16", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", "BF16", (hidden,)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (words, hidden)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with versions that has the checkpoint of all examples, s3://bucket/org/model."""
    folder = tmp_path_factory.mktemp("model")
    write_sparse(folder, small_llama(), CONFIG, shard_bytes=16 << 20)
    (folder / "tokenizer.json").write_text("{}")
    with start_store() as url:
        client = s3_client(url)
        client.create_bucket(Bucket="bucket")
        client.put_bucket_versioning(Bucket="bucket", VersioningConfiguration={"Status": "Enabled"})
        for path in folder.iterdir():
            client.upload_file(str(path), "bucket", f"org/model/{path.name}")
        client.close()
        yield url


@pytest.mark.parametrize("block", RUN, ids=str)
def test_blocks_run_as_they_are(block: Block, store: str, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "S3STREAM_ENDPOINT_URL": store,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_that_are_not_run_say_why() -> None:
    assert len(RUN) >= 5
    for block in BLOCKS:
        if block.not_run is not None:
            assert block.language == "bash", f"{block}: only blocks of bash are run"
            assert block.not_run.startswith(REASONS), f"{block}: {block.not_run}"


def test_commands_that_s3stream_has_are_not_left_out_without_need() -> None:
    for block in BLOCKS:
        words = [line.split()[0] for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
        if block.language == "bash" and set(words) == {"s3stream"}:
            assert block.not_run is None, f"{block} can be run"


def known(command: Command) -> bool:
    group: Any = typer.main.get_command(app)
    parameters = group.commands[command.name].params if command.name in group.commands else group.params
    names = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return (not command.name or command.name in group.commands) and set(command.options) <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document: Path) -> None:
    for command in commands(document):
        assert known(command), f"{document.name}: {command}"
    options = {field.name for field in dataclasses.fields(StreamConfig)} | PLUGIN_OPTIONS
    assert set(named_options(document)) <= options


def test_help_explains_every_command_and_option() -> None:
    group: Any = typer.main.get_command(app)
    assert set(EXAMPLES) == set(group.commands)
    for _, code, meaning in EXIT_CODES:
        assert re.search(rf"^- {code}: .*{meaning}", group.epilog, re.M)
    for name, command in group.commands.items():
        assert len(command.help) > 80, name
        for example in EXAMPLES[name]:
            assert example in command.epilog
            (call,) = calls(example)
            assert call.name == name
            assert known(call), example
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"
            assert len(parameter.help.split()) > 3, f"{name} {parameter.name}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_is_laid_out_for_reading(name: str) -> None:
    text = run(name, "--help", COLUMNS="200", NO_COLOR="1", TERM="dumb").stdout
    lines = [line.strip() for line in text.splitlines()]
    assert set(EXAMPLES[name]) <= set(lines), "each example is a line of its own"
    assert "`" not in text


def test_commands_are_found_in_blocks_and_text(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(SAMPLE)
    assert list(commands(document)) == [
        Command("fetch", ("--mode",)),
        Command("nope", ("--tp",)),
        Command("", ("--version",)),
        Command("plan", ("--option", "-o")),
    ]
    assert [known(command) for command in commands(document)] == [True, False, True, True]
    assert list(named_options(document)) == ["pin", "a", "b", "c"]
    assert [(block.line, block.language, block.not_run) for block in blocks(document)] == [
        (6, "bash", "needs a GPU"),
        (9, "console", None),
        (14, "bash", None),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_python_are_right(document: Path) -> None:
    for block in blocks(document):
        if block.language == "python":
            compile(block.text, str(block), "exec")
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", found.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{document.name}: {target}"


def test_documents_are_found() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in DOCUMENTS} >= {
        "README.md",
        "docs/operations.md",
        "docs/troubleshooting.md",
        "docs/comparison.md",
    }
