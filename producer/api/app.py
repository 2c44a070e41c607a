"""The application: routes, what surrounds them, and how errors are told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from headwater.schemas import HeadwaterError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from ..openai_protocol.errors import RETRY_AFTER_S, ApiError, of_any
from . import (
    batch_routes,
    embedding_routes,
    file_routes,
    health_routes,
    job_routes,
    model_routes,
    text_routes,
)
from .batch_runner import BatchRunner
from .middleware import BodyLimit, RequestLog
from .retention import Retention
from .services import Services

_MB = 1024 * 1024
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
_SHOWN_CHARS = 60


def build_app(services: Services, batches: BatchRunner) -> FastAPI:
    """Return the application over *services*, which it closes at its end."""
    settings = services.settings
    retention = Retention(batches, settings.retention_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batches.start()
        retention.start()
        yield
        services.stop_streams()
        await retention.stop()
        await batches.stop()
        await services.close()

    # Without the documentation pages: they load scripts from elsewhere.
    app = FastAPI(title="Headwater", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.services = services
    app.state.batches = batches
    for module in (
        health_routes,
        model_routes,
        text_routes,
        embedding_routes,
        job_routes,
        file_routes,
        batch_routes,
    ):
        app.include_router(module.router)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_mb * _MB,
        # A little more than the file: the form around it counts, too.
        max_file_bytes=settings.max_file_mb * _MB + _MB,
    )
    app.add_middleware(RequestLog, metrics=services.metrics)
    _tell_errors(app)
    return app


def _tell_errors(app: FastAPI) -> None:
    """Give every error OpenAI's shape."""

    @app.exception_handler(HeadwaterError)
    async def _ours(_: Request, error: HeadwaterError) -> JSONResponse:
        return _answer(of_any(error))

    @app.exception_handler(RedisError)
    async def _redis(_: Request, error: RedisError) -> JSONResponse:
        message = f"the queue does not answer ({type(error).__name__}): try again"
        return _answer(
            ApiError(503, message, code="queue_unavailable", retry_after_s=RETRY_AFTER_S)
        )

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        known = ApiError(error.status_code, str(error.detail), code=_CODES.get(error.status_code))
        return _answer(known, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(_of_validation(error.errors()))

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        del error  # uvicorn logs its traceback; the client learns nothing of our insides
        return _answer(ApiError(500, "internal error", code="internal_error"))


def _answer(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body(), error.status, {**(headers or {}), **error.headers})


def _of_validation(details: Any) -> ApiError:
    """Return an error that names the first wrong field, and says what is wrong with it."""
    detail = details[0]
    if detail["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {detail['ctx']['error']}", code="invalid_json")
    if isinstance(detail.get("input"), bytes):
        message = "the body was read as bytes: send it with Content-Type: application/json"
        return ApiError(415, message, code="invalid_content_type")
    # The first part says where it stood: body, query or path.
    field = ".".join(str(part) for part in detail["loc"][1:]) or "body"
    shown = ascii(detail.get("input"))
    if len(shown) > _SHOWN_CHARS:
        shown = shown[:_SHOWN_CHARS] + "..."
    return ApiError(
        422, f"{field}: {detail['msg']} (got {shown})", code="invalid_value", param=field
    )
