"""What of recorded texts outlives the process (`--state-dir`), from the bottom up:

entry_rows  an entry as bytes, and back
text_rows   the rows of experts beside entries
families    the entries of one root text, which have one owner in the store; which families a text may find
archive     when they are written, read again and deleted

**Families.** A rollout's root is the text that its first turn was given. All entries that descend from it are one
family: one owner in the store, in the slot of that owner. What a text may reuse lies behind a sampled token, or is a
whole prompt that was given: so it lies in a family whose root this text begins with, and in no other. The index of
roots that are not in memory has a number of 8 bytes for each; a family is read when a text comes that begins with its
root. Tokens that families have in common (a system prompt) are held once in memory, and once in each family on the
disk.
"""
