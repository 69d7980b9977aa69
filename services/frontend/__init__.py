"""The tokenizing gateway: text in, text out; public gRPC and OpenAI-compatible HTTP."""
