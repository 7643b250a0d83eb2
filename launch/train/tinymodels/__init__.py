"""Two tiny hybrid linear-attention language models with MTP heads, and everything that makes them."""
