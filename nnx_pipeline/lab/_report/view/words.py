"""The words of the tables, each in a sentence."""

HINT = "--explain says what these words mean"
PAGE = "docs/figures.md says more of each"
MEMORY = {
    "arguments": "Parameters, the state of the optimizer, the batch: what the program is given.",
    "temp": "The compiler's own temp_size_in_bytes: everything between arguments and outputs. On a "
    "TPU it counts other memory than the main memory of the device too.",
    "heap": "The region of the device's main memory in which all temporary buffers have their "
    "places, with the holes between them: what is reserved for them.",
    "peak": "The compiler's own peak_memory_in_bytes: the most that is in use at one moment, "
    "arguments included. It leaves out the holes of the heap, and can so be below it.",
    "account": "Arguments, outputs that use no argument's memory, constants and heap. This sum "
    "decides whether a program fits on a device.",
}
TIME = {
    "step": "The estimated time of one step: the compute, and what it waits for. Nothing was run; "
    "on a TPU it is by the compiler's own cycles, and on an H100, an H200 and a B200 by XLA's own "
    "model of the GPU. For another GPU it is a roofline that no real program reaches. ≥ stands "
    "before a lower bound, ≳ where a part counts with the least that it takes.",
    "launches": "How many instructions run in a step, collectives left out.",
    "MFU, HFU": "The part of the step that matrix products would take at the peak rate: those that "
    "the model needs, and all that run.",
}
VERDICTS = {
    "claim": "What stands in brackets behind the name of an experiment says where its claim is "
    "from: a section of this project's source documents, such as S4.3, MaxText, or its own design.",
    "holds": "Arm b needs at least 1 % less than arm a of the figure that the verdict names, as "
    "the claim says.",
    "no effect": "The arms differ by less than 1 %.",
    "opposite": "Arm b needs at least 1 % more.",
    "less, same, more memory": "The same where nobody claimed anything of two programs.",
    "b/a": "The figure of arm b divided by that of arm a.",
    "same numbers": "How far apart losses and gradients of the arms are, computed on CPU devices "
    "at a small size: the largest difference, or none to the bit.",
}
BUFFERS = {
    "role": "What a buffer is for, such as a residual that is saved for the backward pass, or a "
    "weight gathered from other devices.",
    "×": "So many buffers share the row; its bytes are their sum.",
    "fragmentation": "Holes between buffers.",
    "padding": "What the device's layout of an array takes beyond its elements.",
}
CHANGES = {
    "gain": "By how much the account gets smaller with a change, by a compile of its own.",
    "promised": "What a change gains at least, by the places of the buffers in the program as it "
    "is, as explain says it.",
    "sent": "The results of all collectives of a step.",
}
