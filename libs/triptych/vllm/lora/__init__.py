"""The place of vLLM's `lora` package."""
