"""Registries of the classes and functions that a job file selects by name, with their knobs.

    ROUTING: Registry[Routing] = Registry("routing rule", "rollout.routing", contract=Routing)

    @ROUTING.register("deadline")
    @dataclass(frozen=True, slots=True)
    class Deadline:
        cost: CostModel                                     # passed in by its name
        slack: float = knob(1.0, "deadline: ...", above=0)  # becomes rollout.slack

Name, meaning, knobs and behaviour are declared in one place. The job-file table that selects one (`choice`) receives
the knobs of all (`composed`), so that adding an entry needs no change anywhere else.

Where a registry allows it, a job may also name user code, file.py:NAME, which meets the same contract and whose knobs
are set in a separate table.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.knobs import Knob, default_of, knob_field, knobs, names_user_code, read, spec_of

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
REGISTRY, AFTER = "registry", "after"
"""Metadata keys of a `choice` field: its registry, and the field after which the knobs are placed."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A knob that a registered class declares. type: of its values."""

    type: Any
    field: dataclasses.Field[Any]

    @property
    def meaning(self) -> tuple[Any, Knob | None, Any]:
        return self.type, spec_of(self.field), default_of(self.field)


class Registry(Generic[T]):
    """Entries of one kind that a job file may select by name. what: the kind, for messages. key: in the job file.
    contract: protocol that every entry implements.

    own: user code may be named too. options: key of the same table that sets the knobs of user code. guarded: wraps
    an instance of user code, given its name in the job file. removed: names of before that are refused, each with the
    reason.
    """

    def __init__(
        self,
        what: str,
        key: str,
        *,
        contract: type[Any] | None = None,
        own: bool = False,
        options: str = "",
        guarded: Callable[[T, str], T] | None = None,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self.key = key
        self.own = own
        self.options = options
        self._guarded = guarded
        self.removed: Mapping[str, str] = removed or {}
        self._contract = contract
        self._unlisted: set[str] = set()
        self._entries: dict[str, Callable[..., T]] = {}
        self._knobs: dict[str, Declared] = {}
        self._taken = False  # by a table: knobs registered later would have no key in it

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names that are listed, in order of registration."""
        return tuple(name for name in self._entries if name not in self._unlisted)

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Registered names that only runs of before have."""
        return tuple(name for name in self._entries if name in self._unlisted)

    @property
    def field(self) -> str:
        """Name of the selecting field in its table: the last part of the key."""
        return self.key.rpartition(".")[2]

    def register(self, name: str, *, listed: bool = True) -> Callable[[C], C]:
        """Decorator that registers a class or function as `name`. listed: offered to people; else it is kept for runs
        of before. Raises ValueError or TypeError if it is not valid."""

        def add(found: C) -> C:
            if name in self._entries:
                raise ValueError(f"{self.what} {name!r} is registered already: {self._entries[name]}")
            if missing := self.missing(found):
                raise TypeError(f"{self.what} {name!r} lacks {', '.join(missing)}")
            for key, declared in _declared(found).items():
                same = self._knobs.setdefault(key, declared)
                if same.meaning != declared.meaning:
                    raise ValueError(f"{self.what} {name!r}: knob {key} is declared differently by another {self.what}")
                if same is declared and self._taken:
                    raise ValueError(f"{self.what} {name!r}: the table of {self.key} is already built, without {key}")
            self._entries[name] = found
            if not listed:
                self._unlisted.add(name)
            return found

        return add

    def find(self, name: str) -> Callable[..., T]:
        """The entry registered as `name`. Raises ValueError, listing the registered names."""
        if name not in self._entries:
            raise ValueError(f"no {self.what} {name!r}; choose from {', '.join(self.names)}")
        return self._entries[name]

    def load(self, name: str) -> Callable[..., T]:
        """The entry registered as `name`, or the user code it names. Raises ConfigError with a
        one-line message for user code, ValueError for a name that is neither."""
        if name in self or not (self.own and names_user_code(name)):
            return self.find(name)
        found: Callable[..., T] = user_code.load(name, self.key, "class" if self._contract else "function")
        return found

    def wants(self, name: str, given: str) -> bool:
        """Whether entry `name` has a parameter called `given`; assumed to be so for user code."""
        return name not in self or given in inspect.signature(self.find(name)).parameters

    def check(self, section: object) -> None:
        """Raise ConfigError if a table sets knobs of user code but names none. Loads nothing."""
        name, table = getattr(section, self.field), self.key.rpartition(".")[0]
        if self.options and getattr(section, self.options) and name in self:
            raise ConfigError(
                f"{table}.{self.options} sets the knobs of a {self.what} from a file; those of {name} are set in "
                f"[{table}]: {', '.join(knobs(self._entries[name])) or 'none'}"
            )

    def make(self, section: object, given: Mapping[str, Any] | None = None) -> T:
        """An instance of the entry that `section`, a table of a job file, selects. Its parameters are filled by name:
        knobs as set there, the rest from `given`. Raises ConfigError if user code cannot be constructed."""
        name = getattr(section, self.field)
        if name not in self and self.own and names_user_code(name):
            return self._make_user_code(name, getattr(section, self.options, {}), given or {})
        found = self.find(name)
        known = dict(given or {}) | {name: getattr(section, name) for name in _declared(found)}
        wanted = inspect.signature(found).parameters
        return found(**{name: known[name] for name in wanted if name in known})

    def _make_user_code(self, name: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> T:
        where = f"{self.key} = {name!r}"
        found: Any = self.load(name)
        if any(isinstance(member, dataclasses.Field) for member in vars(found).values()):
            raise ConfigError(f"{where}: it declares knobs but is not a dataclass; write @dataclass above the class")
        try:
            known = dict(given) | read(found, options, where, f"{self.key.rpartition('.')[0]}.{self.options}.")
            asked = inspect.signature(found).parameters
            optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            for one in asked.values():
                if one.name not in known and one.default is one.empty and one.kind not in optional:
                    may = ", ".join(given) or "nothing"
                    raise ConfigError(f"{where}: unknown parameter {one.name}; available: {may}")
            made: T = found(**{one: known[one] for one in asked if one in known})
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(
                f"{where}: cannot be constructed: {type(error).__name__}: {user_code.said(error)}"
            ) from error
        if missing := self.missing(made):
            raise ConfigError(f"{where}: it lacks {', '.join(missing)}; docs/extending.md has an example")
        return self._guarded(made, name) if self._guarded else made

    def missing(self, found: object) -> list[str]:
        """Members of the contract that `found` lacks."""
        members = () if self._contract is None else {**inspect.get_annotations(self._contract), **vars(self._contract)}
        return [m for m in members if not m.startswith("_") and not _has(found, m)]

    def take_knobs(self) -> dict[str, Declared]:
        """The knobs of all entries, for the table that selects one. New knobs cannot be registered afterwards."""
        self._taken = True
        return dict(self._knobs)


def _has(found: object, member: str) -> bool:
    """Whether there is such a member, without computing a property of user code."""
    try:
        inspect.getattr_static(found, member)
    except AttributeError:
        return False
    return True


def choice(registry: Registry[Any], default: str, doc: str, *, knobs_after: str = "") -> str:
    """A knob that selects from a registry. knobs_after: the field after which `composed` places the entries' knobs; by
    default this one."""
    spec = Knob(
        doc=doc,
        choices=registry.names,
        own=registry.own,
        unlisted=registry.unlisted,
        removed=registry.removed,
    )
    made: str = knob_field(default, spec, **{REGISTRY: registry, AFTER: knobs_after})
    return made


def composed(cls: type[T]) -> type[T]:
    """Class decorator that adds the knobs of all entries its `choice` fields may select. Apply below @dataclass."""
    own = dict(cls.__annotations__)
    behind: dict[str, list[Registry[Any]]] = {}
    for name in own:
        metadata = getattr(vars(cls).get(name), "metadata", {})
        if REGISTRY in metadata:
            behind.setdefault(metadata[AFTER] or name, []).append(metadata[REGISTRY])
    annotations: dict[str, Any] = {}
    for name, hint in own.items():
        annotations[name] = hint
        for registry in behind.pop(name, ()):
            for key, declared in registry.take_knobs().items():
                if key in own or key in annotations:
                    raise ValueError(f"{cls.__name__} declares {key}, and so does a {registry.what}")
                annotations[key] = declared.type
                spec = spec_of(declared.field)
                assert spec is not None
                setattr(cls, key, knob_field(default_of(declared.field), spec))
    if behind:
        raise ValueError(f"{cls.__name__} has no field {', '.join(behind)} to place knobs after")
    cls.__annotations__ = annotations
    return cls


def _declared(found: Any) -> dict[str, Declared]:
    own = knobs(found)
    hints = typing.get_type_hints(found) if own else {}
    return {name: Declared(hints[name], f) for name, f in own.items()}
