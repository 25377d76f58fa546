"""The parts of RadixTreeMiddleware, from the bottom up:

spelling    which characters each token spells, for the tokenizer families there are
encoding    text to ids with those characters, whole texts and continuations
entry       one recorded generation: its own tokens, and the prefix it shares
text_tree   a radix tree over characters: where entries end, which is newest below a point
eviction    which leaf goes first
cache       look-up, recording, retrieval under a token budget: what the middleware uses
shapes      the request shapes of `/generate`
replies     what came back, with what nobody asked for taken out
"""
