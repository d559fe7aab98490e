"""Several hosts as one learner: processes that compute together, and speak with one voice.

    bus <--> process 0 --- orders, one after the other ---> processes 1, 2, ... ---> bus
                 <-------- what it asked for, and signs of life --------

Process 0 is the learner: it decides, talks to the run, reads the data and keeps what is kept. The
others carry out the same orders in the same order (`plan`), with jax.distributed between them. Of
the published anchors each process keeps its part (`held_anchors`), process 0 too. The others
store their shares of what is sent themselves (`shares`, `carrying_io`), say nothing else on the
bus, and give process 0 their parts of the rest. Where one of them dies all end, and are started
again as one.
"""
