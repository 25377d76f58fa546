"""SGLang, the engine whose requests and answers pass unchanged. No I/O."""
