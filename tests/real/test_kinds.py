"""Scores, embeddings and an adapter with real weights, through a real worker and server."""

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from headwater.producer.client import Producer, new_embedding_job, new_job, new_score_job
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import Finished
from headwater.worker.engine.demo_model import fetch_demo

from .conftest import start_worker

SIZE = 576
RANK = 2
LAYER = "model.layers.29.mlp.up_proj"


@pytest.fixture(scope="module")
def producer(
    server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Producer]:
    """A producer for a worker with an adapter of random weights."""
    fetch_demo()
    directory = tmp_path_factory.mktemp("adapter")
    write_adapter(directory)
    worker = start_worker(server.url, "--adapter", f"odd={directory}")
    mine = Producer(server.url)
    yield mine
    mine.close()
    assert worker.stop() == 0, "".join(worker.log[-20:])


def write_adapter(directory: Path) -> None:
    mx.random.seed(1)
    weights = {
        f"{LAYER}.lora_a": mx.random.normal((SIZE, RANK)),
        f"{LAYER}.lora_b": mx.random.normal((RANK, 1536)),
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    lora = {"rank": RANK, "scale": 20.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": lora}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def end_of(producer: Producer, job_id: str) -> Finished:
    end = producer.result(job_id).end
    assert isinstance(end, Finished), end
    return end


def test_the_likely_continuation_scores_higher(producer: Producer) -> None:
    encode = producer.models.tokenizer("demo").encode
    prompt = encode("The capital of France is")
    continuations = [encode(" Paris"), encode(" Rome"), encode(" a banana")]

    scores = end_of(producer, producer.submit(new_score_job("demo", prompt, continuations))).scores

    assert max(scores, key=lambda score: score.logprob).continuation == 0


def test_texts_of_one_subject_lie_closer(producer: Producer) -> None:
    encode = producer.models.tokenizer("demo").encode
    texts = ["The cat sleeps.", "A kitten is asleep.", "Interest rates rose by two percent."]
    jobs = [new_embedding_job("demo", encode(text), pooling="mean") for text in texts]

    ends = [end_of(producer, job_id) for job_id in producer.submit_many(jobs)]

    cat, kitten, rates = (mx.array(end.embedding.floats()) for end in ends)
    assert cat.shape == (SIZE,)
    assert mx.sum(cat * kitten).item() > mx.sum(cat * rates).item()


def test_an_adapter_changes_what_its_jobs_get_and_nothing_else(producer: Producer) -> None:
    prompt = producer.models.tokenizer("demo").encode("Once upon a time")
    names = [None, "odd", None]
    jobs = [new_job("demo", prompt, max_tokens=12, adapter=name) for name in names]

    plain, odd, again = (
        producer.result(job_id).choices[0].token_ids for job_id in producer.submit_many(jobs)
    )

    assert plain == again != odd
