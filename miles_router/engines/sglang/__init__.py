"""SGLang, and what both halves of a prefill/decode pair of it are asked. Pure."""
