"""Imports point downwards, and what is cheap stays cheap.

`python -m tests.test_imports` prints the graph; with `--write` it also draws it into docs/tour.md.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from spiralformer.cli import COMMANDS

ROOT = Path(__file__).parent.parent
TOUR = ROOT / "docs" / "tour.md"

# A row may import from the rows below it. Rooms (folders) of a row do not know each other; its
# single files may, in one direction.
ROWS = [
    ["cli", "__main__"],
    ["commands"],
    ["serve", "study", "bench"],
    ["train", "evaluate", "probes", "hf", "vllm", "pretrained"],
    ["data", "decode"],
    ["model_folder", "reference", "convert"],
    ["model"],
    ["diagram", "accounting", "presets", "paper", "config", "costs"],
    ["templates", "plots", "console", "machine", "files", "errors"],
]
ROW = {room: k for k, row in enumerate(ROWS) for room in row}


@dataclass(frozen=True)
class Import:
    importer: str  # a module, spiralformer.train.loop
    imported: str  # a module
    names: tuple[str, ...]  # what is taken from it
    lazy: bool  # inside a function, or for types only

    @property
    def rooms(self) -> tuple[str, str]:
        return room(self.importer), room(self.imported)


def room(module: str) -> str:
    """`train` of spiralformer.train.loop; the package itself, the public door, is `door`."""
    return [*module.split("."), "door"][1]


def read(package: Path) -> list[Import]:
    """Every import of the package's modules from each other, wherever it stands."""
    files = {_module(path, package): path for path in sorted(package.rglob("*.py"))}
    folders = {name for name, path in files.items() if path.name == "__init__.py"}
    return [
        Import(importer, *imported)
        for importer, path in files.items()
        for imported in _imports(importer, path, set(files), importer in folders)
    ]


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(
    importer: str, path: Path, modules: set[str], folder: bool
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bound: dict[str, str] = {}  # names that stand for modules of ours
    later = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        lazy = id(node) in later
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    bound[alias.asname or alias.name] = alias.name
                    yield alias.name, (), lazy
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = importer.split(".")
                base = parts[: len(parts) - node.level + folder]
                source = ".".join([*base, *filter(None, [source])])
            if source.split(".")[0] != "spiralformer":
                continue
            for alias in node.names:
                if (whole := f"{source}.{alias.name}") in modules:
                    bound[alias.asname or alias.name] = whole
                    yield whole, (), lazy
                else:
                    yield source, (alias.name,), lazy
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in bound:
            yield bound[ast.unparse(node.value)], (node.attr,), True


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def faults(imports: list[Import]) -> list[str]:
    """What the house forbids, a line each."""
    wrong = set()
    for taken in imports:
        (above, below), line = taken.rooms, f"{taken.importer} imports {taken.imported}"
        if above == below or above == "door":
            continue  # the door opens onto every room, when asked
        if below == "door":
            if not all(name.startswith("__") for name in taken.names):  # __version__
                wrong.add(f"{line}: a room does not go through the public door")
            continue
        if not {above, below} <= set(ROW):
            wrong.add(f"{line}: {({above, below} - set(ROW)).pop()} has no row")
            continue
        if ROW[above] > ROW[below]:
            wrong.add(f"{line}: upwards")
        elif ROW[above] == ROW[below] and _is_folder(above, imports):
            wrong.add(f"{line}: a sibling")
        private = [n for n in (*taken.imported.split("."), *taken.names) if _is_private(n)]
        if private:
            wrong.add(f"{line}: into its insides, {private[0]}")
    for graph, what in (
        (_graph(i.rooms for i in imports if "door" not in i.rooms), "rooms"),
        (_graph((i.importer, i.imported) for i in imports if not i.lazy), "modules"),
    ):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            wrong.add(f"a cycle of {what}: {' → '.join(error.args[1])}")
    return sorted(wrong)


def _is_folder(name: str, imports: list[Import]) -> bool:
    return any(i.importer.startswith(f"spiralformer.{name}.") for i in imports)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _graph(edges) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for above, below in edges:
        if above != below:
            graph[above].add(below)
    return graph


def draw(imports: list[Import]) -> str:
    """A line for each room: what it imports, nearest rows first."""
    graph = _graph(i.rooms for i in imports if "door" not in i.rooms)
    lines = []
    for row in ROWS:
        for name in row:
            if name in graph:
                below = sorted(graph[name], key=lambda other: (ROW.get(other, 0), other))
                lines.append(f"{name:<13}→ {' '.join(below)}")
        lines.append("")
    text = "\n".join(lines).strip("\n") + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


IMPORTS = read(ROOT / "spiralformer")


def test_imports_point_downwards():
    print(draw(IMPORTS))
    assert not faults(IMPORTS)


def test_the_tour_shows_the_graph_of_the_code():
    assert draw(IMPORTS) in TOUR.read_text(encoding="utf-8"), "python -m tests.test_imports --write"


def test_the_functions_that_the_tour_names_exist():
    named = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", TOUR.read_text(encoding="utf-8")))
    named = {name for name in named if not name.endswith((".py", ".json"))}
    assert len(named) > 40
    assert not {name for name in named if not _exists(ROOT / "spiralformer", name.split("."))}


def _exists(folder: Path, parts: list[str]) -> bool:
    first, *rest = parts
    if (folder / first).is_dir():
        return _exists(folder / first, rest)
    file = folder / f"{first}.py"
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    for part in rest:
        body = next((getattr(node, "body", []) for node in body if _name(node) == part), [])
    return bool(body)


def _name(node: ast.AST) -> str:
    return getattr(node, "name", "")


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("model/blocks.py", "from spiralformer.decode import generate", "upwards"),
        ("model/blocks.py", "def f():\n    from spiralformer.train.loop import train", "upwards"),
        ("model/blocks.py", "from ..hf import neox", "upwards"),
        ("train/loop.py", "import spiralformer.probes.capture", "a sibling"),
        ("data/shards.py", "from spiralformer.decode import generate", "a sibling"),
        ("files.py", "from spiralformer import plots", "a cycle of rooms"),
        ("study/spec.py", "from spiralformer.train.loop import _Batches", "insides, _Batches"),
        ("bench/cases.py", "from spiralformer import files\nfiles._sync('x')", "insides, _sync"),
        ("evaluate/lm.py", "import spiralformer.files as f\nf._sync('x')", "insides, _sync"),
        ("train/loop.py", "from spiralformer import SpiralFormer", "public door"),
        ("data/windows.py", "from spiralformer.data import windows", "a cycle of modules"),
        ("spare.py", "from spiralformer import files", "spare has no row"),
    ],
)
def test_a_planted_import_is_found(tmp_path, module, line, fault):
    package = tmp_path / "spiralformer"
    for path in (ROOT / "spiralformer").rglob("*.py"):
        copy = package / path.relative_to(ROOT / "spiralformer")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    if module == "data/windows.py":  # closed by its neighbour
        (package / "data" / "shards.py").write_text("from spiralformer.data import windows")
        line = "from spiralformer.data import shards"
    with open(package / module, "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    new = set(faults(read(package))) - set(faults(IMPORTS))
    assert any(fault in line for line in new), new


# ---------------------------------------------------------------------------- what is cheap

CHEAP = {"rich"}  # draws tables; 40 ms
HEAVY = {"torch", "transformers", "matplotlib", "scipy", "numpy", "datasets", "lm_eval"}


@pytest.fixture
def third_party(tmp_path):
    """Packages of others that a command imports."""

    def imported(arguments: str) -> set[str]:
        code = (
            "import json, sys\n"
            "from spiralformer.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr, done.stderr
        loaded = set(json.loads(done.stdout.splitlines()[-1]))
        own = {"spiralformer", "__main__", "__mp_main__", "_distutils_hack"}
        return {n for n in loaded - own - set(sys.stdlib_module_names) if "editable" not in n}

    return imported


@pytest.mark.parametrize("arguments", ["spiral-b-160m-mesh", "--table1"])
def test_count_imports_what_draws_its_tables_and_no_more(third_party, arguments):
    assert third_party(f"count {arguments}") <= CHEAP


def test_a_diagram_waits_for_no_heavy_library(third_party):
    assert not third_party("diagram spiral-b-160m-mesh") & HEAVY


@pytest.mark.parametrize("arguments", ["--help", "count --help", "count --json 4+8", "trian", ""])
def test_help_and_mistakes_import_nothing_of_others(third_party, arguments):
    assert third_party(arguments) == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_commands_help_waits_for_heavy_libraries(third_party, command):
    assert not third_party(f"{command} --help") & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        "data nowhere --bytes --out out",
        "train nowhere",
        "generate nowhere --prompt x",
        "serve nowhere",
        "eval nowhere",
        "probe nowhere --out out",
        "diagram nowhere",
        "study nowhere",
        "bench nowhere",
        "import nowhere out",
        "export nowhere out",
    ],
)
def test_what_is_not_there_is_said_before_heavy_libraries_are_loaded(third_party, arguments):
    assert not third_party(arguments) & HEAVY - {"numpy"}


if __name__ == "__main__":
    print(draw(IMPORTS))
    print("\n".join(faults(IMPORTS)))
    if "--write" in sys.argv:
        before, _, rest = TOUR.read_text(encoding="utf-8").partition("```graph\n")
        after = rest.partition("```")[2]
        TOUR.write_text(f"{before}```graph\n{draw(IMPORTS)}```{after}", encoding="utf-8")
