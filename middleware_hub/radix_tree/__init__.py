"""The parts of RadixTreeMiddleware, from the bottom up:

entry       one recorded generation: its own tokens, and the prefix that it shares
text_tree   a radix tree over characters: where entries end, which is the newest below a point
eviction    which leaf goes first
cache       look-up, recording and retrieval under a token budget
archive     what outlives the process (`--state-dir`)
recording   texts to ids through the cache, and answers into records of it
requests    which requests of `/generate` are recorded
answers     the relay of their answers: recorded, and given on without what nobody asked for
retrieval   `POST /retrieve_from_text`
audits      text rollouts against what engines say of them now
statistics  what is counted

`middleware_hub.tokenizing` says which characters each token spells.
"""
