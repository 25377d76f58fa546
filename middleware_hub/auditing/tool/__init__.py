"""`miles-router audit`: do recorded logprobs agree with the logprobs that the engines compute for the same tokens now?

collecting   requests audits of a router's episodes, one at a time
verdict      the distances of recorded and recomputed logprobs, and whether they are too large
report       the verdict as a text report
plot         the verdict as a plot; needs matplotlib
command      flags, progress and exit status
"""
