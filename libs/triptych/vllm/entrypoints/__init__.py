"""Modules that vLLM has in `vllm.entrypoints`."""
