"""Prefill/decode pairs on an engine's wire: what both halves are asked, and how their two answers become one. Pure.

Source: SGLang 0.5.23 (`disaggregation/`, `io_struct.GenerateReqInput._normalize_bootstrap_params`), seen on a running
pair. Both halves get the same request with the same room. The prefill half computes the prompt and samples the first
token, which is all of its answer. The decode half answers in full, but knows nothing of the prompt: it has no logprobs
of it, its rows there are what lies in its memory, and it stamps the first token with its own weights.
"""
