"""From logits to tokens: each request's parameters in columns, the arithmetic in ops."""
