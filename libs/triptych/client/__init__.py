"""Clients: the typed gRPC client, LLM and AsyncLLM, batches, loads for benchmarks."""
