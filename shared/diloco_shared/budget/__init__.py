"""One budget of a run: what it needs of streams, memory, disks and links, term by term.

    run = known(spec, learners=4)           # or assumed(spec), where N is not known yet
    streams(run)["UP"].bytes                # the limit that the stream gets
    faults(spec)                            # what is wrong with it wherever it runs

Pure and without arrays: submission, leader, planner and command line count with the same figures.
docs/how-to/budget.md derives them by hand for a model of 12B parameters.
"""

from diloco_shared.budget.job import Job as Job
from diloco_shared.budget.job import Size as Size
from diloco_shared.budget.job import assumed as assumed
from diloco_shared.budget.job import known as known
from diloco_shared.budget.job import learners_of as learners_of
from diloco_shared.budget.job import rounds_at as rounds_at
from diloco_shared.budget.streams import flying as flying
from diloco_shared.budget.streams import limits as limits
from diloco_shared.budget.streams import roomy as roomy
from diloco_shared.budget.streams import streams as streams
from diloco_shared.budget.terms import Need as Need
from diloco_shared.budget.terms import Term as Term
