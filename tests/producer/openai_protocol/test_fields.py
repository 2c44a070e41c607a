"""OpenAI's fields of a request, as a job has them."""

from headwater.producer.openai_protocol.fields import job_fields


def test_openais_response_formats_and_logprobs_become_the_jobs_own() -> None:
    schema = {"type": "object"}
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": schema},
    }
    regex = {"type": "regex", "regex": "a+"}

    formats = [
        job_fields({"response_format": given}).get("response_format")
        for given in ({"type": "text"}, {"type": "json_object"}, wrapped, regex)
    ]
    logprobs = [
        job_fields(given).get("logprobs")
        for given in (
            {"logprobs": False, "top_logprobs": 0},
            {"logprobs": True},
            {"logprobs": True, "top_logprobs": 3},
            {"logprobs": 5},
            {"logprobs": 0},
        )
    ]

    own = {"type": "json_schema", "json_schema": schema}
    assert formats == [None, {"type": "json_object"}, own, regex]
    assert logprobs == [None, 0, 3, 5, 0]
