"""Looks through YAML files before anything expensive is imported: syntax, and keys that come twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path


def check_config_files(arguments: Sequence[str]) -> None:
    """Check the files that `-c` and `--config` name; raises as `check_config_file`."""
    named = [value for option, value in pairwise(arguments) if option in ("-c", "--config")]
    for path in named + [a.partition("=")[2] for a in arguments if a.startswith("--config=")]:
        check_config_file(path)


def check_config_file(path: str) -> None:
    """Refuse a file that is missing, is no YAML, is no mapping, or has a key twice (YAML would take the last silently).

    Raises:
        ValueError: naming file, line and key.
    """
    import yaml

    file = Path(path)
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
    waiting: list[yaml.Node] = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, yaml.SequenceNode):
            waiting += current.value
        elif isinstance(current, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in current.value:
                line = key.start_mark.line + 1
                if key.value in seen and isinstance(key, yaml.ScalarNode):
                    raise ValueError(
                        f"{path}, line {line}: the key {key.value!r} is already there in line {seen[key.value]}: keep one."
                    )
                if isinstance(key, yaml.ScalarNode):
                    seen[key.value] = line
                waiting.append(value)
