"""Who computes what in the next step. Policy only: no mlx, no redis, no clock.

    def save(commit):                      # of rows that are about to go
        scheduler.commit(commit, engine.extract(commit.sequence, commit.start, commit.end))
    plan = scheduler.schedule(now, save)   # those of rows that have ended
    for commit in plan.early_commits: save(commit)
    for sequence in plan.detach: engine.detach(sequence)
    for row in plan.admit: engine.attach(row.sequence, row.prefix)
    for row in plan.rebase: engine.rebase(row.sequence, row.prefix)
    step = engine.launch(plan.prefill, plan.decode)    # if plan.has_work
    for commit in plan.commits:            # of what was just launched
        segment = engine.extract(commit.sequence, commit.start, commit.end)
        prefix = scheduler.commit(commit, segment)
        if prefix: engine.rebase(commit.sequence, prefix)
    ...                                    # read the previous step's tokens, then
    scheduler.finish(sequence)             # whose keys and values are good, or
    scheduler.drop(sequence)               # whose keys and values nobody should trust
    scheduler.observe(seconds, plan.num_prefill_tokens, len(plan.decode))

The engine moves `num_computed_tokens` and `num_unread_tokens` on at launch; the reader of the
tokens appends them to `output_token_ids`; status, cached tokens and cache node are ours.
A commit that fails, or whose row failed in the step, is left out: nobody waits for it longer
than its sequence prefills.
While `scheduler.is_idle` is False, call `schedule` again, also after an empty plan.
"""

from .plan import Commit, RowPrefix, StepPlan
from .scheduler import Scheduler
from .settings import Footprint, SchedulerSettings

__all__ = [
    "Commit",
    "Footprint",
    "RowPrefix",
    "Scheduler",
    "SchedulerSettings",
    "StepPlan",
]
