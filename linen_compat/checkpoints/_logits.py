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

_MOST_LOGIT = 1e6
_PADDING = 0.01  # the part of a vocabulary by which padded tables may differ


@dataclass(frozen=True)
class Given:
    """A prompt `[seq]`, and the logits `[positions, vocab]` at its first positions."""

    tokens: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class FromGiven:
    """How far the logits of a model are from given ones.

    - `compared`: how many logits of each position were compared, of tables that are padded the
      smaller number.
    - `largest`: the largest difference, as a part of the largest logit. It is at `position` of
      `prompt`, both counted from 0.
    - `divergence`: the largest Kullback–Leibler divergence from the given distribution at a
      position, in nats.
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
        # Strings of JSON may hold other ends of lines.
        for number, line in enumerate(read_text(file, MOST_TEXT).split("\n"), 1)
        if line.strip()
        for one in _objects(line, f"{file}, line {number}")
    ]
    if not given:
        raise InputError(f"{file} is empty; give lines of JSON with tokens and logits")
    if all(len(one.logits) == 1 for one in given):
        raise InputError(
            f"{file} has the logits of first positions alone, which say nothing of attention; give "
            "those of more positions"
        )
    widths = sorted({one.logits.shape[1] for one in given})
    if len(widths) > 1 or abs(widths[0] - vocabulary) > _PADDING * vocabulary:
        raise InputError(
            f"{file} has logits for {' and '.join(map(str, widths))} tokens, and the model has "
            f"model.vocab_size={vocabulary}; give the logits of this model"
        )
    return given


def _objects(line: str, where: str) -> list[Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}; give tokens and logits") from error
    return found if isinstance(found, list) else [found]


def _given(found: Any, where: str, vocabulary: int) -> Given:
    tokens, logits = _arrays(found)
    if (tokens.dtype.kind, tokens.ndim, logits.ndim) != ("i", 1, 2) or not logits.size:
        raise InputError(
            f"{where} has no tokens [seq] and logits [seq, vocab]; give both for each prompt, as "
            "MaxText's forward_pass_logit_checker does"
        )
    if len(logits) > len(tokens) or not np.all(np.abs(logits) <= _MOST_LOGIT):
        raise InputError(
            f"{where} has logits of {len(logits)} positions for {len(tokens)} tokens, or some that "
            f"are not finite or above {_MOST_LOGIT:g}; give one row for each token, or for the "
            "first ones"
        )
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise InputError(
            f"{where} has tokens from {tokens.min()} to {tokens.max()}, and the vocabulary of the "
            f"model has {vocabulary}; give the logits of this model"
        )
    return Given(tokens.astype(np.int32), logits.astype(np.float64))


def _arrays(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logits; arrays without numbers where there are none."""
    nothing = np.empty(0, str)
    if not isinstance(found, dict):
        return nothing, nothing
    try:
        tokens, logits = (np.asarray(found.get(name, "")) for name in ("tokens", "logits"))
    except ValueError:  # rows of different lengths
        return nothing, nothing
    return tokens, logits if logits.dtype.kind in "if" else nothing


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
    compared = min(found[0].shape[1], given[0].logits.shape[1])
    ours = np.concatenate(
        [all_ours[: len(one.logits), :compared] for all_ours, one in zip(found, given, strict=True)]
    )
    theirs = np.concatenate([one.logits[:, :compared] for one in given])
    places = [(number, at) for number, one in enumerate(given) for at in range(len(one.logits))]
    differences = np.max(np.abs(ours - theirs), axis=1)
    worst = int(np.argmax(differences))  # which takes NaN for the largest
    return FromGiven(
        prompts=len(given),
        positions=len(places),
        compared=compared,
        largest=float(differences[worst] / max(np.max(np.abs(theirs)), 1e-12)),
        divergence=float(np.max(_divergence(ours, theirs))),
        prompt=places[worst][0],
        position=places[worst][1],
    )


def _divergence(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Σ p · (log p − log q) at each position, of the given distribution p and ours q."""
    log_q, log_p = (one - np.logaddexp.reduce(one, -1, keepdims=True) for one in (ours, theirs))
    return np.asarray(np.sum(np.exp(log_p) * (log_p - log_q), -1))
