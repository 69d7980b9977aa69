"""Vectors, scores and classes of texts, as OpenAI's, Cohere's, Jina's and vLLM's clients ask for them."""
