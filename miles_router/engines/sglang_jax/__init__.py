"""The SGLang-Jax engine for TPUs. Pure."""
