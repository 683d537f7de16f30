"""The colours of roles and arms, the same on a page and in a picture."""

# Of Okabe and Ito, who chose colours that colour-blind readers tell apart, then kin of them; what
# is no value of the program is grey. What often stands side by side is far apart.
ROLE_COLOURS = {
    "activation": "#56b4e9",
    "saved residual": "#d55e00",
    "scan carry": "#0072b2",
    "logits": "#f0e442",
    "gathered weight": "#009e73",
    "parameter cast": "#9a7b2f",
    "parameter copy": "#6a9a3a",
    "gradient accumulator": "#cc79a7",
    "gradient": "#8e3f6f",
    "optimizer update": "#7a5fd0",
    "collective buffer": "#e69f00",
    "library workspace": "#2f5d62",
    "constant": "#3d4f9f",
    "kept argument": "#8b6f5a",
    "donated argument": "#c4b5a5",
    "output": "#5b8f8a",
    "other": "#5f6a77",
    "padding": "#b9bfc7",
    "fragmentation": "#929aa5",
    "other memory space": "#a8a0c8",
}


def role_colour(role: str) -> str:
    """The colour of a role, as #rrggbb."""
    return ROLE_COLOURS[role]
