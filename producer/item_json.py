"""A tail's items as JSON: what `headwater tail --json` prints and the HTTP server sends."""

from typing import Any

from .stream_reader import Ended, Output, TailItem


def item_json(item: TailItem) -> dict[str, Any]:
    """Return *item* as an object with `type` and the fields of its event."""
    if isinstance(item, Output):
        part: dict[str, Any] = {
            "choice": item.choice,
            "start": item.start,
            "token_ids": item.token_ids,
            "text": [span.model_dump(mode="json", exclude_none=True) for span in item.text],
        }
        if item.logprobs is not None:
            shown = [each.model_dump(mode="json", exclude_none=True) for each in item.logprobs]
            part["logprobs"] = shown
        if item.prompt is not None:
            part["prompt"] = item.prompt.model_dump(mode="json", exclude_none=True)
        return {"type": "delta", "parts": [part]}
    event = item.event if isinstance(item, Ended) else item.fence
    return event.model_dump(mode="json", exclude_none=True)
