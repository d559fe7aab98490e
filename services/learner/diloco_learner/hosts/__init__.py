"""Several hosts as one learner: processes that compute together, and speak with one voice.

    bus <--> process 0 --- orders, one after the other ---> processes 1, 2, ...
                 <-------- what it asked for, and signs of life --------

Process 0 is the learner: it decides, talks to the run, reads the data and keeps what is kept. The
others have no connection to the bus. They carry out the same orders in the same order (`plan`),
with jax.distributed between them, and give process 0 their parts of what it sends or keeps. Where
one of them dies all end, and are started again as one.
"""
