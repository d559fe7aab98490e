"""Takes the model out of a run: an observer, which reads what is published and joins nothing.

    python -m diloco_learner.exporting RUN --to FOLDER [--version N | --checkpoint REF]

Like a learner it reads fragments and checks their digests; unlike one it trains nothing, says
nothing to the run, and holds one fragment at a time.
"""
