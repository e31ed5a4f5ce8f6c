"""The JAX engine."""

from meshwright.engines.jax.memory import keep_freed_memory

keep_freed_memory()  # before JAX starts its threads
