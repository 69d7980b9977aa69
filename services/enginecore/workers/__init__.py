"""How an engine reaches whatever computes its steps."""
