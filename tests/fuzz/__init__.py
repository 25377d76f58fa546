"""Bytes from outside, made up by the thousand, each held against an oracle.

    python -m tests.fuzz --seconds 60                         all targets, on all cores
    python -m tests.fuzz --target requests --seed 5 --runs 400
    python -m tests.fuzz --target requests --input FILE       one input again

target          one entrance of the router: what its inputs look like, and what must be true of each
campaign        searches many targets side by side
search          makes inputs: from a grammar, from the corpus, and from inputs that showed something new
mutations       how one input becomes another
`corpus/NAME/`  inputs of each target: one for each thing worth a start, and every one that found a fault
"""
