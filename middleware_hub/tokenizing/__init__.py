"""Text to ids and back, exactly. What several middlewares need of a tokenizer:

spelling    which characters each token spells, for the families of tokenizers that there are
alignment   sampled ids held against the text that an engine showed for them
encoding    text to ids with their characters, whole texts and continuations

async_encoder     the same for the event loop, long texts beside it
encoder_process   a process that encodes them
"""
