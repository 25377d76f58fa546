"""SGLang-Jax, the engine for TPUs. Pure."""
