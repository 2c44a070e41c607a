"""Settings whose form is not that of one plain value."""

import pytest
from headwater.worker.settings import WorkerSettings
from pydantic import ValidationError

REST = {"model": "x", "alias": "x", "redis": "redis://127.0.0.1:1/0"}


@pytest.mark.parametrize("given", [["a=/x", "b=y=z"], "a=/x,b=y=z", {"a": "/x", "b": "y=z"}])
def test_adapters_are_pairs_of_alias_and_directory(given) -> None:
    assert WorkerSettings(adapters=given, **REST).adapters == {"a": "/x", "b": "y=z"}


def test_adapters_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_ADAPTERS", "a=/x,b=/y")

    assert WorkerSettings(**REST).adapters == {"a": "/x", "b": "/y"}


def test_kv_bits_are_a_number_that_the_library_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings(**REST).kv_bits is None
    monkeypatch.setenv("HEADWATER_KV_BITS", "8")
    assert WorkerSettings(**REST).kv_bits == 8
    monkeypatch.setenv("HEADWATER_KV_BITS", "5")
    with pytest.raises(ValidationError, match="give 4 or 8"):
        WorkerSettings(**REST)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["a"], "alias=directory"),
        (["a="], "alias=directory"),
        (["a=/x", "a=/y"], "twice"),
        (["a b=/x"], "pattern"),
    ],
)
def test_adapters_of_another_form_are_refused(given, problem) -> None:
    with pytest.raises(ValidationError, match=problem):
        WorkerSettings(adapters=given, **REST)
