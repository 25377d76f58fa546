"""State that outlives the process: a journal of blobs by owner, in one SQLite file for each slot.

    store = StateStore(Path("/data/router-state"), "process")
    await store.append("session-1", {0: head, 1: b"first step"})      # returns when it is durable
    await store.append("session-1", {0: head, 2: b"next"}, large={7: rows})
    await store.load("session-1")                                     # {0: head, 1: b"first step", 2: b"next"}

Five calls are the seam to the layers: `append`, `load`, `delete`, `owners` and `claim`. An owner's number 0 is its
head, the blob that lists read; `owners` gives it without reading the rest. `large` blobs lie in a table of their own,
which `load` reads only when asked. The store knows bytes and no layer's meaning of them.
"""
