"""One sentence out of what jsonargparse has to say about a configuration."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

PLACES = ("recast_lightning.rewards", "recast_lightning.callbacks", "recast_lightning.proposals", "recast_lightning.policy",
          "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.strategies")  # fmt: skip
_MANY = 24  # names that still make a sentence
_TYPES = {
    "float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false", "dict": "a mapping",
    "list": "a list", "collections.abc.Sequence": "a list", "collections.abc.Iterable": "a list", "NoneType": "null",
}  # fmt: skip


def explained(message: str, sections: dict[str, Any]) -> str:
    """The sentence that says what to mend.

    Args:
        message: as jsonargparse gives it, on many lines; each deeper line says more.
        sections: top-level key → the class or function whose parameters are its keys.
    """
    lines = [line for line in message.splitlines() if line.strip()]
    try:
        return _explained(lines, [], None, sections) or message
    except (AttributeError, ImportError, LookupError, StopIteration):  # a form that jsonargparse did not have before
        return lines[-1].strip()


def _explained(lines: list[str], where: list[str], owner: Any, sections: dict[str, Any]) -> str:
    head, rest = lines[0].strip().removeprefix("- "), lines[1:]
    if rest and (key := re.fullmatch(r'Parser key "(.+)":', head)):
        return _explained(rest, [*where, key[1]], owner, sections)
    if rest and (path := re.fullmatch(r"Problem with given class_path '(.+)':", head)):
        owner = _found(path[1])
        return _explained(rest, [*where, path[1].rpartition(".")[2]] if owner else where, owner, sections)
    place = ".".join(where)
    if head.startswith("Does not validate against any of the Union"):
        return _of_union(rest, where, owner, sections)
    if option := re.fullmatch(r"(?:Subcommand '.+' does not accept option|Option) '(.+?)'(?: is not accepted)?", head):
        return _unknown_option(option[1], place, owner, sections)
    if argument := re.fullmatch(r"unrecognized arguments: --([\w.]+).*", head):
        return _unknown_option(argument[1], place, owner, sections)
    if missing := re.fullmatch(r"module '(.+)' has no attribute '(.+)'", head):
        return f"{place}: there is no {missing[2]!r} in {missing[1]}{suggestion(missing[2], _names(missing[1]))}"
    if name := re.fullmatch(r"Expected a dot import path string: (.+)", head):
        known = [known for module in PLACES for known in _names(module)]
        close = suggestion(name[1], known, show=False)
        return f"{place}: there is no class {name[1]!r}{close} A class is named by its dotted path."
    if wrong := re.fullmatch(r"Expected an? (.+?)\.? Got value: (.*)", head):
        return f"{place}: expected {_type(wrong[1])}, got {_value(wrong[2])}."
    if required := re.fullmatch(r"the following arguments are required: (.+)", head):
        return f"{place} needs {required[1]}, which is missing." if place else f"{required[1]} is missing."
    if abstract := re.fullmatch(r"Expected an instantiatable class, but (.+) is abstract", head):
        return f"{place}: there is no class_path, and {abstract[1]} alone is abstract: name the class."
    text = " ".join([head, *(line.strip() for line in rest)])
    return f"{place}: {text.rstrip('.')}." if place else text


def _of_union(lines: list[str], where: list[str], owner: Any, sections: dict[str, Any]) -> str:
    """The first of several types that was nearly right, or all of them and the value."""
    start = next(i for i, line in enumerate(lines) if line.strip() == "Errors:") + 1
    indent = len(lines[start]) - len(lines[start].lstrip())
    alternatives: list[list[str]] = []
    for line in lines[start:]:
        depth = len(line) - len(line.lstrip())
        if depth < indent:
            break
        if depth == indent and line.lstrip().startswith("- "):
            alternatives.append([])
        alternatives[-1].append(line)
    for alternative in alternatives:
        if not re.match(r"\s*- (Expected an? (<class|typing)|Not a valid subclass)", alternative[0]):
            return _explained(alternative, where, owner, sections)
    value = next((line.partition(":")[2].strip() for line in lines if line.strip().startswith("Given value:")), "")
    types = (re.match(r"\s*- Expected an? (.+)", alternative[0]) for alternative in alternatives)
    expected = dict.fromkeys(_type(found[1]) for found in types if found)
    return f"{'.'.join(where)}: expected {' or '.join(expected)}, got {_value(value)}."


def _unknown_option(option: str, place: str, owner: Any, sections: dict[str, Any]) -> str:
    """That an option is unknown, and which it may have meant; without an owner, it is named from the top."""
    name, known = option, list(sections) if owner is None else _parameters(owner)
    if owner is None:
        path, groups = [], dict(sections)
        for name in option.split("."):
            known = list(groups)
            if name not in groups:
                break
            path.append(name)
            owner = groups[name]
            groups = {} if owner is None else {**dict.fromkeys(_parameters(owner)), **groups_of(owner)}
        place = ".".join(path)
    start = f"{place + ' has' if place else 'There is'} no option {name!r}"
    if owner is not None and not get_close_matches(name, known, 1):
        grouped = {key: f"{group}.{key}" for group, within in groups_of(owner).items() for key in _parameters(within)}
        if close := get_close_matches(name, grouped, 1):
            return f"{start}: did you mean {grouped[close[0]]}?"
    return f"{start}{suggestion(name, known)}"


def groups_of(owner: Any) -> dict[str, Any]:
    """Name → class of the parameters that are groups of options."""
    defaults = {name: p.default for name, p in inspect.signature(owner).parameters.items()}
    return {name: type(default) for name, default in defaults.items() if is_dataclass(default)}


def suggestion(name: str, known: Iterable[str], *, show: bool = True) -> str:
    """`: did you mean ...? Known are ...`, as far as there is something to say; ends the sentence."""
    known = list(known)
    close = get_close_matches(name, known, 1)
    text = f": did you mean {close[0]}?" if close else "."
    if show and known and len(known) <= _MANY:
        text = f"{text} Known are {', '.join(known)}."
    return text


def _found(path: str) -> Any:
    """The class or function of a dotted path, or None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _names(module: str) -> list[str]:
    found = importlib.import_module(module)
    names: Iterable[str] = getattr(found, "__all__", None) or vars(found)
    return [name for name in names if inspect.isclass(getattr(found, name, None))]


def _parameters(owner: Any) -> list[str]:
    return [name for name in inspect.signature(owner).parameters if name not in ("self", "args", "kwargs")]


def _type(name: str) -> str:
    if found := re.fullmatch(r"<class '(.+)'>", name):
        return _TYPES.get(found[1], found[1].rpartition(".")[2])
    if found := re.fullmatch(r"typing\.Literal\[(.+)\]", name):
        return "one of " + found[1].replace("'", "")
    return name


def _value(text: str) -> str:
    if text[:1] in ("[", "{") and len(text) > 60:  # may hold what is nobody's business
        return "a list" if text[0] == "[" else "a mapping"
    return text if re.match(r"[\[{]|-?[\d.]", text) or text in ("None", "True", "False") else repr(text)
