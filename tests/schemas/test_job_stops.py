import pytest
from headwater.schemas import GenerationJob, SchemaError, limits


def job(stop: list[str]) -> dict:
    return {"job_id": "j", "model": "m", "prompt_token_ids": [1], "max_tokens": 1, "stop": stop}


def test_stop_strings_are_bounded_together():
    longest = "x" * limits.MAX_STOP_STRING_CHARS
    most = limits.MAX_STOP_CHARS // limits.MAX_STOP_STRING_CHARS
    GenerationJob.parse(job([longest] * most))
    with pytest.raises(SchemaError, match=r"stop: .*8193 characters together; at most 8192"):
        GenerationJob.parse(job([*[longest] * most, "y"]))
