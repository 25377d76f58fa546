"""The exact token ids of a prompt that continues a recorded turn. From the bottom up:

preparing     messages in the form in which SGLang passes them to a chat template
compiled      a chat template without the library's cost for each turn
templates     messages to text with the model's own template, text to ids
families      the same with the templates and encoders of a library for model families
endings       the text that a template writes behind an answer, measured in a short conversation
probes        conversations on which a template is tried
roles         the roles of messages that a template writes
proof_file    proofs of earlier starts
proof         proof that the measured text does not depend on the history, or the reason why it does
continuation  from a recorded turn and appended messages to the ids of the next prompt
comparison    differences between recorded tokens and what the chat template writes
"""
