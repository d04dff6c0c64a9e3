"""The picture of the packages and their imports: python -m docs.architecture > docs/architecture.svg

Packages of one folder stand in rows: each imports only from rows below. An arrow is an import; one that other arrows
imply is left out of the drawing. The description inside the picture lists every import between packages.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise
from pathlib import Path

FOLDERS = ("cli", "pipeline", "tasks", "stores")
"""From the top; each imports only from those below."""
ROOT = Path(__file__).parents[1]
WIDTH, MARGIN, GAP, ROW_GAP, LINE = 980, 20, 16, 32, 16
"""Of the picture, in pixels. LINE: height of a line of text."""
WIDEST = 300
"""Of a box, in pixels."""
COLOURS = {"cli": "#fdebd2", "pipeline": "#dcebfa", "tasks": "#e0f2df", "stores": "#efe5f7"}

Graph = dict[str, set[str]]
"""The packages that each package imports."""


def module_name(path: Path) -> str:
    """The name by which a file below the repository's root is imported."""
    return ".".join(("staleflow", *path.with_suffix("").parts))


def read_modules() -> dict[str, ast.Module]:
    """All modules of the four folders, parsed, without packages' `__init__`, which hold a docstring only."""
    files = (path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {module_name(path): ast.parse((ROOT / path).read_text()) for path in files if path.stem != "__init__"}


def imported(tree: ast.AST, modules: Iterable[str], *, by_name: bool = True) -> set[str]:
    """The modules that a module imports, inside functions and under TYPE_CHECKING too.

    by_name: a text that names a module, `module` or `module:attribute`, counts, as something imports it by that name.
    What follows `-m` does not: it is a program that is started.
    """
    names: set[str] = set()
    programs: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, (ast.List, ast.Tuple)):
            programs |= {after for option, after in pairwise(node.elts) if ast.unparse(option) == "'-m'"}
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in programs:
            names.add(node.value.partition(":")[0])
    return names.intersection(modules)


def package_of(module: str) -> str:
    """The package that stands for a module: `pipeline.runtime`; the folder for a module directly in it."""
    return ".".join(module.split(".")[1:-1][:2])


def package_graph(modules: Mapping[str, ast.Module]) -> Graph:
    """Imports between the packages of modules, without those by name: a registry names what is above it."""
    graph: Graph = {package_of(name): set() for name in modules}
    for name, tree in modules.items():
        graph[package_of(name)] |= {package_of(other) for other in imported(tree, modules, by_name=False)} - {
            package_of(name)
        }
    return graph


def rows_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Packages in rows, each importing only from later rows; as low as possible."""
    height: dict[str, int] = {}
    for package in TopologicalSorter(graph).static_order():
        height[package] = max((height[other] + 1 for other in graph[package]), default=0)
    rows = sorted(set(height.values()), reverse=True)
    return [sorted(package for package in graph if height[package] == row) for row in rows]


def direct(graph: Mapping[str, set[str]]) -> Graph:
    """The imports that no chain of others implies."""
    below: Graph = {}
    for package in TopologicalSorter(graph).static_order():
        below[package] = graph[package].union(*(below[other] for other in graph[package]))
    return {p: others - set().union(*(below[other] for other in others)) for p, others in graph.items()}


def about(package: str) -> str:
    """What a package is for: its docstring; the names of its modules for those that lie directly in a folder."""
    folder = ROOT.joinpath(*package.split("."))
    if "." not in package and package != "cli":
        return ", ".join(sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"))
    return (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").rstrip(".")


def draw(graph: Graph) -> str:
    """The picture as SVG."""
    boxes: list[str] = []
    arrows: list[str] = []
    y = MARGIN
    for folder in FOLDERS:
        inside = {p: {o for o in others if _folder(o) == folder} for p, others in graph.items() if _folder(p) == folder}
        top, y = y, y + 34
        places: dict[str, tuple[float, float, float]] = {}  # middle, top and bottom of each box
        for row in rows_of(inside):
            width = min(WIDEST, (WIDTH - 4 * MARGIN - GAP * (len(row) - 1)) / len(row))
            texts = {package: textwrap.wrap(about(package), int(width / 7)) for package in row}
            height = 28 + LINE * max(map(len, texts.values()))
            x = (WIDTH - width * len(row) - GAP * (len(row) - 1)) / 2
            for package in row:
                boxes.append(_box(x, y, width, height, package, texts[package]))
                places[package] = (x + width / 2, y, y + height)
                x += width + GAP
            y += height + ROW_GAP
        y -= ROW_GAP - 16
        band = (
            f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{y - top:.0f}" rx="8" '
            f'fill="{COLOURS[folder]}"/><text x="{MARGIN + 12}" y="{top + 22}" class="folder">{folder}/</text>'
        )
        arrows.append(band)
        for package, others in direct(inside).items():
            arrows += [_arrow(places[package], places[other]) for other in sorted(others)]
        if folder != FOLDERS[-1]:
            arrows.append(_arrow((WIDTH / 2, 0, y), (WIDTH / 2, y + 22, 0)))
        y += 24
    edges = "\n".join(f"{package} -> {other}" for package in sorted(graph) for other in sorted(graph[package]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" font-family="sans-serif">\n'
        f"<title>Packages of staleflow</title>\n<desc>Imports:\n{escape(edges)}\n</desc>\n"
        "<style>.folder{font:bold 16px sans-serif}.name{font:bold 13px sans-serif}.about{font:12px sans-serif;"
        "fill:#444}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#667"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="white"/>\n' + "\n".join([*arrows, *boxes]) + "\n</svg>"
    )


def _folder(package: str) -> str:
    return package.partition(".")[0]


def _box(x: float, y: float, width: float, height: float, package: str, lines: list[str]) -> str:
    name = package.rpartition(".")[2] if "." in package or package == "cli" else "modules"
    words = "".join(
        f'<text x="{x + 10:.0f}" y="{y + 34 + LINE * i:.0f}" class="about">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5" fill="white" stroke="#889"/>'
        f'<text x="{x + 10:.0f}" y="{y + 18:.0f}" class="name">{name}</text>{words}'
    )


def _arrow(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    """From the bottom of one box to the top of another; each as (middle, top, bottom)."""
    return (
        f'<line x1="{start[0]:.0f}" y1="{start[2]:.0f}" x2="{end[0]:.0f}" y2="{end[1]:.0f}" stroke="#667" '
        'marker-end="url(#tip)"/>'
    )


if __name__ == "__main__":
    print(draw(package_graph(read_modules())))
