"""/v1/models."""

import asyncio
from typing import Any

from fastapi import APIRouter
from headwater.schemas import ModelCard

from ..errors import UnknownModel
from ..models import ModelDirectory
from .access import CallerOf, ServicesOf

router = APIRouter()


@router.get("/v1/models")
async def list_models(services: ServicesOf, _: CallerOf) -> dict[str, Any]:
    """List the models that workers have announced."""
    cards = await asyncio.to_thread(_cards, services.models)
    return {"object": "list", "data": [_model(card) for card in cards]}


@router.get("/v1/models/{alias}")
async def get_model(alias: str, services: ServicesOf, _: CallerOf) -> dict[str, Any]:
    """Return one model."""
    return _model(await asyncio.to_thread(services.models.card, alias, refresh=True))


def _cards(models: ModelDirectory) -> list[ModelCard]:
    cards = []
    for alias in models.aliases():
        try:
            cards.append(models.card(alias, refresh=True))
        except UnknownModel:
            continue  # its announcement lapsed between the two reads
    return cards


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.alias,
        "object": "model",
        "created": 0,
        "owned_by": "headwater",
        "context_length": card.context_length,
        "vocab_size": card.vocab_size,
    }
