"""/v1/embeddings, through the official client."""

import base64
import math
import operator
import struct

import openai
import pytest
from openai import OpenAI

from .conftest import ALIAS

INPUTS = ["Once upon a time", "there was a queue", "Once upon a time"]


def _dot(one: list[float], other: list[float]) -> float:
    return sum(map(operator.mul, one, other))


def test_each_input_gets_its_own_vector_of_length_one(client: OpenAI) -> None:
    reply = client.embeddings.create(model=ALIAS, input=INPUTS, encoding_format="float")

    vectors = [each.embedding for each in reply.data]
    assert [each.index for each in reply.data] == [0, 1, 2]
    assert all(math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5) for vector in vectors)
    # Cosines, since the order in which the device sums depends on the batch.
    assert math.isclose(_dot(vectors[0], vectors[2]), 1.0, rel_tol=1e-5)
    assert _dot(vectors[0], vectors[1]) < 0.999
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


def test_base64_holds_the_same_numbers_as_a_list(client: OpenAI) -> None:
    # What the client asks for where it is not told: it unpacks it itself.
    listed = client.embeddings.create(model=ALIAS, input=[1, 2, 3], encoding_format="float")
    packed = client.embeddings.create(model=ALIAS, input=[1, 2, 3], encoding_format="base64")

    data = base64.b64decode(str(packed.data[0].embedding))
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    assert numbers == pytest.approx(listed.data[0].embedding, abs=1e-6)


def test_mean_pooling_is_another_vector(client: OpenAI) -> None:
    last, mean = (
        client.embeddings.create(
            model=ALIAS, input=INPUTS[0], encoding_format="float", extra_body={"pooling": pooling}
        )
        .data[0]
        .embedding
        for pooling in ("last", "mean")
    )

    assert last != pytest.approx(mean, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"model": "other"}, 404, "other"),
        ({"input": []}, 422, "input"),
        ({"input": ""}, 400, "empty"),
        ({"input": [10**9]}, 400, "prompt_token_ids"),
        ({"dimensions": 8}, 422, "dimensions"),
        ({"encoding_format": "int8"}, 422, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    client: OpenAI, changes: dict[str, object], status: int, says: str
) -> None:
    asked = {"model": ALIAS, "input": "text", "encoding_format": "float"} | changes
    with pytest.raises(openai.APIStatusError, match=says) as caught:
        client.embeddings.create(**asked)  # type: ignore[arg-type]
    assert caught.value.status_code == status
