"""How a held turn is continued in exact tokens; from the bottom up:

preparing     messages as SGLang hands them to a chat template
templates     messages to text with the model's own template, text to ids
families      the same with what a library knows of a family
endings       what a template writes behind an answer, measured in a short conversation
probes        conversations that a template is tried on
proof_file    what was proved at an earlier start
proof         that what is measured there holds everywhere, or why not
continuation  from a held turn and what is appended to the ids that are given
"""
