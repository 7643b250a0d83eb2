"""SGLang plugin: speculative decoding for hybrid linear-attention models at the cost of one plain decode step."""

__version__ = "0.1.0"
