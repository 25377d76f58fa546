"""The requests to both halves of a prefill/decode pair, and the joining of their two answers. Pure.

Source: SGLang 0.5.23 (`disaggregation/`, `io_struct.GenerateReqInput._normalize_bootstrap_params`), observed on a
running pair. Both halves get the same request with the same room (`bootstrap_room`). The prefill half computes the
prompt and samples the first token; its answer ends there. The decode half answers in full, but did not compute the
prompt: it has no logprobs for prompt tokens, its rows for them are uninitialized memory, and it reports its own weight
version for the first token.
"""
