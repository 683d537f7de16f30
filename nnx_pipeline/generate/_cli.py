"""`nnx-pipeline generate`: continues prompts with a model from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from nnx_pipeline.config._overrides import apply_overrides, parse_overrides
from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.lab import _files as files
from nnx_pipeline.lab._cli import options
from nnx_pipeline.lab._cli.options import COUNT, bundled
from nnx_pipeline.lab._cli.support import compiler_errors
from nnx_pipeline.lab._cli.values import Chosen, Place
from nnx_pipeline.lab._files import say, write_output
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.train._cli.checkpoints import Checkpoints, checkpoints

if TYPE_CHECKING:
    from nnx_pipeline.generate.loop import Request
    from nnx_pipeline.train._tokenizers import Tokenizer


@dataclass(frozen=True)
class Stored:
    """The values of `--checkpoint`, `--config` and `--adapter`."""

    checkpoint: str
    config_name: str | None
    adapter: str | None

    def config(self, chosen: Chosen, offered: Checkpoints) -> Config:
        """The config of the model: of `--config`, of `--model`, or of the checkpoint itself."""
        if self.config_name is not None and chosen.model is not None:
            raise InputError("--config and --model name one config each; leave one of them out")
        config = offered.stored_config(self.checkpoint)  # first: a missing checkpoint is named
        if chosen.model is not None:
            preset: Config = options.chosen_config(chosen)
            return preset
        if self.config_name is not None:
            config = offered.read_config(self.config_name, self.checkpoint)
        if config is None:
            raise InputError(
                f"{self.checkpoint} does not hold the config of its model; give it with --config "
                "FILE or --model PRESET"
            )
        return apply_overrides(config, parse_overrides(chosen.assignments))

    def departures(self, config: Config, offered: Checkpoints) -> list[str]:
        """A sentence on each field of the model that is not as the checkpoint's own config says."""
        stored = offered.stored_config(self.checkpoint)
        if stored is None:
            return []
        said, taken = to_dict(stored)["model"], to_dict(config)["model"]
        return [
            f"model.{name} is {json.dumps(value)}, where the checkpoint's config says "
            f"{json.dumps(said[name])}"
            for name, value in taken.items()
            if value != said[name]
        ]


@dataclass(frozen=True)
class Prompts:
    """The values of `--prompt`, `--tokens` and `--tokenizer`."""

    texts: tuple[str, ...]
    token_lists: tuple[str, ...]
    tokenizer: str | None

    def tokenizer_of(self, checkpoint: str, vocab_size: int) -> Tokenizer | None:
        """The tokenizer; None where prompts are tokens and `--tokenizer` is not given."""
        if bool(self.texts) == bool(self.token_lists):
            raise InputError("give either --prompt or --tokens, once or several times")
        if self.token_lists and self.tokenizer is None:
            return None
        from nnx_pipeline.train._tokenizers import tokenizer_for

        return tokenizer_for(self.tokenizer, checkpoint, vocab_size)

    def tokens(self, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
        if tokenizer is not None and self.texts:
            return tuple(tuple(tokenizer.encode(text)) for text in self.texts)
        return tuple(_ids("--tokens", text) for text in self.token_lists)


@dataclass(frozen=True)
class Drawing:
    """The values of the options that say how tokens are drawn, and how many."""

    new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    end_token: str | None

    def request(self, prompts: tuple[tuple[int, ...], ...], end_tokens: tuple[int, ...]) -> Request:
        from nnx_pipeline.generate import Request, Sampling

        if self.end_token is not None:
            end_tokens = () if self.end_token == "none" else _ids("--end-token", self.end_token)
        drawn = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "seed")}
        sampling, count = Sampling(**drawn), self.new_tokens
        return Request(prompts=prompts, new_tokens=count, end_tokens=end_tokens, sampling=sampling)


def _ids(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() and len(part) <= 10 for part in parts):
        raise InputError(
            f"{option} {text!r} is not a list of token ids; write whole numbers with commas "
            "between them, such as 1,2,3"
        )
    return tuple(map(int, parts))


@click.command(
    "generate",
    short_help="Continue prompts with a trained model.",
    epilog='Example: nnx-pipeline generate --checkpoint run --prompt "The pipeline"',
)
@bundled(
    "stored",
    Stored,
    click.option(
        "--checkpoint",
        required=True,
        metavar="CKPT",
        help="A run of `nnx-pipeline train --checkpoint-dir`, a MaxText checkpoint or a Hugging "
        "Face folder.",
    ),
    click.option(
        "--config",
        "config_name",
        metavar="FILE",
        help="The config of the model, where the checkpoint does not hold it: a MaxText YAML, a "
        "YAML with model, pipeline and train, or a preset.",
    ),
    click.option(
        "--adapter",
        metavar="DIR",
        help="A LoRA adapter of PEFT or MaxText to merge into the weights.",
    ),
)
@options.config_options(required=False)
@bundled(
    "prompts",
    Prompts,
    click.option(
        "--prompt",
        "texts",
        multiple=True,
        metavar="TEXT",
        help="A text to continue; may be repeated.",
    ),
    click.option(
        "--tokens",
        "token_lists",
        multiple=True,
        metavar="IDS",
        help="A prompt as token ids, such as 1,2,3; may be repeated.",
    ),
    click.option(
        "--tokenizer",
        metavar="FILE",
        help="A tokenizer.json or its folder, or `bytes`. By default that in the checkpoint; bytes "
        "where there is none and the vocabulary has 256 tokens.",
    ),
)
@bundled(
    "drawing",
    Drawing,
    click.option(
        "--new-tokens",
        type=COUNT,
        default=64,
        show_default=True,
        help="How many tokens to make for each prompt at most.",
    ),
    click.option(
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="Divides the logits; 0 takes the likeliest token.",
    ),
    click.option("--top-k", type=int, help="Draw from so many of the likeliest tokens."),
    click.option(
        "--top-p", type=float, help="Draw from the likeliest tokens with this probability together."
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed of the draws.",
    ),
    click.option(
        "--end-token",
        metavar="IDS",
        help="Tokens after which a text ends, or `none`. By default those of the tokenizer.",
    ),
)
@options.place_options
@options.json_option
def generate_command(
    stored: Stored,
    chosen: Chosen,
    prompts: Prompts,
    drawing: Drawing,
    place: Place,
    json_path: str | None,
) -> None:
    """Continue prompts with a model from a checkpoint.

    Prompts of different lengths are one batch, and what comes out for one does not depend on the
    others. On a mesh with stages each stage works on other prompts at a time.
    """
    import jax

    from nnx_pipeline.generate.loop import check_generation, generate
    from nnx_pipeline.lab._cli.progress import bar, progress
    from nnx_pipeline.lab._report.output import check_writable, emit_json
    from nnx_pipeline.ops._fast_attention.kernels import check_platform

    check_writable(json_path, "--json")
    offered = checkpoints()
    config = stored.config(chosen, offered)
    model_config = config.model
    tokenizer = prompts.tokenizer_of(stored.checkpoint, model_config.vocab_size)
    request = drawing.request(prompts.tokens(tokenizer), tokenizer.end_tokens if tokenizer else ())
    request.check(model_config.vocab_size, model_config.max_position_embeddings)
    check_generation(config, place.mesh_config, request.length + request.new_tokens)
    if stored.adapter is not None:
        files.place(stored.adapter)  # so that an address is refused before anything is shown
    devices = place.devices()
    check_platform(model_config.attention, devices[0].platform)
    for sentence in stored.departures(config, offered):
        say(sentence)
    with compiler_errors():
        grid = place.grid(devices, config.pipeline.sharding)
        with progress() as begin:
            begin(f"loading {stored.checkpoint}")
            model = offered.load(stored.checkpoint, config, mesh=grid, adapter=stored.adapter)
        with jax.set_mesh(grid), bar("generating", request.new_tokens, "compiling") as advance:
            made = generate(model, request, progress=lambda: advance("tokens"))
    texts = [tokenizer.decode(tokens) if tokenizer else None for tokens in made]
    if json_path != "-":
        before = prompts.texts or ("",) * len(made)  # nothing before the text after tokens
        for prompt, tokens, text in zip(before, made, texts, strict=True):
            write_output(",".join(map(str, tokens)) if text is None else f"{prompt}{text}")
    results = []
    for ids, tokens, text in zip(request.prompts, made, texts, strict=True):
        ended = tokens[-1] in request.end_tokens
        results.append({"prompt_tokens": list(ids), "tokens": tokens, "text": text, "ended": ended})
    about = {**vars(stored), "mesh": place.mesh_config.sizes(), "config": to_dict(config)}
    del about["config_name"]
    emit_json(json_path, {"schema": 1, **about, "results": results})
