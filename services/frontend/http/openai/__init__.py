"""OpenAI's APIs: completions, chat completions, responses, models; and vLLM's fields and routes beside them."""
