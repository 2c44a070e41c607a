"""Ray Data over Headwater: many machines read and write, one queue feeds the workers.

    headwater worker --model demo --redis redis://HOST:6379/0
    python ray_data.py redis://HOST:6379/0 demo rows.jsonl results/

Each row of the input has a `prompt`. Ray's tasks hold no model: they submit jobs and wait, so
their number (`concurrency`) decides only how many jobs are on their way at once.
"""

import sys
from typing import Any

import ray
from headwater.producer.generate import GenerateOptions, generate


class Generate:
    """A Ray actor that has its batches' texts written by the workers behind one Redis."""

    def __init__(self, redis: str, model: str, max_tokens: int) -> None:
        self._redis = redis
        self._model = model
        self._max_tokens = max_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return *batch* with the columns `text` and `error`."""
        prompts = [str(prompt) for prompt in batch["prompt"]]
        found = list(
            generate(
                prompts,
                model=self._model,
                redis=self._redis,
                max_tokens=self._max_tokens,
                # The whole batch is one window: prompts with a common prefix run together.
                options=GenerateOptions(window=len(prompts), outstanding=len(prompts)),
            )
        )
        texts = ["" if each.error else each.text for each in found]
        errors = [each.error or "" for each in found]
        return {**batch, "text": texts, "error": errors}


def main() -> None:
    """Read rows, run them, write what they come to."""
    redis, model, source, target = sys.argv[1:]
    rows = ray.data.read_json(source, lines=True)
    done = rows.map_batches(
        Generate,
        fn_constructor_kwargs={"redis": redis, "model": model, "max_tokens": 32},
        batch_size=64,
        concurrency=2,
        # They only wait; a whole core each would leave none to read with on a small machine.
        num_cpus=0.1,
    )
    done.write_json(target)


if __name__ == "__main__":
    main()
