"""Plant small faults in the code that protects a verdict, and count those that the tests find.

    python benchmarks/mutants.py list                                  # the mutants of the default seed, one a line
    python benchmarks/mutants.py run --jobs 2 --out mutants.jsonl      # run the tests on each; 200 take two hours
    python benchmarks/mutants.py run --package analysis/statistics     # one package alone

A mutant is one change of one expression or statement: a comparison, `and`, `or`, `not`, an arithmetic operator,
a number, `min` and `max`, `True` and `False`, or a removed call. Equally many are drawn from each
of the packages below; the same seed and source give the same ones. Each mutant runs in its own copy of the tree. Test
files run in order, from the one that imports the mutated module most directly, until a test fails (killed) or none is
left (survived). A failed test runs again with and without the mutant; one that fails at random, or without the mutant
too, kills nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "analysis/checks",
    "analysis/judging",
    "analysis/records",
    "analysis/statistics",
    "loadtests/clients",
    "loadtests/trials",
    "servers/splitter",
)
DEFAULT = tuple(f"tests/{name}" for name in ("analysis", "golden", "loadtests", "servers"))  # of `make test`
COPIED = ("analysis", "benchmarks", "deploy", "docs", "loadtests", "proto", "servers", "tailgate", "tests")
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one stretch of a source file."""

    path: str  # relative to the root
    line: int  # from 1
    begin: int  # offsets in the file's text, in bytes
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return " ".join(f"{self.path}:{self.line}: {self.before} -> {self.after}".split())


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """Yield every mutant of a source file, in the order of the syntax tree."""
    source = path.read_bytes()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def mutant(node: ast.expr | ast.stmt, after: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = source[begin:end].decode()
        return Mutant(path.relative_to(root).as_posix(), node.lineno, begin, end, before, after)

    for node in _runtime_nodes(ast.parse(source)):
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
                changed = ast.Compare(node.left, [_COMPARISONS[type(operator)]()], node.comparators)
                yield mutant(node, f"({ast.unparse(changed)})")
            case ast.BoolOp():
                other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                yield mutant(node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
            case ast.UnaryOp(op=ast.Not()):
                yield mutant(node, f"({ast.unparse(node.operand)})")
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                yield mutant(node, f"({ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))})")
            case ast.Constant(value=bool(value)):
                yield mutant(node, str(not value))
            case ast.Constant(value=int(value)):
                yield mutant(node, str(value + 1))
            case ast.Constant(value=float(value)):
                yield mutant(node, repr(value * 2 + 0.5))
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
                yield mutant(node.func, _NAMES[name])
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr=name)) if name in _NAMES:
                yield mutant(node.func, f"np.{_NAMES[name]}")
            case ast.Expr(value=ast.Call()):
                yield mutant(node, "pass")


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree without annotations, decorators and formatted text."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _runtime_nodes(child)


def drawn(root: Path, count: int, seed: int, packages: Sequence[str] = PACKAGES) -> list[Mutant]:
    """Draw `count` mutants of `root`, equally many from each package."""
    chosen = []
    for place, package in enumerate(PACKAGES):
        if package not in packages:
            continue
        found = [mutant for path in sorted((root / package).rglob("*.py")) for mutant in mutants_of(path, root)]
        share = (count + place) // len(PACKAGES)
        chosen += random.Random(f"{seed} {package}").sample(found, min(share, len(found)))
    return chosen


def importers(paths: Iterable[str], tests: Sequence[str]) -> dict[str, list[str]]:
    """List for each source file the test files that import it, directly or not, the most direct first."""
    graph = grimp.build_graph("tailgate", "benchmarks", "docs", "tests")
    wanted = tuple(test.removesuffix(".py").replace("/", ".") for test in tests)
    files = [name for name in graph.modules if name.startswith(wanted) and ".test_" in name]
    found = {}
    for path in paths:
        chains = [(graph.find_shortest_chain(test, f"tailgate.{_module(path)}"), test) for test in files]
        near = sorted((len(chain), test) for chain, test in chains if chain)
        found[path] = [f"{test.replace('.', '/')}.py" for _, test in near]
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def run_mutant(
    mutant: Mutant, tree: Path, tests: Sequence[str], left: set[str], timeout_s: float, stamp: int
) -> dict[str, object]:
    """Run `tests` in `tree` with the mutant planted; return what killed it, or "" where it survived.

    A test that fails without the mutant too is added to `left` and kills nothing.
    """
    path = tree / mutant.path
    source = path.read_bytes()
    planted = source[: mutant.begin] + mutant.after.encode() + source[mutant.end :]

    def failure(content: bytes, chosen: Sequence[str], second: int) -> str:
        path.write_bytes(content)
        os.utime(path, (stamp + second, stamp + second))  # so that no bytecode of other content is used
        return _first_failure(tree, chosen, sorted(left), timeout_s)

    begin = time.monotonic()
    try:
        compile(planted, str(path), "exec")
        while (killer := failure(planted, tests, 0)) and "::" in killer:
            if failure(planted, [killer], 0) and not failure(source, [killer], 1):
                break
            left.add(killer)
    except SyntaxError:
        killer = "syntax"
    finally:
        path.write_bytes(source)
        os.utime(path, (stamp + 2, stamp + 2))
    return {**asdict(mutant), "name": mutant.name, "killer": killer, "seconds": round(time.monotonic() - begin, 1)}


def _first_failure(tree: Path, tests: Sequence[str], left: Sequence[str], timeout_s: float) -> str:
    """Return the first test that fails, "timeout", "collection" or "" where all pass but those in `left`."""
    if not tests:
        return ""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", *(f"--deselect={name}" for name in left), *tests]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    environment |= {"TAILGATE_TEST_LIMIT_S": "inf"}  # a busy machine is no failure
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode in (0, 5):
        return ""
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")) and "::" in line:
            return line.split(" ", 1)[1].partition(" - ")[0]
    return "collection"


def loadable(root: Path, tests: Sequence[str]) -> set[str]:
    """Return the test files of `root` that can be imported here."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([*command, *tests], cwd=root, env=environment, capture_output=True, text=True, check=False)
    return {line.rpartition(": ")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}


def copy_of(root: Path, folder: Path) -> Path:
    """Copy what the tests need of `root` to `folder`."""
    for name in COPIED:
        ignore = shutil.ignore_patterns("__pycache__", "*.tar.xz", "*.png")
        if (root / name).exists():
            shutil.copytree(root / name, folder / name, ignore=ignore, symlinks=True)
    for path in root.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    return folder


def run(options: argparse.Namespace) -> int:
    """Run all mutants and print a line for each package; exit code 0."""
    mutants = drawn(ROOT, options.count, options.seed, options.package or PACKAGES)
    can_load = loadable(ROOT, options.tests)
    tests = {
        path: [file for file in files if file in can_load]
        for path, files in importers({mutant.path for mutant in mutants}, options.tests).items()
    }
    left: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, Path(options.out).open("a", encoding="utf-8") as out:
        trees: Queue[Path] = Queue()
        for number in range(options.jobs):
            (Path(folder) / str(number)).mkdir()
            trees.put(copy_of(ROOT, Path(folder) / str(number)))

        def one(place: int) -> dict[str, object]:
            tree = trees.get()
            try:
                return run_mutant(
                    mutants[place], tree, tests[mutants[place].path], left, options.timeout, 1_600_000_000 + 10 * place
                )
            finally:
                trees.put(tree)

        rows = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for done in as_completed([pool.submit(one, place) for place in range(len(mutants))]):
                rows.append(row := done.result())
                out.write(json.dumps(row) + "\n")
                out.flush()
                if not row["killer"]:
                    print(f"survived: {row['name']}", flush=True)
    for package in PACKAGES:
        own = [row for row in rows if str(row["path"]).startswith(package)]
        print(f"{package:<24}{sum(bool(row['killer']) for row in own):>5} of {len(own)} killed")
    print(f"{'all':<24}{sum(bool(row['killer']) for row in rows):>5} of {len(rows)} killed")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/mutants.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["list", "run"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--package", action="append", choices=PACKAGES)
    parser.add_argument("--tests", nargs="+", default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a mutant may take; longer is killed")
    parser.add_argument("--out", default="mutants.jsonl", help="results as JSON Lines (default: mutants.jsonl)")
    options = parser.parse_args(arguments)
    if options.action == "run":
        return run(options)
    for mutant in drawn(ROOT, options.count, options.seed, options.package or PACKAGES):
        print(mutant.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
