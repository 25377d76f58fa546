"""Everything at once for a long time: does anything grow, does anything stay, is every token exact?

    python -m tests.soak --minutes 30

processes  a router with all three middlewares, and simulated workers that can be killed
probe      a layer in the router that counts its tasks
oracle     what the simulated model must have sampled, and which experts it chose, from the tokens alone
clients    rollouts, agents, those that leave, read slowly or send nonsense
trouble    what a trainer and an unsteady cluster do meanwhile
rounds     load, then silence, then a look; round after round
verdict    what may be seen between the first look and the last
"""
