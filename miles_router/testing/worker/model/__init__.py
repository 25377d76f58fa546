"""The simulated model: vocabulary, sampling, parsers. No I/O except for reading tokenizers and scripts."""
