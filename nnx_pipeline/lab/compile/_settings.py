"""Settings of a compiler, one by one as `NAME=VALUE` or as a named set of libtpu's flags."""

import functools
import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nnx_pipeline.lab.compile._gpus import GPUS
from nnx_pipeline.lab.errors import InputError, nearest

# The setting that `--gemm` stands for.
TRITON_GEMM = "xla_gpu_enable_triton_gemm"
# With it XLA writes what its model of a GPU says of the time into the program.
COST_MODEL = "xla_gpu_collect_cost_model_stats"
_EXAMPLE = "xla_tpu_scoped_vmem_limit_kib=65536"
_BOOLEANS = {"true": True, "false": False}
# The compilers of the other platforms accept some of these names and do nothing with them.
_KINDS = {"xla_tpu_": ("tpu",), "xla_gpu_": GPUS, "xla_cpu_": ("cpu",)}


@dataclass(frozen=True)
class Setting:
    name: str  # such as `xla_tpu_scoped_vmem_limit_kib`
    value: bool | str  # some take nothing but a bool for truth values; numbers are texts
    of_set: str = ""  # the set that it is from, "" where the user gave it

    def __str__(self) -> str:
        return written({self.name: self.value})


def written(settings: dict[str, bool | str]) -> str:
    texts = ((n, str(v).lower() if isinstance(v, bool) else v) for n, v in settings.items())
    return ", ".join(f"{name}={value}" for name, value in texts)


@functools.cache
def flag_sets() -> dict[str, list[str]]:
    """The settings of each named set; the file says where they are from."""
    file = importlib.resources.files("nnx_pipeline.lab.compile") / "flag_sets.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def parse_settings(*layers: Sequence[str]) -> tuple[Setting, ...]:
    """The settings that texts such as `xla_tpu_use_x=true` or `@host_offload_flags` give, by name.
    Later layers win; in a layer a setting wins over a set. Raises InputError for another form, an
    unknown set, and a setting that one layer gives two values."""
    found: dict[str, Setting] = {}
    for texts in layers:
        sets = [one for text in texts if text.startswith("@") for one in _of_set(text)]
        own = [_parsed(text) for text in texts if not text.startswith("@")]
        for part in (sets, own):
            found |= _each_once(part)
    return tuple(found[name] for name in sorted(found))


def check_kind(settings: Iterable[Setting], kind: str, platform: str) -> None:
    """Raises InputError for a setting that is for another kind of platform, or that the lab
    sets."""
    for one in settings:
        if one.name.startswith("xla_dump"):
            raise InputError(
                f"compiler setting {one}: the lab sets the dump itself, because it reads the "
                "buffers from it; leave it out, and use --hlo for the text of the program"
            )
        begins = "xla_tpu_" if one.of_set else one.name[: len("xla_tpu_")]
        meant = _KINDS.get(begins, (kind,))
        if kind not in (*meant, "local"):
            what, kinds = one.of_set or one, " and ".join(meant)
            raise InputError(
                f"compiler setting {what} is for {kinds} platforms and would do nothing for "
                f"{platform}; leave it out"
            )


def gemm_of(settings: Iterable[Setting]) -> str | None:
    """The kind of matrix products that the settings ask for, as `Platform.gemm`; None if none."""
    for one in settings:
        if one.name == TRITON_GEMM:
            if not isinstance(one.value, bool):
                raise InputError(f"compiler setting {one} is not a bool; write true or false")
            return "triton" if one.value else "cublas"
    return None


def _of_set(text: str) -> list[Setting]:
    """The settings of a set by its name after the `@`, in either case and with `-` or `_`."""
    name = text[1:].lower().replace("-", "_")
    if name not in flag_sets():
        known = [f"@{known}" for known in flag_sets()]
        cure = nearest(name, known) if name else f"choose one of: {', '.join(known)}"
        raise InputError(f"there is no set of compiler settings {text!r}; {cure}")
    return [replace(_parsed(one), of_set=f"@{name}") for one in flag_sets()[name]]


def _parsed(text: str) -> Setting:
    """One setting; dashes before the name, as in LIBTPU_INIT_ARGS, are dropped."""
    name, separator, value = text.strip().lstrip("-").partition("=")
    if not separator or not re.fullmatch(r"\w+", name):
        raise InputError(
            f"compiler setting {text!r} is not of the form NAME=VALUE or @SET; write for example "
            f"{_EXAMPLE}"
        )
    return Setting(name, _BOOLEANS.get(value.lower(), value))


def _each_once(settings: Iterable[Setting]) -> dict[str, Setting]:
    """The settings by name; raises InputError if a name has two values."""
    found: dict[str, Setting] = {}
    for one in settings:
        other = found.setdefault(one.name, one)
        if other.value != one.value:
            both = [f"{each}{f' of {each.of_set}' if each.of_set else ''}" for each in (other, one)]
            raise InputError(
                f"compiler setting {one.name} has two values, {' and '.join(both)}; give one"
            )
    return found
