"""Samples to look at, token by token.

files      a samples file of any form, one sample at a time
sheets     TokenSheet: a sample as the token view reads it
entropy    how widely a token's experts are spread
tree       BranchTree: how the samples of a session branch
page       one self-contained page for a file
assets/    the view itself: ES modules and a style sheet that need no build step
dialects/  samples files of training frameworks
"""
