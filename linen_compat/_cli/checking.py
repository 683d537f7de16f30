"""What `check` does, and what it prints."""

from rich.console import Group, RenderableType

from linen_compat._cli.running import byte_bar, command, text_of
from linen_compat._cli.values import BFLOAT16, WITHIN, Checks
from linen_compat.checkpoints import _check as checking
from linen_compat.checkpoints._check import diagnose, read_everything
from linen_compat.checkpoints._logits import FromGiven, compare_with_logits, read_logits
from linen_compat.checkpoints._named_config import read_config
from linen_compat.formats._comparison import first_of
from linen_compat.formats._merged import adapter_of
from linen_compat.formats._streams import Mismatch
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._report.columns import Column, Columns, number_columns
from nnx_pipeline.lab._report.output import check_writable, emit_json, show
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import counted

_SHOWN = 40  # lines about single leaves


@command()
def run_check(checkpoint: str, config_name: str, checks: Checks, json_path: str | None) -> None:
    """Shows what a model would take from a checkpoint; raises Failed unless everything fits."""
    Platform.parse("cpu").devices(1)
    check_writable(json_path, "--json")
    config = read_config(config_name, checkpoint)
    adapter = adapter_of(checks.adapter, checkpoint)
    diagnosis = diagnose(checkpoint, config, adapter)
    if checks.numerics:
        checking.check_comparable(diagnosis)
    given = read_logits(checks.logits, config.model.vocab_size) if checks.logits else []
    result: dict[str, object] = {
        **diagnosis.to_json(),
        **dict.fromkeys(("read_bytes", "numerics", "logits")),
    }
    if diagnosis.format is not None:  # else the error says all there is to say
        show(_diagnosis(diagnosis), json_path=json_path)
    problems = list(diagnosis.comparison.problems)
    if checks.read and not problems:
        try:
            with byte_bar("reading", None) as passed:
                result["read_bytes"] = read_everything(
                    diagnosis,
                    config,
                    adapter=adapter,
                    allow_nan=checks.allow_nan,
                    progress=passed,
                )
        except Mismatch as error:
            problems.append(str(error))
    if checks.numerics and not problems:
        first_difference = checking.compare_with_maxtext(checkpoint, config)
        result["numerics"] = vars(first_difference)
        show(_first_difference(first_difference), json_path=json_path)
        if first_difference.place is not None:
            problems.append(f"{first_difference.place} differs from MaxText's mathematics")
    if given and not problems:
        found = compare_with_logits(checkpoint, config, given, checks.adapter)
        result["logits"] = vars(found)
        show(_from_given(found), json_path=json_path)
        within = WITHIN if checks.within is None else checks.within
        if not found.largest <= within:  # unlike `>`, this is true of NaN
            problems.append(
                f"at position {found.position} of prompt {found.prompt} its logits are off by "
                f"{found.largest:.1e} of the largest in {checks.logits}, and --within "
                f"{within:g} allows less; logits that were computed in bfloat16 need "
                f"--within {BFLOAT16:g}"
            )
    result = {**result, "problems": problems, "fits": not problems}
    emit_json(json_path, result)
    if problems:
        raise Failed(f"{checkpoint} does not fit {config_name}: {first_of(problems)}")


def _diagnosis(diagnosis: checking.Diagnosis) -> RenderableType:
    """A table that counts leaves by how they fit, and below it the leaves that do not."""
    result = diagnosis.comparison
    kinds = ("matched", "missing", "extra", "reshaped", "recast", "ignored")
    counts = {kind: len(getattr(result, kind)) for kind in kinds}
    counts["randomly initialised"] = len(result.fresh)
    head = (
        f"{diagnosis.format}: {counted(diagnosis.num_layers, 'layer')}, "
        f"{counted(diagnosis.stages, 'stage')}, {counted(diagnosis.repeats, 'repeat')}"
    )
    table = Columns([Column("leaves"), *number_columns("number")])
    for row in counts.items():
        table.add_row(*map(str, row))
    rows = [f"  recast: {d.leaf} from {d.found} to {d.expected}" for d in result.recast]
    rows += [f"  {problem}" for problem in result.problems]
    if len(rows) > _SHOWN:
        rows = [*rows[:_SHOWN], f"  and {len(rows) - _SHOWN} more; --json PATH has them all"]
    rows += [f"  {diagnosis.optimizer}"] if diagnosis.optimizer else []
    return Group(head, table, *map(text_of, rows))


def _first_difference(result: checking.FirstDifference) -> str:
    """One line on how far the loaded model is from MaxText's mathematics."""
    if result.place is None:
        return f"numerics: every layer agrees to within {result.largest:.1e} of its largest value"
    return (
        f"numerics: {result.place} is off by {result.largest:.1e} of the largest value "
        f"(allowed: {checking.NUMERICS_TOLERANCE})"
    )


def _from_given(found: FromGiven) -> str:
    """One line on how far the loaded model is from given logits."""
    return (
        f"logits: {counted(found.prompts, 'prompt')}, {counted(found.positions, 'position')}, "
        f"{found.compared:,} tokens of the vocabulary; off by {found.largest:.1e} of the largest, "
        f"by {found.divergence:.1e} nats of divergence at most"
    )
