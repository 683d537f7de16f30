"""Reads YAML in which each key of a mapping stands once.

PyYAML alone would take the last of two values without a word.
"""

from typing import Any

import yaml
from yaml.composer import ComposerError


class _Loader(yaml.SafeLoader):
    """The safe loader, which refuses a key that a mapping has already."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                rule = f"the key {key.value!r} stands there twice; keep one of the two"
                raise ComposerError(None, None, rule, key.start_mark)
            seen.add((key.tag, key.value))
        return node


def load_yaml(text: str) -> Any:
    """The plain value of a YAML text; raises yaml.YAMLError, also for a key that stands twice."""
    return yaml.load(text, _Loader)
