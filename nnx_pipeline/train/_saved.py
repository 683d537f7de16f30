"""What a saved run must have in common with the training that goes on with it."""

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.lab.errors import InputError

MOST_WEIGHT = 1e6  # the largest magnitude that training gives a weight, unless it has diverged

# Fields that say how something is computed and not what: they change numbers by rounding only.
# The same holds for `pipeline`, but for the number of microbatches, see `_check_microbatches`.
HOW = {
    "model": ("attention", "attention_block", "embedding", "expert_group"),
    "train": ("loss_chunks", "shard_optimizer_over_data"),
}
RATE = "train.learning_rate"
# Fields of `train` that may become others where that is asked for.
FREE = ("learning_rate", "schedule_steps", "max_skipped_steps", "spike_factor", "spike_interval")


@dataclass(frozen=True)
class Origin:
    """What decides the batches beside the config; `text` is `Data.digest`, if any."""

    seed: int
    text: str | None


@dataclass(frozen=True)
class SavedRun:
    """A run that was saved, without its arrays.

    The folder `newest` has the number of its newest step as its name. `config` is that of the first
    training, but for the fields of `FREE`, which are those of the last.
    """

    newest: Path
    config: Config
    origin: Origin

    @property
    def step(self) -> int:
        return int(self.newest.name)

    def to_go_on(
        self, config: Config, origin: Origin, stages: int, fields: Container[str] = ()
    ) -> Config:
        """The config of the run from now on, if training goes on with the losses it would have had.

        The pipeline and fields of `HOW` may be others, and those of `FREE` that are in `fields`,
        the fields that the user has set. Raises InputError where the losses would be others.
        """
        run = self.newest.parent
        before, after = to_dict(self.config), to_dict(config)
        free = {f"train.{name}" for name in FREE if f"train.{name}" in fields}
        if before["train"]["max_skipped_steps"] and not config.train.max_skipped_steps:
            free.discard("train.max_skipped_steps")  # how many were skipped has a place no more
        changed = [
            (f"{section}.{name}", value, after[section][name])
            for section, how in HOW.items()
            for name, value in before[section].items()
            if name not in how and f"{section}.{name}" not in free and value != after[section][name]
        ]
        if changed:
            (key, was, now), *others = changed
            more = f" ({len(others)} more of its fields differ)" if others else ""
            raise InputError(
                f"{key}={now}, but the run in {run} has {was}{more}; give the --model and --set "
                f"with which it began, which are in {run / 'config.yml'}; by --set "
                f"{', '.join(FREE)} may become others"
            )
        self._check_origin(origin)
        self._check_microbatches(config, stages)
        train = dataclasses.replace(
            self.config.train, **{name: getattr(config.train, name) for name in FREE}
        )
        return dataclasses.replace(self.config, train=train)

    def _check_origin(self, origin: Origin) -> None:
        run, before = self.newest.parent, self.origin
        if origin.seed != before.seed:
            raise InputError(
                f"--seed {origin.seed}, but the run in {run} began with {before.seed}, and its "
                f"batches depend on it; give --seed {before.seed}"
            )
        if before.text is None and origin.text is not None:
            raise InputError(
                f"--data is given, but the run in {run} was trained on generated sequences; leave "
                "it out"
            )
        if origin.text != before.text:
            fault = "is another text than that" if origin.text else "is missing: there is a text"
            raise InputError(
                f"--data {fault} on which the run in {run} was trained; give the same files in the "
                "same order, with the same --tokenizer and --end-token"
            )

    def _check_microbatches(self, config: Config, stages: int) -> None:
        """With a weight on a loss of the router the number of microbatches is part of the loss."""
        # Without a given number it was 1: `Config.check_objective` lets no other default pass.
        was = self.config.pipeline.num_microbatches or 1
        now = config.pipeline.microbatches_on(stages)
        # Of texts, where microbatches may differ in padding, the z-loss depends on it too.
        names = ("load_balance_weight", *["router_z_loss_weight"] * (self.origin.text is not None))
        weighed = [name for name in names if getattr(config.train, name) > 0]
        if weighed and was != now:
            raise InputError(
                f"pipeline.num_microbatches={now}, but the run in {self.newest.parent} has {was}, "
                f"and train.{weighed[0]} makes the loss depend on it; --set "
                f"pipeline.num_microbatches={was}"
            )
