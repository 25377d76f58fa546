"""`miles-router view`: samples as an HTML page, token by token.

files      reads samples files of any format, one sample at a time
sheets     TokenSheet: a sample in the form that the token view reads
entropy    the entropy of a token's routed experts
tree       BranchTree: how the samples of a session branch
page       writes one self-contained page for a file
assets/    the token view: ES modules and a style sheet that need no build step
dialects/  samples files of training frameworks
"""
