"""What becomes of a worker's jobs when one of its threads has died."""

from .errors import EngineUnsound
from .publisher import Publisher


def let_go(publisher: Publisher, death: BaseException) -> None:
    """Hand back every job, except those that may have been the cause of *death*.

    A hand-back clears a job of its strikes. One that has told nothing since it was claimed may be
    what ended the thread, and would end the next worker's as well: it is left as a killed
    process leaves it, so that it counts as a strike. An unsound engine is no job's fault.
    """
    suspects = () if isinstance(death, EngineUnsound) else publisher.silent_claims()
    for claim in suspects:
        publisher.abandon(claim.job_id)
    for claim in publisher.open_claims():
        publisher.release(claim.job_id, "the worker failed")
