"""Logits that another program has computed, beside those of a loaded model."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linen_compat.checkpoints.loading import load
from linen_compat.formats._in_memory import for_mesh
from nnx_pipeline import Config, InputError
from nnx_pipeline.lab._files import MOST_TEXT, read_text

MOST_DIVERGENCE = 0.01  # nats at a position; what a reference in bfloat16 differs by is less


@dataclass(frozen=True)
class Given:
    """A prompt `[seq]`, and the logits `[positions, vocab]` at its first positions."""

    tokens: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class FromGiven:
    """How far the logits of a model are from given ones.

    - `largest`: the largest difference of two logits.
    - `divergence`: the largest Kullback–Leibler divergence from the given distribution at a
      position, in nats, which is at `position` of `prompt`, both counted from 0.
    - `compared`: how many logits of each position were compared, of tables that are padded the
      smaller number.
    """

    prompts: int
    positions: int
    compared: int
    largest: float
    divergence: float
    prompt: int
    position: int


def read_logits(file: str, vocabulary: int) -> list[Given]:
    """Prompts and logits in lines of JSON, as MaxText's forward_pass_logit_checker reads them in
    `--golden_logits_path`, one object in a line, and writes them in `--output_logits_path`, a list.
    """
    given = [
        _given(one, f"{file}, line {number}", vocabulary)
        for number, line in enumerate(read_text(file, MOST_TEXT).splitlines(), 1)
        if line.strip()
        for one in _objects(line, f"{file}, line {number}")
    ]
    if not given:
        raise InputError(f"{file} is empty; give lines of JSON with tokens and logits")
    return given


def _objects(line: str, where: str) -> list[Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}; give tokens and logits") from error
    return found if isinstance(found, list) else [found]


def _given(found: Any, where: str, vocabulary: int) -> Given:
    named = isinstance(found, dict) and {"tokens", "logits"} <= found.keys()
    try:
        tokens = np.asarray(found["tokens"] if named else None)
        logits = np.asarray(found["logits"] if named else None, np.float64)
    except (ValueError, TypeError):  # rows of different lengths, or words
        named = False
    if not named or tokens.dtype.kind != "i" or (tokens.ndim, logits.ndim) != (1, 2):
        raise InputError(
            f"{where} has no tokens [seq] and logits [seq, vocab]; give both for each prompt, as "
            "MaxText's forward_pass_logit_checker does"
        )
    if not 0 < len(logits) <= len(tokens) or not np.isfinite(logits).all():
        raise InputError(
            f"{where} has logits of {len(logits)} positions for {len(tokens)} tokens, or some that "
            "are not finite; give one finite row for each token, or for the first ones"
        )
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise InputError(
            f"{where} has tokens from {tokens.min()} to {tokens.max()}, and the vocabulary of the "
            f"model has {vocabulary}; give the logits of this model"
        )
    return Given(tokens.astype(np.int32), logits)


def compare_with_logits(
    checkpoint: str | Path, config: Config, given: Sequence[Given], adapter: str | None
) -> FromGiven:
    """Compares the logits of a loaded model, which computes in float32, with given ones."""
    config = for_mesh(config, None)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    with jax.default_matmul_precision("highest"):
        model = load(checkpoint, config, adapter=adapter)
        apply = jax.jit(lambda model, tokens: model(tokens))
        found = [
            np.asarray(apply(model, jnp.asarray(one.tokens[None])), np.float64)[0] for one in given
        ]
    compared = min(found[0].shape[1], *(one.logits.shape[1] for one in given))
    pairs = [
        (ours[: len(one.logits), :compared], one.logits[:, :compared])
        for ours, one in zip(found, given, strict=True)
    ]
    places = [(number, at) for number, one in enumerate(given) for at in range(len(one.logits))]
    divergences = np.concatenate([_divergence(*pair) for pair in pairs])
    worst = int(np.argmax(divergences))  # which takes NaN for the largest
    return FromGiven(
        prompts=len(given),
        positions=len(places),
        compared=compared,
        largest=max(float(np.max(np.abs(ours - theirs))) for ours, theirs in pairs),
        divergence=float(divergences[worst]),
        prompt=places[worst][0],
        position=places[worst][1],
    )


def _divergence(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Σ p · (log p − log q) at each position, of the given distribution p and ours q."""
    log_q, log_p = (one - np.logaddexp.reduce(one, -1, keepdims=True) for one in (ours, theirs))
    return np.asarray(np.sum(np.exp(log_p) * (log_p - log_q), -1))
