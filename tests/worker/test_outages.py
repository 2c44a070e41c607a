"""What becomes of the server's errors: passing ones, faults, refused logins."""

import pytest
from headwater.worker.errors import LoginRefused
from headwater.worker.outages import Outages
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError  # noqa: A004


def test_a_passing_error_may_come_as_often_as_it_likes() -> None:
    """The server may be away for a day."""
    outages = Outages(0.0, clock=lambda: 0.0)

    for _ in range(3):
        outages.note("paused", ConnectionError("gone"))


def test_a_fault_is_raised_as_it_is() -> None:
    """What does not pass must end the thread."""
    error = ResponseError("WRONGTYPE")

    with pytest.raises(ResponseError) as caught:
        Outages().note("paused", error)
    assert caught.value is error


def test_refusals_far_apart_do_not_add_up() -> None:
    """Patience begins anew when the server has let us in meanwhile."""
    now = [0.0]
    outages = Outages(60.0, clock=lambda: now[0])
    error = AuthenticationError("WRONGPASS")
    for now[0] in (0.0, 20.0, 59.0 + 40.0, 120.0):
        outages.note("paused", error)

    now[0] = 149.0
    outages.note("paused", error)
    now[0] = 159.5
    with pytest.raises(LoginRefused, match="60 s"):
        outages.note("paused", error)
