"""Recorded texts that outlive the process (`--state-dir`), from the bottom up:

entry_rows  entries to bytes, and back
text_rows   the captured rows of entries
families    groups of entries that share a root text; the index of families that a text may need
archive     write, read and delete families
lines       recorded texts as lines of JSON, for `miles-router state`

**Families.** The root of a rollout is the prompt of its first turn. All entries that descend from one root are a
family: one owner in the store, in the slot of that owner. Look-ups reuse tokens up to a sampled one, or a whole given
prompt. So only families whose root the text begins with can match. The index of roots that are not in memory takes a
hash of 8 bytes for each family. A family is read when a text begins with its root. A prefix that families share (a
system prompt) is in memory once, and on the disk once for each family.
"""
