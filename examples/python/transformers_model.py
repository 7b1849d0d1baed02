"""A Transformers model filled from a URL: built without memory, then given memory once, on the device where it runs.

    MODEL_URL=s3://bucket/org/model python examples/python/transformers_model.py "a sentence"

Prints what a causal language model writes after the sentence, and of other models the beginning of its mean vector.
``DEVICE`` is ``cpu`` if not given. Options are ``S3STREAM_*`` variables: ``S3STREAM_ENDPOINT_URL=http://127.0.0.1:9000``.
Needs Transformers 5.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import streamer
from streamer.artifacts.metadata import metadata_folder


def build(url: str, device: str) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    # Configuration, tokenizer and code are files: they go into a folder of `cache_dir`, one for each version.
    folder = metadata_folder(url, streamer.StreamConfig.resolve())
    config = AutoConfig.from_pretrained(folder)
    is_causal = config.architectures[0].endswith("ForCausalLM")
    with torch.device("meta"):
        model = (AutoModelForCausalLM if is_causal else AutoModel).from_config(config)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gave tied parameters memory of their own

    # No checkpoint holds buffers such as rotary frequencies. Transformers computes them, and random values for all
    # parameters that are not marked as having theirs already.
    for value in model.state_dict(keep_vars=True).values():
        value._is_hf_initialized = True
    model.initialize_weights()

    report = streamer.load(model, url)
    print(report.summary(), file=sys.stderr)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def main() -> None:
    model, tokenizer = build(os.environ["MODEL_URL"], os.environ.get("DEVICE", "cpu"))
    given = tokenizer(sys.argv[1] if len(sys.argv) > 1 else "Streaming", return_tensors="pt").to(model.device)
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        if model.can_generate():
            print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]))
        else:
            vector = model(**inputs).last_hidden_state.mean(1)[0]
            print(" ".join(f"{value:.5f}" for value in vector[:8].tolist()))


if __name__ == "__main__":
    main()
