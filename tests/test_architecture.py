"""The import directions of DESIGN, checked on the source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "producer", "worker")


class Import(NamedTuple):
    """One imported module, with a relative name made absolute."""

    path: str
    """Of the importing file, from the root."""
    module: str
    """Dotted, `worker.loop` for ours, `redis.exceptions` for others'."""
    is_lazy: bool
    """Inside a function, or for the type checker only."""


def imports_of(path: Path, root: Path = ROOT) -> Iterator[Import]:
    tree = ast.parse(path.read_text("utf-8"))
    lazy = {id(inner) for outer in ast.walk(tree) if _is_lazy(outer) for inner in ast.walk(outer)}
    name = str(path.relative_to(root))
    for node in ast.walk(tree):
        for module in _modules(node, path.relative_to(root)):
            yield Import(name, module.removeprefix("headwater."), id(node) in lazy)


def _is_lazy(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _modules(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = path.parent.parts
            package = parents[: len(parents) - node.level + 1]
            base = ".".join((*package, *filter(None, [node.module])))
        # `from a import b` may import the module a.b; both forms count.
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def all_imports() -> list[Import]:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [found for path in sorted(files) for found in imports_of(path)]


def is_of(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def offenders(
    importers: tuple[str, ...], forbidden: tuple[str, ...], *, but: tuple[str, ...] = ()
) -> list[str]:
    """Return the imports of *forbidden* modules in files below *importers*, *but* excepted."""
    return [
        f"{found.path} imports {found.module}"
        for found in all_imports()
        if found.path.startswith(importers)
        and not found.path.startswith(but)
        and is_of(found.module, *forbidden)
    ]


def test_schemas_load_anywhere() -> None:
    forbidden = (
        "redis",
        "rq",
        "mlx",
        "mlx_lm",
        "numpy",
        "tokenizers",
        "producer",
        "worker",
        "structlog",
        "typer",
    )

    assert offenders(("schemas/",), forbidden) == []
    # The package itself imports neither of these modules.
    assert offenders(("schemas/",), ("llguidance",), but=("schemas/grammar.py",)) == []
    grammars = ("schemas.grammar", "schemas.reply_grammar")
    assert offenders(("schemas/",), grammars, but=("schemas/reply_grammar.py",)) == []


def test_the_worker_never_imports_the_producer() -> None:
    assert offenders(("worker/",), ("producer",)) == []


def test_the_producer_imports_the_worker_only_inside_functions_of_its_commands() -> None:
    assert offenders(("producer/",), ("worker",), but=("producer/cli/",)) == []
    eager = [
        found
        for found in all_imports()
        if found.path.startswith("producer/cli/")
        and is_of(found.module, "worker")
        and not found.is_lazy
    ]
    assert eager == []


def test_bulk_runs_need_no_server_and_the_protocol_neither_of_the_two() -> None:
    assert offenders(("producer/bulk/", "producer/generate.py"), ("producer.api", "fastapi")) == []
    both = ("producer.api", "producer.bulk", "fastapi", "starlette")
    assert offenders(("producer/openai_protocol/",), both) == []


def test_mlx_stays_below_the_engine() -> None:
    assert (
        offenders(
            PACKAGES, ("mlx", "mlx_lm"), but=("worker/engine/", "worker/bench/", "worker/doctor.py")
        )
        == []
    )


def test_rq_stays_in_the_intake_and_the_client() -> None:
    assert (
        offenders(PACKAGES, ("rq",), but=("worker/booking/", "worker/intake/", "producer/client"))
        == []
    )


def test_redis_stays_at_the_edges() -> None:
    edges = (
        "worker/announcement.py",
        "worker/booking/",
        "worker/intake/",
        "worker/streams.py",
        "worker/publisher",
        "worker/outages.py",
        "worker/redis_client.py",
        "worker/service.py",
        "worker/startup.py",
        "worker/doctor.py",
        "worker/bench/",
        "producer/",
    )

    assert offenders(PACKAGES, ("redis",), but=edges) == []


@pytest.mark.parametrize(
    "policy", ["worker/scheduler", "worker/scheduling/", "worker/prefix_cache"]
)
def test_policy_is_plain_python(policy: str) -> None:
    assert (
        offenders((policy,), ("mlx", "mlx_lm", "redis", "rq", "time", "datetime", "threading"))
        == []
    )


STAGES = (
    "disk_tier",
    "intake",
    "scheduler",
    "scheduling",
    "prefix_cache",
    "engine",
    "text",
    "publisher",
)


@pytest.mark.parametrize("stage", STAGES)
def test_stages_do_not_import_one_another(stage: str) -> None:
    others = tuple(f"worker.{other}" for other in STAGES if other != stage)
    allowed = [
        # The prefix cache is the scheduler's own.
        found
        for found in offenders(
            (f"worker/{stage}/", f"worker/{stage}.py", f"worker/{stage}_"), others
        )
        if not (stage in ("scheduler", "scheduling") and "worker.prefix_cache" in found)
        and not (
            stage in ("scheduler", "scheduling")
            and "worker.schedul" in found.partition("imports")[2]
        )
    ]
    assert allowed == []


def test_the_sequence_imports_no_sibling() -> None:
    assert offenders(("worker/sequence.py", "worker/errors.py"), ("worker",)) == []


def test_the_check_sees_every_form_of_import(tmp_path: Path) -> None:
    folder = tmp_path / "worker" / "text"
    folder.mkdir(parents=True)
    forms = {
        "import headwater.worker.publisher": "worker.publisher",
        "from headwater.worker import publisher": "worker.publisher",
        "from headwater.worker.publisher import X": "worker.publisher",
        "from .. import publisher": "worker.publisher",
        "from ..publisher import X": "worker.publisher",
        "from . import stops": "worker.text.stops",
        "def f():\n    import redis.exceptions": "redis.exceptions",
    }
    for number, (source, module) in enumerate(forms.items()):
        path = folder / f"m{number}.py"
        path.write_text(source)
        found = list(imports_of(path, tmp_path))
        assert any(is_of(each.module, module) for each in found), source
        assert all(each.is_lazy for each in found) == source.startswith("def")
