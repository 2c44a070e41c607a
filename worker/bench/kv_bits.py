"""Scenario kv-bits: what keys and values in 8 or 4 bits save, and what they cost."""

from dataclasses import dataclass

from .scenario import Contest, OpenQueue, Scenario, setting


@dataclass(frozen=True)
class KvBitsSettings:
    """Flags of the scenario."""

    model: str = setting("demo", "demo, a model directory, or a hub name.")
    bits: int = setting(8, "Bits of a key or value, 8 or 4.")
    texts: int = setting(8, "Texts whose tokens the model is asked about.")
    tokens: int = setting(384, "Tokens of each.")
    rows: int = setting(8, "Jobs that decode at once.")
    new_tokens: int = setting(16, "Tokens that each of these generates.")


def _prepare(settings: KvBitsSettings, _: OpenQueue) -> Contest:
    from .kv_bits_contest import prepare

    return prepare(settings)


SCENARIO = Scenario(
    name="kv-bits",
    summary="Quantized keys and values against floats: bytes, likelihood of texts, speed.",
    settings=KvBitsSettings,
    prepare=_prepare,
    quick={"texts": 1, "tokens": 128, "rows": 2, "new_tokens": 4},
    repeat=1,
)
