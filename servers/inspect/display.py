"""An inspection as tables for a terminal, with the verdict last."""

from __future__ import annotations

import re

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servers.engine.messages import startup_groups
from servers.engine.shapes import StepShape
from servers.inspect.inspection import Inspection, Outcome
from servers.inspect.listed_shapes import listed, size_of

# How each outcome reads, and its colour.
SHOWN: dict[Outcome, tuple[str, str]] = {
    "ready": ("ready", "green"),
    "compile": ("compiles", "bold red"),
    "recompile": ("recompiles", "bold red"),
    "jit": ("compiles a kernel", "bold red"),
    "capture": ("captures", "bold yellow"),
    "limit": ("eager", "bold red"),
    "guarded": ("eager, guarded", "yellow"),
    "refused": ("is refused", "bold red"),
    "error": ("fails", "bold red"),
    "off": ("eager", "dim"),
}
# A StepShape as events carry it.
_STEP_SHAPE = re.compile(r"(prefill|extend|decode|encode) batch (\d+) × length (\d+), context (\d+)")


def show(inspection: Inspection, console: Console) -> None:
    """The inspection as tables, with the verdict last."""
    arm, policy = inspection.arm, inspection.arm.compile
    settings = ["eager"]
    if policy.enabled:
        settings = [
            f"torch.compile {policy.backend}",
            policy.mode,
            f"dynamic={policy.dynamic}",
            f"warm-up {policy.warmup}",
        ]
        flags = ("fullgraph", "regional", "capture", "guarded", "strict")
        settings += [name for name in flags if getattr(policy, name)]
        for key in ("regions", "eager_regions"):
            if patterns := getattr(policy, key):
                settings.append(f"{key.replace('_', ' ')} {', '.join(patterns)}")
    console.print(
        Text.assemble(
            (arm.name, "bold"),
            f"  {arm.model.id}, {inspection.dtype} on {inspection.device}; shapes {arm.shapes.kind}; ",
            ", ".join(settings),
        )
    )
    console.print(_shape_table(inspection))
    if inspection.graphs:
        console.print(_graph_table(inspection))
    for title, counts in (
        ("graph breaks", inspection.facts.graph_breaks),
        ("CUDA graphs not made", inspection.facts.cudagraph_skips),
    ):
        shown = [f"{count} × {text}" for text, count in counts.items()] or ["none"]
        console.print(Text.assemble((f"{title}: ", "bold"), "\n  ".join(["", *shown] if len(shown) > 1 else shown)))
    for text in inspection.facts.blind_spots:
        console.print(Text.assemble(("not seen: ", "bold red"), text))
    memory = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in inspection.memory_bytes.items())
    groups = startup_groups(inspection.startup_ns)
    start = ", ".join(f"{name} {groups[name] / 1e9:.1f} s" for name in groups if groups[name] >= 50_000_000)
    console.print(Text.assemble(("memory: ", "bold"), memory))
    console.print(Text.assemble(("start: ", "bold"), start))
    console.print(_verdict(inspection))


def _shape_table(inspection: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    for name in ("shape", "padded to", "planned", "met"):
        table.add_column(name, no_wrap=True)
    for name in ("first", "again"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for visit in inspection.visits:
        word, style = SHOWN[visit.outcome]
        first, _, more = visit.reason.partition("\n")
        table.add_row(
            listed(visit.shape),
            Text("as it is", "dim") if visit.padded == visit.shape else size_of(visit.padded),
            "yes" if visit.planned else Text("no", "dim"),
            Text(word, style),
            _seconds(visit.first_s),
            _seconds(visit.again_s),
            Text(first + (f" (and {len(more.splitlines())} more)" if more else "")),
        )
    return table


def _graph_table(inspection: Inspection) -> Table:
    graphs = inspection.graphs
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    for name in ("graph", "frame", "made for", "in", "sizes"):
        table.add_column(name, no_wrap=name != "frame", overflow="fold")
    for name in ("breaks", "cache", "took", "backend"):
        table.add_column(name, justify="right", no_wrap=True)
    for graph in graphs:
        table.add_row(
            graph.compile_id,
            graph.frame,
            _STEP_SHAPE.sub(_briefly, graph.shape),
            "warm-up" if graph.phase == "warmup" else Text("serving", "bold red"),
            "dynamic" if graph.dynamic else "static",
            f"{len(graph.breaks)}",
            graph.cache or "–",
            _seconds((graph.end_ns - graph.start_ns) / 1e9),
            _seconds(graph.backend_ns / 1e9),
        )
    return table


def _briefly(match: re.Match[str]) -> str:
    kind, *sizes = match.groups()
    batch, length, context = map(int, sizes)
    return listed(StepShape(kind, batch, length, context))  # type: ignore[arg-type]


def _verdict(inspection: Inspection) -> Text:
    total = len(inspection.visits)
    guarded = sum(visit.outcome == "guarded" for visit in inspection.visits)
    aside = f" {guarded} run eagerly, as compile.guarded allows." if guarded else ""
    if not inspection.arm.compile.enabled:
        return Text(f"This arm compiles nothing: all {total} shapes run eagerly.", "bold")
    if not inspection.unready:
        return Text(f"None of the {total} shapes makes the compiler run.{aside}", "bold green")
    groups: dict[str, list[str]] = {}
    for visit in inspection.unready:
        groups.setdefault(SHOWN[visit.outcome][0], []).append(listed(visit.shape))
    named = "; ".join(f"{word}: {', '.join(shapes)}" for word, shapes in groups.items())
    return Text(f"{len(inspection.unready)} of {total} shapes are not ready. {named}.{aside}", "bold red")


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.9995 else f"{value:.2f} s"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
