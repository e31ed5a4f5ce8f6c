"""The PyTorch engine: Hugging Face's own models behind the engine protocol.

Imported only where a run file says `engine = "torch"`; it needs the extra `torch` and never imports JAX.
"""
