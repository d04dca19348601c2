"""Reading a model's configuration: typed fields, aliases, defaults, errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiered_kv.sizing.checks import MOST, bad, count, fault

MOST_LAYERS = 1024


class Fields:
    """The fields of a configuration, or of its text part.

    A field is looked up by its name, by its aliases (`n_head` for `num_attention_heads`), and at
    last in the defaults of the architecture, which a published configuration may leave out.

    Args:
        values: The configuration.
        aliases: Other names, by the usual name.
        defaults: Values of fields that may be left out.
        prefix: Where the fields are, as errors show it: `"text_config."`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self.values = values
        self.aliases = aliases or {}
        self.defaults = defaults or {}
        self.prefix = prefix
        self._by_layer: Mapping[int, Any] | None = None

    def _find(self, name: str) -> Any:
        # A null in the configuration is an answer: no default takes its place.
        for where in (self.values, self.defaults):
            for known in (name, self.aliases.get(name)):
                if known is not None and known in where:
                    return where[known]
        return None

    def given(self, name: str) -> Any:
        """The value as the configuration has it, without defaults; None where it has none."""
        alias = self.aliases.get(name)
        value = self.values.get(name)
        return value if value is not None or alias is None else self.values.get(alias)

    def has(self, *names: str) -> bool:
        """Whether every one of the fields has a value."""
        return all(self._find(name) is not None for name in names)

    def missing(self, name: str, *others: str) -> Exception:
        """The error for a field that is not there."""
        either = "".join(f" or `{self.prefix}{other}`" for other in others)
        return fault(f"`{self.prefix}{name}`{either} is missing: the configuration must have it")

    def integer(self, name: str, *others: str, least: int = 1) -> int:
        """The first of some fields that has a value, an integer.

        Raises:
            InvalidArgumentError: None has one, or it is no integer or out of range.
        """
        value = self.maybe(name, *others, least=least)
        if value is None:
            raise self.missing(name, *others)
        return value

    def maybe(self, *names: str, least: int = 0) -> int | None:
        """The first of some fields that has a value, an integer; None where none has.

        Raises:
            InvalidArgumentError: It is no integer or out of range.
        """
        for name in names:
            value = self._find(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if value is not None:
                return count(self.prefix + name, value, least=least)
        return None

    def number(self, name: str) -> float:
        """A number."""
        value = self._find(name)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not 0 < value <= MOST:
            raise bad(self.prefix + name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self._find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(self.prefix + name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string; None where there is none."""
        value = self._find(name)
        if value is not None and not isinstance(value, str):
            raise bad(self.prefix + name, value, "text")
        return value

    def sequence(self, name: str) -> Sequence[Any] | None:
        """A list, of a bounded length; None where there is none."""
        value = self._find(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) > MOST_LAYERS:
            raise bad(self.prefix + name, value, f"a list of at most {MOST_LAYERS} entries")
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of integers; None where there is none."""
        found = self.sequence(name)
        if found is None:
            return None
        return [count(f"{self.prefix}{name}[{at}]", item, least=0) for at, item in enumerate(found)]

    def words(self, name: str) -> list[str] | None:
        """A list of strings; None where there is none."""
        found = self.sequence(name)
        if found is None:
            return None
        for at, item in enumerate(found):
            if not isinstance(item, str):
                raise bad(f"{self.prefix}{name}[{at}]", item, "text")
        return list(found)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A nested mapping; empty where there is none."""
        value = self._find(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise bad(self.prefix + name, value, "an object")
        return value

    def nested(self, name: str) -> Fields:
        """The fields of a nested mapping."""
        return Fields(self.mapping(name), prefix=f"{self.prefix}{name}.")

    def with_values(self, values: Mapping[str, Any]) -> Fields:
        """These fields with some values in place of their own."""
        changed = {**self.values, **values}
        return Fields(changed, self.aliases, self.defaults, self.prefix)

    def layers(self) -> int:
        """Number of layers.

        Raises:
            InvalidArgumentError: There is none, or there are too many.
        """
        name = "num_hidden_layers"
        found = self.maybe(name, "num_layers", "n_layer", "n_layers", "decoder_layers", least=1)
        if found is None:
            raise self.missing(name)
        return count(self.prefix + name, found, least=1, most=MOST_LAYERS)

    def at_layer(self, layer: int) -> Fields:
        """The fields of one layer: `per_layer_config` overrides the others."""
        own = self._overrides().get(layer)
        if own is None:
            return self
        if not isinstance(own, Mapping):
            raise bad(f"{self.prefix}per_layer_config[{layer}]", own, "an object")
        return self.with_values(own)

    def _overrides(self) -> Mapping[int, Any]:
        if self._by_layer is None:
            found: dict[int, Any] = {}
            for key, own in self.mapping("per_layer_config").items():
                # transformers writes the layers' numbers with leading zeros.
                at = _number(key)
                if at is not None:
                    found.setdefault(at, own)
            self._by_layer = found
        return self._by_layer


def _number(key: object) -> int | None:
    """A layer's number as a key of a mapping has it."""
    text = str(key)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else None
