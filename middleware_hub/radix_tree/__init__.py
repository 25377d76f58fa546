"""The parts of RadixTreeMiddleware, from the bottom up:

entry       one recorded generation: its own tokens, and the prefix that it shares with another entry
text_tree   a radix tree over characters, which finds the entries that a text continues
eviction    the order in which entries are evicted
cache       look-up, recording and retrieval under a token budget
archive     entries on the disk (`--state-dir`)
recording   convert texts to ids through the cache, and record answers in it
requests    decide which `/generate` requests are recorded
answers     relay and record the answers, and remove logprobs that the client did not ask for
retrieval   `POST /retrieve_from_text`
holders     find the process that has recorded a text
audits      compare text rollouts with what engines compute for them now
statistics  counters and gauges

`middleware_hub.tokenizing` says which characters each token spells.
"""
