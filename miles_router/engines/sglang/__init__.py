"""SGLang. Pure."""
