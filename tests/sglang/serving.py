"""Runs the real server on CPU."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.serving import MAX_TOKENS, PROMPTS, EngineServer

__all__ = ["Server", "engine_environment", "expected_tokens", "two_ranks"]

_ROOT = Path(__file__).parent.parent.parent


def engine_environment(scratch: Path, *, access_key: str, secret_key: str, endpoint_url: str) -> dict[str, str]:
    """Return what the server's processes see: the store, the stubs, none of the developer's options, no hub."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "S3STREAM_", "SGLANG_")) and not name.lower().endswith("_proxy")
    }
    paths = [str(Path(__file__).parent / "site"), str(_ROOT), str(_ROOT / "plugins")]
    return {
        **inherited,
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(scratch / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(scratch / "no-credentials"),
        "S3STREAM_CACHE_DIR": str(scratch / "s3stream"),
        "SGLANG_CACHE_DIR": str(scratch / "sglang"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_STUBS": "torchvision,sgl_kernel,IPython",
        "HF_HOME": str(scratch / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def two_ranks() -> dict[str, str]:
    """Return the variables that give each of two ranks one core."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[min(1, len(cores) - 1)]}"}


def expected_tokens(folder: Path) -> list[list[int]]:
    """Continue `PROMPTS` greedily with Transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(
            ids, do_sample=False, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, pad_token_id=0
        )
        found.append(made[0, ids.shape[1] :].tolist())
    return found


class Server(EngineServer):
    """SGLang's server.

    Args:
        arguments: of the command line, behind the model.
        launch: start ``python -m sglang.launch_server`` instead of ``sglang serve``.
    """

    start_seconds = 240.0

    def __init__(
        self, model: str, arguments: Sequence[str], environment: dict[str, str], log: Path, *, launch: bool = False
    ) -> None:
        def command(port: int) -> list[str]:
            command = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve"]
            if launch:
                command = [sys.executable, "-m", "sglang.launch_server"]
            command += ["--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
            command += ["--load-format", "s3stream", "--device", "cpu", "--dtype", "float32", "--context-length", "64"]
            command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            command += ["--grammar-backend", "none", "--max-total-tokens", "1024", "--max-running-requests", "4"]
            return [*command, "--mem-fraction-static", "0.3", "--skip-server-warmup", *arguments]

        super().__init__(command, environment, log)

    def complete(self) -> list[list[int]]:
        """Continue `PROMPTS` greedily; return the tokens."""
        sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True}
        body = json.dumps({"text": PROMPTS, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return [answer["output_ids"] for answer in json.load(response)]

    def update(self, model: str, **more: Any) -> tuple[bool, str]:
        """Ask for other weights; return whether they are served, and what the server says."""
        body = json.dumps({"model_path": model, **more}).encode()
        request = urllib.request.Request(
            f"{self.url}/update_weights_from_disk", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                answer = json.load(error)
        return answer["success"], answer["message"]
