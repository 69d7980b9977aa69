"""Clients: the typed gRPC client, LLM and AsyncLLM, a local cluster, the command line."""
