"""The contestants of scenario memory: our loop with a small budget, and without any."""

from collections.abc import Callable

from ..assembly import LoopSettings
from ..engine.memory import measure_row_cost
from ..scheduler import Footprint
from .budget import BudgetSettings
from .generation_contest import same_text
from .record import Record
from .report import Figures
from .scenario import Contest, Peer
from .sides import Lab, run_ours
from .workload import ALIAS, Arrivals, Prompts, make_job


def prepare(settings: BudgetSettings) -> Contest:
    """Make a budget of what the model's rows take, activations of a prefill chunk included."""
    lab = Lab(settings.model)
    prompts = Prompts(lab.loaded.vocab_size)
    jobs = [
        (0.0, make_job(f"job-{index}", prompts.tokens(settings.prompt_tokens), settings.new_tokens))
        for index in range(settings.jobs)
    ]
    cost = measure_row_cost(lab.runner, lab.loaded)
    footprint = Footprint(**cost._asdict())
    row_nbytes = footprint.row_nbytes(settings.prompt_tokens + settings.new_tokens, 0)
    budget = settings.rows * row_nbytes + settings.prompt_tokens * cost.bytes_per_prefill_token
    last: dict[str, Record] = {}

    def run(name: str, budget_bytes: int | None) -> Callable[[], Figures]:
        def measure() -> Figures:
            limits = LoopSettings(
                alias=ALIAS, max_batch=settings.batch, kv_budget_bytes=budget_bytes
            )
            last[name] = run_ours(lab, Arrivals(jobs), limits)
            return last[name].figures()

        return measure

    def ratio(ours: Figures, peer: Figures) -> Figures:
        return {
            "peak_over_budget": ours["peak_kv_bytes"] / budget,
            "kv_bytes": ours["peak_kv_bytes"] / peer["peak_kv_bytes"],
            "speedup": peer["wall_s"] / ours["wall_s"],
            "same_text": same_text(last["ours"], last["unlimited"]),
        }

    unlimited = Peer("headwater without a budget", "this commit", run("unlimited", None))
    return Contest(run("ours", budget), (unlimited,), ratio)
