"""What a finished row says: OpenAI's batch output rows, and failures in the same form."""

from typing import Any

from headwater.schemas import Finished, HeadwaterError

from ..openai_protocol.errors import of_any
from ..openai_protocol.routes import file_reply
from .flight import RowOutcome
from .results import Record
from .rows import RefusedRow


def refused_record(row: RefusedRow, run_id: str) -> Record:
    """Return the record of a row that could not run."""
    return _record(row.line, row.custom_id, run_id, row.status, row.body)


def outcome_record(outcome: RowOutcome, run_id: str) -> Record:
    """Return the record of a row that ran."""
    row = outcome.row
    try:
        if outcome.error is not None:
            raise outcome.error
        body = file_reply(
            row.route, row.jobs, outcome.job_ids, outcome.results, encoding=row.encoding
        )
    except HeadwaterError as error:
        told = of_any(error)
        error_body = told.body()
        error_body["error"]["message"] = f"line {row.line}: {told}"
        return _record(row.line, row.custom_id, run_id, told.status, error_body)
    return _record(row.line, row.custom_id, run_id, 200, body)


def num_tokens(outcome: RowOutcome) -> tuple[int, int, int]:
    """Return a row's prompt tokens, those of them that were reused, and its new tokens."""
    usages = [result.end.usage for result in outcome.results if isinstance(result.end, Finished)]
    return (
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )


def _record(line: int, custom_id: str, run_id: str, status: int, body: dict[str, Any]) -> Record:
    own_id = f"{run_id}-{line}"
    response = {"status_code": status, "request_id": own_id, "body": body}
    fields = {"id": own_id, "custom_id": custom_id, "response": response, "error": None}
    is_good = status == 200
    return Record(line, is_good, fields if is_good else {**fields, "line": line})
