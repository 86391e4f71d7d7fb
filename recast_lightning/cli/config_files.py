"""Looks through YAML files and options before anything is imported: syntax, keys that come twice, and renamed ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from recast_lightning.checkpointing.renamed import RENAMED


def check_options(arguments: Sequence[str]) -> None:
    """Refuse options that have got another name.

    Raises:
        ValueError: naming the option's new name.
    """
    for argument in arguments:
        option = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and option in RENAMED:
            raise ValueError(f"The option --{option} is now --{RENAMED[option]}.")


def check_config_files(arguments: Sequence[str]) -> None:
    """Check the files that `-c` and `--config` name; raises as `check_config_file`."""
    named = [value for option, value in pairwise(arguments) if option in ("-c", "--config")]
    for path in named + [a.partition("=")[2] for a in arguments if a.startswith("--config=")]:
        check_config_file(path)


def check_config_file(path: str) -> None:
    """Refuse a file that is missing, is no YAML or no mapping, or has a renamed key, or one twice (YAML would take the last).

    Raises:
        ValueError: naming file, line and key.
    """
    import yaml

    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"The configuration {path} does not exist or is no file.")
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ValueError(f"The configuration {path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: not valid YAML ({error.problem}).") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"The configuration {path} must hold keys and values, such as model: and data:.")
    _check_keys(path, node)


def _check_keys(path: str, root: Any) -> None:
    """Look at every key of a file."""
    import yaml

    waiting: list[tuple[str, yaml.Node]] = [("", root)]
    while waiting:
        place, current = waiting.pop()
        if isinstance(current, yaml.SequenceNode):
            waiting += [(place, item) for item in current.value]
        elif isinstance(current, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in current.value:
                if not isinstance(key, yaml.ScalarNode):
                    waiting.append((place, value))
                    continue
                line, name = key.start_mark.line + 1, f"{place}.{key.value}".lstrip(".")
                if key.value in seen:
                    raise ValueError(
                        f"{path}, line {line}: the key {key.value!r} is already there in line {seen[key.value]}: keep one."
                    )
                if name in RENAMED:
                    raise ValueError(f"{path}, line {line}: {name} is now {RENAMED[name]}.")
                seen[key.value] = line
                waiting.append((name, value))
