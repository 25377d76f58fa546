"""State that outlives the process: a journal of blobs by owner, in one SQLite file for each slot.

    store = StateStore(Path("/data/router-state"), "process")
    await store.append("session-1", {0: head, 1: b"first step"})      # returns when it is durable
    await store.append("session-1", {0: head, 2: b"next"}, large={7: rows})
    await store.load("session-1")                                     # {0: head, 1: b"first step", 2: b"next"}

Middlewares use five calls: `append`, `load`, `delete`, `owners` and `claim`. Blob number 0 of an owner is its head;
`owners` returns it without reading the rest. `large` blobs lie in a separate table, which `load` reads only when
asked. The store does not interpret any blob.
"""
