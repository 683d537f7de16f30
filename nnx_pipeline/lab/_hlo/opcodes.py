"""The opcodes of HLO that the modules of `lab.hlo` know, grouped by what they do."""

# They run the computation that they call once.
RUNS = frozenset({"async", "call", "fusion"})
# They apply a computation to each element, or to two at a time: it holds nothing that is counted.
APPLIES = frozenset(
    {
        *("all-reduce", "map", "reduce", "reduce-scatter", "reduce-window"),
        *("scatter", "select-and-scatter", "sort", "topk"),
    }
)
# They move data between devices, and no count of the collectives includes them.
TRANSFERS = frozenset({"collective-broadcast", "recv", "send"})
PRODUCTS = frozenset({"convolution", "dot", "ragged-dot", "scaled-dot"})

_OTHERS = """
    abs acos acosh add add-dependency after-all all-gather all-to-all and asin asinh atan2 atanh
    batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast cbrt
    ceil cholesky clamp collective-permute compare complex concatenate conditional constant convert
    copy cosine cosh count-leading-zeros custom-call divide domain dynamic-reshape dynamic-slice
    dynamic-update-slice erf exponential exponential-minus-one fft floor gather get-dimension-size
    get-tuple-element imag infeed iota is-finite log log-plus-one logistic maximum minimum multiply
    negate not opt-barrier or outfeed pad parameter partition-id popcnt power ragged-all-to-all real
    reduce-precision remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt select set-dimension-size
    shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice sqrt
    stochastic-convert subtract tan tanh transpose triangular-solve tuple while xor
"""
_KNOWN = frozenset(_OTHERS.split()) | RUNS | APPLIES | TRANSFERS | PRODUCTS


def plain(opcode: str) -> str:
    """The opcode without the suffix of an asynchronous part: `all-gather` of `all-gather-start`."""
    for part in ("-start", "-update", "-done"):
        opcode = opcode.removesuffix(part)
    return opcode


def is_known(opcode: str) -> bool:
    return plain(opcode) in _KNOWN
