"""`headwater demo`: the main job for real, on an own server, with an own worker."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from .demo_run import Report

_QUESTION = "What is the capital of France?"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        short_help="Stream one chat, run a batch, leave nothing behind.",
        epilog="Example: headwater demo --jobs 16",
    )(demo)


def demo(
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Jobs with a shared prefix.")] = 16,
    json: JsonOption = False,
) -> None:
    """Stream one chat, then run jobs that share a long prefix; leaves nothing running behind."""
    from headwater.worker.engine import demo_model

    from .demo_run import DemoStack, run_batch, stream_chat

    def say(text: str, newline: bool = True) -> None:
        if not json:
            typer.echo(text, nl=newline)

    fetched = demo_model.demo_directory().is_dir()
    say("Starting ..." if fetched else "Fetching the demo model (93 MB, once), then starting ...")
    with DemoStack() as stack:
        say(f"Server and worker are up.\n\n> {_QUESTION}\n")
        answer = []
        for piece in stream_chat(stack.producer, _QUESTION):
            say(piece, newline=False)
            answer.append(piece)
        say(f"\n\nNow {jobs} jobs that share a long prefix ...\n")
        report = run_batch(stack.producer, jobs)
    if json:
        print_json({"question": _QUESTION, "answer": "".join(answer)} | report._asdict())
    else:
        _print_table(report)


def _print_table(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.jobs} jobs", show_header=False)
    table.add_row("TTFT, median", f"{report.ttft_p50_ms:.0f} ms")
    table.add_row("TTFT, slowest", f"{report.ttft_max_ms:.0f} ms")
    table.add_row("tokens generated", str(report.generated_tokens))
    table.add_row("tokens per second", f"{report.generated_tokens_per_s:.1f}")
    table.add_row("prompt tokens", str(report.prompt_tokens))
    table.add_row("  computed", str(report.prompt_tokens_computed))
    table.add_row("  reused", str(report.prompt_tokens - report.prompt_tokens_computed))
    Console().print(table)
