from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends import registry

from servers.compiler import policy, products
from servers.compiler.policy import graph_changes, load_backend
from servers.compiler.products import join_linears, scale_products, store_single_rows
from servers.config import CompileConfig
from servers.fields import ConfigError


def test_rows_are_stored_where_the_compiler_makes_reductions_of_products() -> None:
    searching = {"coordinate_descent_tuning": True}
    for join, options, changes in (
        (True, searching, (scale_products, join_linears, store_single_rows)),
        (False, searching, (scale_products, store_single_rows)),
        (True, {}, (scale_products, join_linears)),
        (False, {"coordinate_descent_tuning": False}, (scale_products,)),
    ):
        assert graph_changes(CompileConfig(enabled=True, join_projections=join, options=options)) == changes


def test_compiled_code_is_kept_under_what_the_graph_changes_are_written_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may look for it by the graph as it was before them: code of other changes would be taken for theirs."""

    def name(*changes: policy.GraphChange) -> str:
        policy._source_digest.cache_clear()
        return policy._GraphPass(changes).uuid()

    before = name(join_linears)
    assert name(join_linears) == before
    assert name(scale_products) != before
    rewritten = tmp_path / "products.py"
    rewritten.write_text("# otherwise\n")
    with monkeypatch.context() as patched:
        patched.setattr(products, "__file__", str(rewritten))
        assert name(join_linears) != before
    assert name(join_linears) == before


TARDY = """
from torch._dynamo import register_backend

@register_backend(name="tardy")
def compile_graph(graph, inputs):
    return graph.forward
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed; what they register is forgotten afterwards."""
    registry.list_backends()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def complaint(**policy: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_backend(CompileConfig(enabled=True, **policy))  # type: ignore[arg-type]
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_backend_that_registers_when_its_module_is_imported_is_there_once_the_module_is_named(
    packages: Path,
) -> None:
    (packages / "tardy_torch").mkdir()
    (packages / "tardy_torch" / "compiler.py").write_text(TARDY)
    without = complaint(backend="tardy")
    assert 'compile.backend is "tardy": torch knows ' in without
    assert "name in compile.backend_module what registers it" in without
    load_backend(CompileConfig(enabled=True, backend="tardy", backend_module="tardy_torch.compiler"))
    assert torch.compile(lambda x: x + 1, backend="tardy")(torch.ones(1)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be imported (ModuleNotFoundError: No module named 'broken')"),
        (
            "raise OSError('libbroken.so is missing\\nsecond line')",
            "cannot be imported (OSError: libbroken.so is missing)",
        ),
        ("raise SystemExit(3)", "cannot be imported (SystemExit: 3)"),
        ("", 'compile.backend is "tardy", which importing broken does not register'),
    ],
)
def test_a_module_that_brings_no_backend_is_named_in_one_line(packages: Path, text: str | None, words: str) -> None:
    if text is not None:
        (packages / "broken.py").write_text(text)
    assert words in complaint(backend="tardy", backend_module="broken")


def test_an_entry_point_that_cannot_be_loaded_is_named_in_one_line(packages: Path) -> None:
    registry._BACKENDS["promised"] = EntryPoint("promised", "nowhere_at_all:compile", "torch_dynamo_backends")
    message = complaint(backend="promised")
    assert 'compile.backend is "promised" and cannot be loaded (ModuleNotFoundError' in message
