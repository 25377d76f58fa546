"""Exact conversion between text and token ids, for middlewares.

alignment         align sampled ids with the text that an engine returned for them
encoding          encode whole texts and continuations, with the characters of each token
ascii_encoding    a fast path for ASCII text
async_encoder     the same for the event loop; long texts go to threads and processes
encoder_process   a process that encodes long texts
agreement         check that the engines tokenize as the router does
naming            find the token that spells given bytes
"""
