"""The colours of the roles of buffers, the same on an HTML page and in a picture."""

# The colours of Okabe and Ito, which colour-blind readers can tell apart, and related ones; roles
# that are no value of the program are grey. Roles that are often side by side have colours that are
# far apart.
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
    "partial sums": "#a3423c",
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
    return ROLE_COLOURS[role]
