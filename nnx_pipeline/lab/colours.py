"""The colours of roles and arms, the same on a page and in a picture."""

# Of Okabe and Ito, who chose colours that colour-blind readers tell apart, then kin of them; what
# is no value of the program is grey.
_ROLE_COLOURS = {
    "scan carry": "#0072b2",
    "saved residual": "#d55e00",
    "gathered weight": "#009e73",
    "gradient accumulator": "#cc79a7",
    "collective buffer": "#e69f00",
    "logits": "#7a5fd0",
    "parameter copy": "#56b4e9",
    "parameter cast": "#9a7b2f",
    "activation": "#6a9a3a",
    "padding": "#b3b8c0",
    "fragmentation": "#9299a3",
    "other memory space": "#a8a0c8",
}
_OTHER_COLOUR = "#7b828c"
ARM_COLOURS = {"a": "#c2570c", "b": "#1769c2"}


def role_colour(role: str) -> str:
    """The colour of a role, as #rrggbb."""
    return _ROLE_COLOURS.get(role, _OTHER_COLOUR)
