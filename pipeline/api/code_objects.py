"""Writes Python functions and classes of a notebook or script to files, so that a job can name them.

The file is self-contained: it holds the object pickled by value, so that it can be loaded where neither the notebook
nor the user's modules are, and its source text for readers. What such an object uses from the notebook, the script or
the user's own modules travels with it; what it uses from installed packages is imported where it is loaded.

The code of a branch is kept with the run.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import inspect
import io
import pickle
import re
import sys
import sysconfig
import textwrap
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from staleflow.stores.errors import ConfigError
from staleflow.stores.files import replace_text
from staleflow.stores.trajectories import derived_branches

MAX_BYTES = 2**26
"""Most bytes of a pickled object: every worker loads it, and a submitted job is sent with it."""
SCRIPT_MODULES = ("__main__", "__mp_main__")
"""Names of the module whose code is a notebook or a script."""
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
"""Names of the folders that packages are installed in."""
MAX_SOURCE_TEXTS = 20
"""Most functions and classes whose source text is written for readers."""
FILE_TEMPLATE = """\
# {name}, {kind} that a job was given as a Python object.
# What is loaded is the pickle below, made by Python {python}. {about}
#
{sources}
import base64
import pickle
import sys

if sys.version_info[:2] != {version}:
    raise ImportError("it was pickled by Python {python}, and this is Python %d.%d" % sys.version_info[:2])
{name} = pickle.loads(base64.b85decode("".join(\"\"\"
{pickled}
\"\"\".split())))
"""
_registration_lock = threading.Lock()


def write_code(obj: Callable[..., Any], folder: Path, name: str) -> str:
    """Write a function or class as a self-contained Python file, which a job or a command names like a file of code.

    Args:
        obj: A function, a class, or another callable object.
        folder: Folder of the file; it is created if it is not there.
        name: Name of the file without `.py`, and of an object that has none, such as a lambda.

    Returns:
        `FOLDER/name.py:NAME`, where NAME is the object's own name.

    Raises:
        ConfigError: The object cannot be pickled; the message names the culprit.
        StoreError: The file cannot be written.
    """
    if not callable(obj):
        raise ConfigError(f"{name} = {obj!r}: not a function or class")
    object_name = str(getattr(obj, "__name__", ""))
    object_name = object_name if object_name.isidentifier() else name
    with _user_modules() as user_modules:
        pickled = _pickle(obj, object_name, user_modules)
        sources = list(_source_texts(obj, user_modules))[:MAX_SOURCE_TEXTS]
    source_note = "Its source text, for readers:" if sources else "Its source text is not known."
    comments = textwrap.indent("\n\n".join(sources), "#     ", lambda _: True) if sources else ""
    text = FILE_TEMPLATE.format(
        name=object_name,
        kind="a class" if isinstance(obj, type) else "a function",
        python=".".join(map(str, sys.version_info[:2])),
        version=sys.version_info[:2],
        about=source_note,
        sources="\n".join(line.rstrip() for line in comments.splitlines()) + "\n",
        pickled="\n".join(textwrap.wrap(base64.b85encode(pickled).decode(), 116)),
    )
    path = folder / f"{name}.py"
    replace_text(path, text, "free space or choose another folder")
    return f"{path}:{object_name}"


def _pickle(obj: Any, object_name: str, user_modules: set[str]) -> bytes:
    """An object pickled by value. Raises ConfigError."""
    try:
        pickled: bytes = cloudpickle.dumps(obj)
    except Exception as error:  # an object of the user's may raise anything
        path, why = _find_unpicklable_part(obj, error, user_modules, [object_name])
        raise ConfigError(
            f"{object_name} cannot be sent to worker processes: {'.'.join(path)} cannot be pickled ({why}); create it "
            "inside of the function, or load it from a file there"
        ) from error
    try:
        _WorkerUnpickler(pickled, user_modules).load()
    except Exception as error:  # an object of the user's may raise anything
        why = " ".join(str(error).split())
        raise ConfigError(f"{object_name} cannot be sent to worker processes: loaded there it fails: {why}") from error
    if len(pickled) > MAX_BYTES:
        raise ConfigError(
            f"{object_name} cannot be sent to worker processes: with what it uses it has {len(pickled) / 2**20:,.0f} "
            f"MiB, and the limit is {MAX_BYTES / 2**20:.0f} MiB; load large data inside of the function, from a file"
        )
    return pickled


class _WorkerUnpickler(pickle.Unpickler):
    """Loads an object as another process does, which has neither the notebook nor the user's modules."""

    def __init__(self, pickled: bytes, user_modules: set[str]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._unavailable_modules = (*SCRIPT_MODULES, *user_modules)

    def find_class(self, module: str, name: str) -> Any:
        if module in self._unavailable_modules:
            raise ConfigError(
                f"{name} of {module} is not pickled by value; if a decorator such as functools.cache made it, remove "
                "that, or put the code into a file and name it file.py:NAME"
            )
        return super().find_class(module, name)


def _find_unpicklable_part(
    obj: Any, error: Exception, user_modules: set[str], path: list[str]
) -> tuple[list[str], str]:
    """Where in an object the innermost part is that cannot be pickled, and why."""
    for name, value in _parts(obj, user_modules):
        if name in path:
            continue
        try:
            cloudpickle.dumps(value)
        except Exception as nested_error:  # noqa: BLE001  an object of the user's may raise anything
            return _find_unpicklable_part(value, nested_error, user_modules, [*path, name])
    return path, " ".join(str(error).split())


def _parts(obj: Any, user_modules: set[str]) -> Iterator[tuple[str, Any]]:
    """What is pickled with an object, by name: globals, closure and defaults of a function, members of a class,
    attributes of an instance."""
    if isinstance(obj, types.FunctionType) and _is_pickled_by_value(obj, user_modules):
        for name in dict.fromkeys(_global_names(obj.__code__)):
            if name in obj.__globals__:
                yield name, obj.__globals__[name]
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield name, cell.cell_contents
        for value in (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()):
            yield "a default value", value
    elif isinstance(obj, (staticmethod, classmethod)):
        yield from _parts(obj.__func__, user_modules)
    elif isinstance(obj, types.MethodType):
        yield from (("__func__", obj.__func__), ("__self__", obj.__self__))
    elif isinstance(obj, type) and _is_pickled_by_value(obj, user_modules):
        yield from ((base.__name__, base) for base in obj.__bases__)
        yield from vars(obj).items()
    elif isinstance(obj, types.ModuleType):
        if obj.__name__ in user_modules:
            yield from vars(obj).items()
    elif not isinstance(obj, (type, types.FunctionType)):
        yield from getattr(obj, "__dict__", {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that code may read from its globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _source_texts(obj: Any, user_modules: set[str], visited_ids: set[int] | None = None) -> Iterator[str]:
    """Source texts of an object and of the user's functions and classes that it uses."""
    visited_ids = set() if visited_ids is None else visited_ids
    if id(obj) in visited_ids:
        return
    visited_ids.add(id(obj))
    if isinstance(obj, (types.FunctionType, type)) and _is_pickled_by_value(obj, user_modules):
        with contextlib.suppress(OSError, TypeError):  # a plain Python prompt keeps no source
            yield textwrap.dedent(inspect.getsource(obj)).rstrip()
        if isinstance(obj, type):
            for member in vars(obj).values():
                for _, value in _parts(member, user_modules):
                    yield from _source_texts(value, user_modules, visited_ids)
            return
        for _, value in _parts(obj, user_modules):
            yield from _source_texts(value, user_modules, visited_ids)


def _is_pickled_by_value(obj: Any, user_modules: set[str]) -> bool:
    """Whether a function or class is pickled with its code: one of the user's own, or that no import finds."""
    module = str(getattr(obj, "__module__", ""))
    return module in user_modules or module in SCRIPT_MODULES or module not in sys.modules


@contextlib.contextmanager
def _user_modules() -> Iterator[set[str]]:
    """Names of the user's own modules, whose functions and classes are pickled by value within the block."""
    standard = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or name in SCRIPT_MODULES or name.partition(".")[0] == "staleflow":
            continue
        path = Path(file)
        if not PACKAGE_FOLDERS & set(path.parts) and not path.is_relative_to(standard):
            modules[name] = module
    if modules:  # a package that is installed where its developer edits it is installed, too
        package_names = importlib.metadata.packages_distributions()
        modules = {name: module for name, module in modules.items() if name.partition(".")[0] not in package_names}
    with _registration_lock, contextlib.ExitStack() as registered:
        for module in modules.values():
            with contextlib.suppress(ValueError):  # not in sys.modules under its own name
                cloudpickle.register_pickle_by_value(module)
                registered.callback(cloudpickle.unregister_pickle_by_value, module)
        yield set(modules)


@contextlib.contextmanager
def reward_file(run_dir: Path, branch: str, reward: str | Callable[..., Any]) -> Iterator[str]:
    """Context manager: yields the name of a reward for a new branch. A function is written to the run's code/ folder,
    and removed if the block fails, when there is no branch. Requires the folder's lock. Raises ConfigError,
    StoreError."""
    if isinstance(reward, str):
        yield reward
        return
    if not callable(reward):
        raise ConfigError(f"reward: a {type(reward).__name__}; expected a function, or a name as in a job file")
    derived_branches.check_branch_name(
        (run_dir / "store").resolve(), branch
    )  # the file of a branch that exists is kept
    path = write_code(reward, run_dir / "code", branch_file_name(branch))
    try:
        yield path
    except BaseException:
        Path(path.rpartition(":")[0]).unlink(missing_ok=True)
        raise


def branch_file_name(branch: str) -> str:
    """Name of the file for a branch's code: a Python identifier, different for each branch.

    >>> branch_file_name("strict"), branch_file_name("by length")
    ('branch_strict', 'branch_by_length_588131ba')
    """
    identifier = re.sub(r"[^A-Za-z0-9]", "_", branch)
    return f"branch_{identifier}" if identifier == branch else f"branch_{identifier}_{zlib.crc32(branch.encode()):08x}"
