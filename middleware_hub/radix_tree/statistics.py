"""The numbers of the cache and of its archive, for `GET /metrics` and `GET /router/info`."""

from __future__ import annotations

from miles_router.middlewares import Statistics, counter, gauge


class CacheStatistics(Statistics, prefix="miles_router_radix_tree"):
    """Counters of look-ups, recordings and evictions since the start, and gauges of what memory holds now."""

    lookups = counter("Texts looked up.")
    hits = counter("Look-ups that found recorded tokens to reuse.")
    reused_tokens = counter("Recorded tokens given to the engine again.")
    encoded_tokens = counter("Tokens that were encoded from text.")
    recorded = counter("Generations recorded.")
    partial = counter("Of these, generations that were cut short.")
    unaligned = counter("Of these, generations that can only be reused whole.")
    refused = counter("Generations larger than the whole budget.")
    evicted = counter("Generations evicted.")
    evicted_tokens = counter("Tokens evicted.")
    retrievals = counter("Texts and ids retrieved.")
    ambiguous = counter("Retrievals by a text that several different trajectories spell.")
    entries = gauge("Generations in memory.")
    tokens = gauge("Tokens in memory, shared prefixes counted once.")
    token_bytes = gauge("Bytes of the tokens in memory.")
    text_characters = gauge("Characters of text in memory.")
    passed_through = counter("Requests and answers that were not recorded, by reason.", by="reason")
    invalid_answers = counter("Of these, answers that contradict themselves, by worker.", by="worker")


class ArchiveStatistics(Statistics, prefix="miles_router_radix_tree_archive"):
    """Numbers of the texts on the disk. They are 0 until the first look-up. The store itself counts commits."""

    families = gauge("Families of generations on the disk, one for each first prompt.")
    tokens = gauge("Tokens of these families, plus 16 for each generation; shared prefixes count in each family.")
    row_bytes = gauge("Bytes of rows of these families.")
    loaded = counter("Generations read from the disk.")
    failed = counter("Reads that failed, by error.", by="error")
