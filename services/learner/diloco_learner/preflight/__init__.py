"""Whether a run can work on this machine, found out before anything is started.

    python -m diloco_learner.preflight < run.json

`checks` has the checks, one after another; `findings` what they find, in words. A run is checked as
a learner would begin it: its model, its weights, its corpus, and one step of training.
"""
