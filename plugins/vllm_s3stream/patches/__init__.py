"""Changes to vLLM that no registry allows: one module each, idempotent, with the condition of its removal."""
