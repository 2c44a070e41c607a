"""How many steps fixed workloads take: a policy that wastes forwards is slow on any machine.

A step is one forward. It costs time before its first token and for each prompt token, as the
scheduler's measurements will tell it.
"""

import random
from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]

STEP_S, TOKEN_S = 0.1, 0.003


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(1, 10**6) for _ in range(num)]


def run(make_worker: Make, sequences: list[Any]) -> tuple[int, int]:
    """Run a worker with defaults; return its steps and the prompt tokens that they computed."""
    worker = make_worker(step_s=STEP_S, token_s=TOKEN_S)
    worker.add(*sequences)
    num_steps = 0
    while not worker.scheduler.is_idle or worker.unread:
        worker.step()
        num_steps += worker.plan.has_work
    return num_steps, worker.engine.num_prompt_tokens


def test_ragged_prompts_that_share_nothing(make_worker: Make, make_sequence: Make) -> None:
    rng = random.Random(0)
    prompts = [tokens(rng, rng.randint(32, 256)) for _ in range(16)]

    num_steps, num_tokens = run(
        make_worker, [make_sequence(prompt, max_tokens=32) for prompt in prompts]
    )

    assert num_tokens == sum(map(len, prompts)) == 2500
    # Prompts fill 30 steps of the target's length; the last row decodes on for 31 behind them.
    assert num_steps <= 61


def test_prompts_behind_one_prefix(make_worker: Make, make_sequence: Make) -> None:
    rng = random.Random(0)
    head = tokens(rng, 512)
    rows = [make_sequence(head + tokens(rng, 16), max_tokens=16) for _ in range(16)]

    num_steps, num_tokens = run(make_worker, rows)

    assert num_tokens == 512 + 16 * 16
    assert num_steps <= 22


def test_short_prompts_beside_a_long_one(make_worker: Make, make_sequence: Make) -> None:
    rng = random.Random(0)
    long = make_sequence(tokens(rng, 2048), max_tokens=16)
    short = [make_sequence(tokens(rng, 32), max_tokens=16) for _ in range(8)]

    num_steps, num_tokens = run(make_worker, [long, *short])

    assert num_tokens == 2048 + 8 * 32
    assert num_steps <= 38
