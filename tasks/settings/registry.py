"""Registries of classes that a job file selects by name, each with its own knobs.

    class Migration(RegistryEntry, ABC): ...

    MIGRATION: Registry[Migration] = Registry("migration rule", "rollout.migration", Migration)

    @MIGRATION.register("largest_gain")
    @dataclass(frozen=True, slots=True)
    class LargestGain(Migration):
        cost: CostModel = parameter()                           # filled in by Registry.make
        gain: float = knob(0.2, "minimum gain", low=0, high=1)  # the job file's rollout.migration.gain

    class RolloutConfig:
        migration: Migration = choice(MIGRATION, "none", "which running trajectories move")

A job then holds the entry itself, with its own knobs and no others: `config.rollout.migration.gain`. In a job file,
`migration = "largest_gain"` is short for the table `[rollout.migration]` with `name = "largest_gain"`, where its knobs
are set.

Where a registry allows it, a job may also name user code, file.py:NAME, which meets the same contract. Its knobs are
set in the same table, and checked when the code is loaded: reading a job loads no user code.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from staleflow.stores.errors import ConfigError, raised_as, type_and_message
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.knobs import (
    METADATA,
    PARAMETER,
    Knob,
    all_keys,
    keys_of,
    knobs,
    names_user_code,
    parameter,
    read,
    refuse_large,
    shorten,
    unknown_choice_error,
)


class RegistryEntry:
    """Base of registered classes. Subclasses are frozen dataclasses. Fields made by `knob` are set in the job file;
    those made by `parameter` are filled in by `Registry.make`."""

    __slots__ = ()
    name: str
    """Name of the entry in a job file."""

    def needs(self, name: str) -> bool:
        """Whether the entry has a parameter of this name."""
        return any(f.name == name for f in parameters(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode(RegistryEntry):
    """An entry defined in a user's file, file.py:NAME or module:NAME. A registry's subclass implements its contract
    with `code`; its `code_kind` says whether that is a class or a function."""

    code_kind: ClassVar[str] = "class"

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the knobs in the job file, not checked."""
    code: Any = parameter()
    """The object that the user's class constructs, or the function; None until `Registry.make` has loaded it."""

    def needs(self, name: str) -> bool:
        return True


REGISTRIES: list[Registry[Any]] = []
"""Registries of job files, among which a name is looked up that one of them does not have."""
T = TypeVar("T", bound=RegistryEntry)
C = TypeVar("C", bound=type[Any])


class Registry(Generic[T]):
    """Registered classes of one kind, from which a job file selects by name.

    Args:
        label: What the classes are, for messages.
        key: Key of the choice in a job file.
        contract: Base class of the entries.
        user_code: Class of the entries that load user code; None if it is not allowed.
        unavailable: Names that exist but that no job may select, each with the rest of the error message.
    """

    def __init__(
        self,
        label: str,
        key: str,
        contract: type[Any],  # type[T] would refuse an abstract class
        *,
        user_code: type[UserCode] | None = None,
        unavailable: Mapping[str, str] | None = None,
    ) -> None:
        self.label = label
        self.key = key
        self.contract = contract
        self.user_code = user_code
        self.unavailable = dict(unavailable or {})
        self._entries: dict[str, type[T]] = {}
        if "." in key:  # a job file has the key, unlike those of a command's options
            REGISTRIES.append(self)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, in order of registration."""
        return tuple(self._entries)

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator that registers a class as `name`. Raises ValueError or TypeError if it is not valid."""

        def add(entry: C) -> C:
            if name in self._entries:
                raise ValueError(f"{self.label} {name!r} is registered already: {self._entries[name]}")
            if not issubclass(entry, self.contract) or "__dataclass_fields__" not in vars(entry):
                raise TypeError(f"{self.label} {name!r} must be a dataclass derived from {self.contract.__name__}")
            if missing_names := self.missing_members(entry):
                raise TypeError(f"{self.label} {name!r} lacks {', '.join(missing_names)}")
            entry.name = name
            self._entries[name] = entry
            return entry

        return add

    def find(self, name: str) -> type[T]:
        """Return the class registered as `name`. Raises ValueError, listing the registered names."""
        if name not in self._entries:
            raise ValueError(f"no {self.label} {name!r}; choose from {', '.join(self.names)}")
        return self._entries[name]

    def names_with_knob(self, knob: str) -> list[str]:
        """Names of the entries that have a knob of this name."""
        return [name for name, entry in self._entries.items() if knob in keys_of(entry)]

    def make(self, entry: T, values: Mapping[str, Any] | None = None) -> T:
        """Complete an entry that a job selects: load user code and fill in its parameters, which are taken by name from
        `values`. Raises ConfigError if user code cannot be loaded or constructed."""
        if isinstance(entry, UserCode):
            return self._make_user_code(entry, values or {})
        parameter_values = {f.name: (values or {})[f.name] for f in parameters(entry)}
        result: T = dataclasses.replace(entry, **parameter_values)  # type: ignore[type-var]  # each entry is a dataclass
        return result

    def _make_user_code(self, entry: Any, values: Mapping[str, Any]) -> T:
        label = f"{self.key} = {entry.name!r}"
        code: Any = user_code.load(entry.name, self.key, entry.code_kind)
        if any(isinstance(member, dataclasses.Field) for member in getattr(code, "__dict__", {}).values()):
            raise ConfigError(f"{label}: it declares knobs but is not a dataclass; write @dataclass above the class")
        problem = f"{label}: its type hints cannot be read"
        with raised_as(ConfigError, problem, NameError, describe=type_and_message):
            if taken_names := [name for name in knobs(code) if name in values]:
                raise ConfigError(f"{label}: the run sets {', '.join(taken_names)}; give this knob another name")
            knob_values = read(code, entry.knobs, label, f"{self.key}.")
        if entry.code_kind == "class":
            code = self._construct(code, {**values, **knob_values}, values, label)
        result: T = dataclasses.replace(entry, code=code)
        return result

    def _construct(self, cls: Any, arguments: Mapping[str, Any], values: Mapping[str, Any], label: str) -> Any:
        """Construct a user's class with those of `arguments` that its signature names; **kwargs receives none. Raises
        ConfigError. values: the arguments that are not knobs."""
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        try:
            signature = inspect.signature(cls).parameters
            for param in signature.values():
                if param.name not in arguments and param.default is param.empty and param.kind not in optional:
                    raise ConfigError(
                        f"{label}: unknown parameter {param.name}; available: {', '.join(values) or 'nothing'}"
                    )
            result = cls(**{name: arguments[name] for name in signature if name in arguments})
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(f"{label}: cannot be constructed: {type_and_message(error)}") from error
        if missing_names := self.missing_members(result):
            raise ConfigError(f"{label}: it lacks {', '.join(missing_names)}; docs/extending.md has an example")
        return result

    def missing_members(self, entry: object) -> list[str]:
        """Return the members of the contract that a class or object lacks."""
        members = (*inspect.get_annotations(self.contract), *vars(self.contract))
        return [
            m
            for m in members
            if not m.startswith("_") and not _has_member(self.contract, m) and not _has_member(entry, m)
        ]


def parameters(entry: RegistryEntry) -> list[dataclasses.Field[Any]]:
    """Return the fields of an entry that `Registry.make` fills in."""
    return [f for f in dataclasses.fields(entry) if PARAMETER in f.metadata]  # type: ignore[arg-type]


def _has_member(entry: object, name: str) -> bool:
    """Whether an object has a member that is not abstract. Does not evaluate properties, which may be user code."""
    try:
        return not getattr(inspect.getattr_static(entry, name), "__isabstractmethod__", False)
    except AttributeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Knob):
    """Meaning of a field whose value is an entry of a registry. default: name of the default entry."""

    registry: Registry[Any]
    default: str

    @property
    def limits(self) -> str:
        return " | ".join(self.registry.names)

    @property
    def has_common_knobs(self) -> bool:
        """Whether all entries share knobs. A name in place of the table would reset them, so it is not allowed."""
        return bool(keys_of(self.registry.contract))

    def error(self, value: object) -> str:
        """Return an error text for an unknown name, to follow its key in a message."""
        registry, allows_user_code = self.registry, self.registry.user_code is not None
        if isinstance(value, str) and (value in registry or (allows_user_code and names_user_code(value))):
            return ""
        if isinstance(value, str) and value in registry.unavailable:
            return f"= {shorten(value)} {registry.unavailable[value]}"
        other_registries = [r for r in REGISTRIES if isinstance(value, str) and value in r]
        suggestion = f"{other_registries[0].key} = {value!r}" if len(other_registries) == 1 else ""
        return unknown_choice_error(value, registry.names, user_code=allows_user_code, suggestion=suggestion)

    def read(self, value: object, hint: Any, source: str, key: str, root: type[Any]) -> Any:
        """Return the entry selected by a name, or by a table with `name` and knobs. Raises ConfigError."""
        table = {"name": value} if isinstance(value, str) and not self.has_common_knobs else value
        if not isinstance(table, Mapping):
            expected = "a table" if self.has_common_knobs else "a name, or a table with name"
            remedy = f"; set {key}.name" if isinstance(value, str) else ""
            raise ConfigError(f"{source}: {key} must be {expected}, not {shorten(value)}{remedy}")
        name, knobs = table.get("name", self.default), {k: v for k, v in table.items() if k != "name"}
        if error := self.error(name):
            raise ConfigError(f"{source}: {key if table is not value else f'{key}.name'} {error}")
        if name not in self.registry:
            refuse_large(knobs, f"{source}: {key}")
            return self.registry.user_code(name=name, knobs=knobs)  # type: ignore[misc]  # `error` has checked
        entry = self.registry.find(name)
        for knob in knobs:
            if knob not in keys_of(entry):
                raise ConfigError(f"{source}: {key}.{knob}: {self._unknown_knob_error(str(knob), name, key)}")
        return entry(**read(entry, knobs, source, f"{key}.", root))

    def _unknown_knob_error(self, knob: str, name: str, key: str) -> str:
        """Return an error text for a knob that the entry `name` does not have, with a suggestion."""
        registry, knobs = self.registry, keys_of(self.registry.find(name))
        if other_names := registry.names_with_knob(knob):
            return f"a knob of {', '.join(other_names)}; {key}.name is {name}, which has {', '.join(knobs) or 'none'}"
        matches = difflib.get_close_matches(knob, ("name", *knobs), n=1)
        hint = f"did you mean {key}.{matches[0]}?" if matches else f"it has {', '.join(knobs) or 'none'}"
        return f"the {registry.label} {name} has no such knob; {hint}"

    def keys(self, key: str) -> Iterator[str]:
        yield f"{key}.name"
        for name in self.registry.names:
            yield from all_keys(self.registry.find(name), f"{key}.")


def choice(registry: Registry[T], default: str, doc: str) -> T:
    """Declare a field whose value is an entry of a registry."""
    spec = Choice(doc=doc, registry=registry, default=default)
    choice_field: T = field(default=registry.find(default)(), metadata={METADATA: spec})
    return choice_field
