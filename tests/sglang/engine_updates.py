"""Makes an ``sgl.Engine``, updates it, and tells the tokens after each update. A script, run by its path.

It imports nothing of the tests: SGLang starts processes that import this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    job = json.loads(sys.argv[1])
    import sglang

    engine = sglang.Engine(
        model_path=job["model"],
        load_format="s3stream",
        tp_size=2,
        device="cpu",
        dtype="float32",
        context_length=64,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=1024,
        max_running_requests=4,
        mem_fraction_static=0.3,
        skip_server_warmup=True,
    )
    found = []
    for url in [None, *job["updates"]]:
        outcome = engine.update_weights_from_disk(url) if url else (True, "")
        sampling = {"temperature": 0, "max_new_tokens": job["max_tokens"], "ignore_eos": True}
        tokens = [answer["output_ids"] for answer in engine.generate(job["prompts"], sampling)]
        found.append({"success": outcome[0], "message": outcome[1], "tokens": tokens})
    Path(job["results"]).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
