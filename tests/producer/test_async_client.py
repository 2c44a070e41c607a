import asyncio

from headwater.producer.async_client import AsyncProducer
from headwater.producer.client import CancelOutcome, SubmitSettings, new_job
from headwater.producer.result import ChoiceResult, collect
from headwater.producer.stream_reader import Ended, Output, Restart
from headwater.schemas import (
    Cancelled,
    ChoiceEnd,
    EntryId,
    Finished,
    FinishReason,
    Restarted,
    TextSpan,
    Timings,
    Usage,
)


def test_the_async_producer_submits_cancels_and_reads(redis_url: str) -> None:
    async def run() -> None:
        settings = SubmitSettings(check_model=False)
        async with await AsyncProducer.connect(redis_url, settings) as producer:
            first, second = await producer.submit_many(
                new_job("demo", [1], max_tokens=1) for _ in range(2)
            )
            again = await producer.submit(new_job("demo", [1], max_tokens=1), idempotency_key="k")
            assert len({first, second, again}) == 3
            for job_id in (first, second):
                assert await producer.cancel(job_id) is CancelOutcome.CANCELLED
            results = await asyncio.gather(producer.result(first), producer.result(second))
            assert [result.end for result in results] == [Cancelled(), Cancelled()]

    asyncio.run(run())


def output(choice: int, start: int, text: str) -> Output:
    span = TextSpan(text_start=start, text=text)
    return Output(EntryId(1, 1), choice, start, tuple(map(ord, text)), (span,))


def finished(*texts: str | None) -> Ended:
    choices = tuple(
        ChoiceEnd(choice=number, finish_reason=FinishReason.LENGTH, text=text)
        for number, text in enumerate(texts)
    )
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return Ended(EntryId(1, 9), Finished(choices=choices, usage=usage, timings=Timings(total_ms=1)))


def test_a_result_holds_every_choices_tokens_and_text() -> None:
    result = collect(
        [output(0, 0, "ab"), output(1, 0, "x"), output(0, 2, "c"), finished(None, None)]
    )

    assert result.choices == {
        0: ChoiceResult((97, 98, 99), "abc", FinishReason.LENGTH),
        1: ChoiceResult((120,), "x", FinishReason.LENGTH),
    }


def test_a_result_forgets_what_a_restart_made_void() -> None:
    restart = Restart(EntryId(2, 0), Restarted(worker_id="w", sampler_version=1))

    assert (
        collect([output(0, 0, "ab"), restart, output(0, 0, "z"), finished(None)]).choices[0].text
        == "z"
    )


def test_a_result_takes_the_text_of_a_final_job_from_its_end() -> None:
    assert collect([finished("all")]).choices[0].text == "all"
