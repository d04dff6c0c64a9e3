"""What a job file chooses by name, with the knobs it brings.

    ROUTING: Registry[Routing] = Registry("routing rule", "rollout.routing", contract=Routing)

    @ROUTING.register("deadline")
    @dataclass(frozen=True, slots=True)
    class Deadline:
        cost: CostModel                                     # given, because it asks for it by this name
        slack: float = knob(1.0, "deadline: ...", above=0)  # becomes rollout.slack

Name, meaning, knobs and behaviour stand in one place. The table of the job file that chooses among them (`choice`) is
given the knobs of all of them (`composed`), so that a new one needs no line anywhere else.

Where a registry says so, a job may also name a class or function of its user's own, file.py:NAME, which keeps the same
contract and whose knobs are set in a table of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stores.errors import ConfigError
from tasks import user_code
from tasks.knobs import Knob, default_of, knob_field, knobs, names_user_code, read, spec_of

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
REGISTRY, AFTER = "registry", "after"
"""Metadata of a field that chooses: what it chooses from, and the field behind which their knobs stand."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A knob as a table takes it over. type: of its values."""

    type: Any
    field: dataclasses.Field[Any]

    @property
    def meaning(self) -> tuple[Any, Knob | None, Any]:
        return self.type, spec_of(self.field), default_of(self.field)


class Registry(Generic[T]):
    """All of one kind that a job file may choose from. what: the kind, for messages. key: of the job file. contract:
    what each must have.

    own: a job may name one from a file of its user's own. options: the key of its table that sets the knobs of such a
    one. guarded: what stands between it and those who use it; is given the name it has in the job file.
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
    ) -> None:
        self.what = what
        self.key = key
        self.own = own
        self.options = options
        self._guarded = guarded
        self._contract = contract
        self._found: dict[str, Callable[..., T]] = {}
        self._knobs: dict[str, Declared] = {}
        self._taken = False  # by a table: what comes later would have no key there

    def __contains__(self, name: object) -> bool:
        return name in self._found

    @property
    def names(self) -> tuple[str, ...]:
        """In the order they were registered."""
        return tuple(self._found)

    @property
    def field(self) -> str:
        """The field of its table that chooses, the last part of the key."""
        return self.key.rpartition(".")[2]

    def register(self, name: str) -> Callable[[C], C]:
        """Decorate what the job file calls `name`. Raises ValueError or TypeError for what cannot be registered."""

        def add(found: C) -> C:
            if name in self._found:
                raise ValueError(f"there is a {self.what} {name!r} already: {self._found[name]}")
            if missing := self.missing(found):
                raise TypeError(f"{self.what} {name!r} lacks {', '.join(missing)}")
            for key, declared in _declared(found).items():
                same = self._knobs.setdefault(key, declared)
                if same.meaning != declared.meaning:
                    raise ValueError(f"{self.what} {name!r}: its knob {key} is declared otherwise by another one")
                if same is declared and self._taken:
                    raise ValueError(f"{self.what} {name!r}: the table of {self.key} is made already, without {key}")
            self._found[name] = found
            return found

        return add

    def find(self, name: str) -> Callable[..., T]:
        """What is registered as `name`. Raises ValueError, with the names there are."""
        if name not in self._found:
            raise ValueError(f"no {self.what} {name!r}; there are {', '.join(self.names)}")
        return self._found[name]

    def load(self, name: str) -> Callable[..., T]:
        """What is registered as `name`, or what it names of the user's own. Raises ConfigError, in one line."""
        if name in self or not (self.own and names_user_code(name)):
            return self.find(name)
        found: Callable[..., T] = user_code.load(name, self.key, "class" if self._contract else "function")
        return found

    def wants(self, name: str, given: str) -> bool:
        """Whether the one called `name` asks to be given this; taken for granted of one of the user's own."""
        return name not in self or given in inspect.signature(self.find(name)).parameters

    def check(self, section: object) -> None:
        """Raise ConfigError if a table sets the knobs of one from a file, and names none. Loads nothing."""
        name, table = getattr(section, self.field), self.key.rpartition(".")[0]
        if self.options and getattr(section, self.options) and name in self:
            raise ConfigError(
                f"{table}.{self.options} sets the knobs of a {self.what} from a file; those of {name} stand in "
                f"[{table}]: {', '.join(knobs(self._found[name])) or 'it has none'}"
            )

    def make(self, section: object, given: Mapping[str, Any] | None = None) -> T:
        """The one that `section`, the table of a job file, chooses: with its knobs as set there, and with what it asks
        for of what is given, by name. Raises ConfigError if one of the user's own cannot be made."""
        name = getattr(section, self.field)
        if name not in self and self.own and names_user_code(name):
            return self._make_own(name, getattr(section, self.options, {}), given or {})
        found = self.find(name)
        known = dict(given or {}) | {name: getattr(section, name) for name in _declared(found)}
        wanted = inspect.signature(found).parameters
        return found(**{name: known[name] for name in wanted if name in known})

    def _make_own(self, name: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> T:
        where = f"{self.key} = {name!r}"
        found: Any = self.load(name)
        if any(isinstance(member, dataclasses.Field) for member in vars(found).values()):
            raise ConfigError(f"{where}: it declares knobs and is no dataclass; write @dataclass above the class")
        try:
            known = dict(given) | read(found, options, where, f"{self.key.rpartition('.')[0]}.{self.options}.")
            asked = inspect.signature(found).parameters
            optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            for one in asked.values():
                if one.name not in known and one.default is one.empty and one.kind not in optional:
                    may = ", ".join(given) or "nothing"
                    raise ConfigError(f"{where}: it asks for {one.name}; it may ask for {may}")
            made: T = found(**{one: known[one] for one in asked if one in known})
        except ConfigError:
            raise
        except Exception as error:  # a user's code
            raise ConfigError(f"{where}: cannot be made: {type(error).__name__}: {user_code.said(error)}") from error
        if missing := self.missing(made):
            raise ConfigError(f"{where}: it lacks {', '.join(missing)}; docs/extending.md has an example")
        return self._guarded(made, name) if self._guarded else made

    def missing(self, found: object) -> list[str]:
        """What the contract asks for and this has not."""
        members = () if self._contract is None else {**inspect.get_annotations(self._contract), **vars(self._contract)}
        return [m for m in members if not m.startswith("_") and not hasattr(found, m)]

    def take_knobs(self) -> dict[str, Declared]:
        """The knobs of all that are registered, for the table that chooses among them."""
        self._taken = True
        return dict(self._knobs)


def choice(registry: Registry[Any], default: str, doc: str, *, knobs_after: str = "") -> str:
    """A knob that chooses from a registry. knobs_after: the field of its table behind which their knobs stand, if not
    this one; `composed` puts them there."""
    spec = Knob(doc=doc, choices=registry.names, own=registry.own)
    made: str = knob_field(default, spec, **{REGISTRY: registry, AFTER: knobs_after})
    return made


def composed(cls: type[T]) -> type[T]:
    """A table with the knobs of all that its choices may name. To be applied below @dataclass."""
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
                    raise ValueError(f"{cls.__name__} has a {key} of its own, and so has a {registry.what}")
                annotations[key] = declared.type
                spec = spec_of(declared.field)
                assert spec is not None
                setattr(cls, key, knob_field(default_of(declared.field), spec))
    if behind:
        raise ValueError(f"{cls.__name__} has no {', '.join(behind)} to put knobs behind")
    cls.__annotations__ = annotations
    return cls


def _declared(found: Any) -> dict[str, Declared]:
    own = knobs(found)
    hints = typing.get_type_hints(found) if own else {}
    return {name: Declared(hints[name], f) for name, f in own.items()}
