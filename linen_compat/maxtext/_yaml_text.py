"""YAML in which each key of a mapping stands once."""

import yaml
from yaml.composer import ComposerError


def load_yaml(text: str) -> object:
    """The plain value of a YAML text; PyYAML alone would take the last of two values silently.

    Raises yaml.YAMLError for what is not YAML, and for a key that stands twice in a mapping.
    """
    loader = yaml.SafeLoader(text)
    compose = loader.compose_mapping_node
    loader.compose_mapping_node = lambda anchor: _with_keys_once(compose(anchor))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _with_keys_once(mapping: yaml.MappingNode) -> yaml.MappingNode:
    seen = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if (key.tag, key.value) in seen:
            rule = f"the key {key.value!r} stands there twice; keep one of the two"
            raise ComposerError(None, None, rule, key.start_mark)
        seen.add((key.tag, key.value))
    return mapping
