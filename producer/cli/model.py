"""`headwater model`: fetch the demo model, show what a worker makes of a model."""

from typing import Annotated

import typer

from .options import JsonOption, log_to_stderr, print_json


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.command("fetch-demo", epilog="Example: headwater model fetch-demo")(fetch_demo)
    group.command("show", epilog="Example: headwater model show demo")(show)
    app.add_typer(
        group,
        name="model",
        help="Fetch the demo model, show any model.\n\nExample: headwater model fetch-demo",
    )


def fetch_demo(json: JsonOption = False) -> None:
    """Get SmolLM2-135M-Instruct (93 MB), convert it once, and print its directory."""
    from headwater.worker.engine import blas, demo_model

    log_to_stderr()
    blas.preload()
    if not demo_model.demo_directory().is_dir():
        typer.echo("Fetching and converting the demo model (93 MB) ...", err=True)
    path = demo_model.fetch_demo()
    if json:
        print_json({"path": str(path)})
    else:
        typer.echo(path)


def show(
    source: Annotated[str, typer.Argument(help="Directory, hub name, or demo.")],
    json: JsonOption = False,
) -> None:
    """Load a model and print what a worker makes of it: limits, ends, cache, runner, fingerprint.

    The runner is the one of a worker without --kv-bits.
    """
    from headwater.worker.engine import blas

    log_to_stderr()
    blas.preload()
    from headwater.worker.engine.loading import load_model
    from headwater.worker.model_view import describe_model

    shown = describe_model(load_model(source))
    if json:
        print_json(shown)
    else:
        for name, value in shown.items():
            typer.echo(f"{name}: {value}")
