"""`headwater doctor`: what is wrong with this machine and the server, and what to do."""

from typing import TYPE_CHECKING

import typer

from .options import JsonOption, RedisOption, log_to_stderr, print_json

if TYPE_CHECKING:  # the help must not pay for importing mlx
    from headwater.worker.doctor import Finding


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        short_help="What is wrong with this machine and the server.",
        epilog="Example: headwater doctor --redis redis://localhost:6379/0",
    )(doctor)


def doctor(redis: RedisOption = None, json: JsonOption = False) -> None:
    """Measure the BLAS, name the device, check the server; exit 1 where production would suffer."""
    from headwater.worker.doctor import examine_machine

    log_to_stderr()
    findings = [*examine_machine(), *_server_findings(redis)]
    if json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            typer.echo(_line(finding))
    if any(finding.is_fatal for finding in findings):
        raise typer.Exit(1)


def _server_findings(url: str | None) -> list["Finding"]:
    from headwater.worker.doctor import Finding, examine_server
    from redis.exceptions import RedisError

    from ..connection import look
    from ..errors import ServerUnavailable

    try:
        return look(url, examine_server)
    except ServerUnavailable as error:
        # Without a URL no server is expected to run yet. The error says what to do.
        return [Finding("server", "not reachable", str(error), is_fatal=url is not None)]
    except RedisError as error:
        return [Finding("server", str(error), "allow INFO for this user", is_fatal=True)]


def _line(finding: "Finding") -> str:
    mark = "FAIL" if finding.is_fatal else "warn" if finding.advice else "ok"
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{mark:4}  {finding.name}: {finding.value}{advice}"
