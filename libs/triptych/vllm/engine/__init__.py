"""Modules that vLLM has in `vllm.engine`."""
