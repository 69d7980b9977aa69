"""Products with plain and quantized weights."""
