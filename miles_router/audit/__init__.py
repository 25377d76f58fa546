"""`miles-router audit`: do the recorded logprobs agree with what the engines say of the same tokens now?

collecting   asks a router for audits of its sessions, a few at a time
verdict      how far recorded and recomputed logprobs lie apart, and whether that is too far
report       the verdict in words
plot         the verdict as a picture; needs matplotlib
command      flags, and exit status
"""
