"""Read a YAML file that must hold one mapping; whatever its bytes are, the answer is a mapping or a ConfigError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

LARGEST = 1 << 20  # bytes


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag != "tag:yaml.org,2002:merge":
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name.value!r} is given twice", name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def read_mapping(file: Path) -> dict[Any, Any]:
    """The mapping in `file`; an empty file is an empty mapping."""
    try:
        if file.stat().st_size > LARGEST:
            raise ConfigError(f"{file}: larger than {LARGEST >> 20} MiB, which no settings file is")
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    return parse_mapping(data, str(file))


def parse_mapping(data: bytes, source: str) -> dict[Any, Any]:
    """The mapping in YAML bytes; ConfigError names `source` and, where known, the line."""
    try:
        found = yaml.load(data, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise ConfigError(f"{source}:{line} {_flat(error.problem or error.context or 'not YAML')}") from None
    except Exception as error:  # the parser lets ValueError, RecursionError and others of its parts through
        raise ConfigError(f"{source}: not YAML: {_flat(str(error)) or type(error).__name__}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: holds a {type(found).__name__}, not keys with values")
    return found


def _flat(text: str) -> str:
    return " ".join(text.split())[:200]
