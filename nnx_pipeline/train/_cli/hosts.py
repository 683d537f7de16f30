"""Where `nnx-pipeline train` runs: in one process, or joined with others on several hosts."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nnx_pipeline.lab._cli.support import BAD_INPUT, Failed
from nnx_pipeline.lab._cli.values import Place
from nnx_pipeline.lab._files import say
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, Note, Unavailable, divides, note

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Hosts(Place):
    """The values of `--mesh`, `--dcn` and `--platform`, and of the options of several processes."""

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    restart: int = 0

    @property
    def joins(self) -> bool:
        """Whether this process trains together with others."""
        given = (self.coordinator, self.num_processes, self.process_id)
        return self.distributed or any(value is not None for value in given)

    @property
    def leads(self) -> bool:
        """Whether this process tells of the training, as the first one of those that are joined."""
        if not self.joins:
            return True
        import jax

        return jax.process_index() == 0

    def check(self) -> None:
        """Raises InputError for options that contradict each other."""
        if self.restart and not self.joins:
            raise InputError(
                f"--restart {self.restart} is about a training in several processes; give "
                "--distributed too, or leave it out"
            )
        if not self.joins:
            return
        count, number = self.num_processes, self.process_id
        if not self.distributed and None in (self.coordinator, count, number):
            raise InputError(
                "--coordinator, --num-processes and --process-id belong together; give all three, "
                "or --distributed, with which JAX asks the cluster for what is missing"
            )
        if count is not None and number is not None and number >= count:
            raise InputError(
                f"--process-id {number} of --num-processes {count} is not there; the processes "
                f"have the numbers from 0 to {count - 1}"
            )
        if self._has_virtual_devices:
            if count is None:
                raise InputError(
                    "--platform cpu makes as many virtual devices in each process as the number of "
                    "processes leaves to it; give --num-processes N, or --platform local"
                )
            mesh = self.mesh_config
            rule = f"the {mesh.num_devices} devices of mesh {mesh} do not split over the processes"
            divides(count, mesh.num_devices, rule=rule)

    @property
    def _has_virtual_devices(self) -> bool:
        return Platform.parse(self.platform).kind == "cpu"

    def devices(self) -> Sequence[Any]:
        """The devices of all processes."""
        if not (self.joins and self._has_virtual_devices):
            return super().devices()
        own = self.mesh_config.num_devices // (self.num_processes or 1)
        return Platform.parse(self.platform).devices(own)

    def grid(self, devices: Sequence[Any], sharding: Literal["explicit", "auto"]) -> Mesh:
        """The mesh; a note says which of its axes cross the network between hosts."""
        from nnx_pipeline.lab.mesh import divided_over

        mesh = super().grid(devices, sharding)
        if self.joins:
            self._check_shares(mesh)
        if self.joins and (found := divided_over(mesh)):
            axes = ", ".join(f"{name} in {count} parts" for name, count in found.items())
            inner = [name for name in found if name not in ("data", "stage")]
            cure = f"; data and stage send less than {inner[0]}, see --dcn" if inner else ""
            note(f"the network between processes divides {axes}{cure}")
        return mesh

    def _check_shares(self, mesh: Mesh) -> None:
        """Raises InputError unless each process has the same number of devices in the mesh."""
        import jax

        counts = [0] * jax.process_count()
        for device in mesh.devices.flat:
            counts[device.process_index] += 1
        if len(set(counts)) > 1:
            most, least = counts.index(max(counts)), counts.index(min(counts))
            raise InputError(
                f"the mesh has {counts[most]} of the devices of process {most} and {counts[least]} "
                f"of process {least}, and needs equally many of each; choose a mesh of all "
                f"{jax.device_count()} devices, or start fewer processes"
            )

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """A context in which this process is one of several, if that was asked for."""
        if not self.joins:
            yield
            return
        _keep_output_clean()
        from nnx_pipeline.train.processes import several_processes

        given = self.coordinator, self.num_processes, self.process_id
        with _cluster_found(), several_processes(*given), _in_one_line():
            self.devices()  # before JAX begins with others
            if not self.leads:  # process 0 notes it for all
                warnings.filterwarnings("ignore", category=Note)
            yield


def _keep_output_clean() -> None:
    """What C++ prints goes to standard error, so that standard output has the result alone."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)


@contextlib.contextmanager
def _cluster_found() -> Iterator[None]:
    """What passes here is an exception of JAX before this process has joined."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"JAX finds no cluster to join ({' '.join(str(error).split())}); give --coordinator "
            "HOST:PORT, --num-processes and --process-id"
        ) from error


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Says an expected error in one line with the number of the process, which then ends."""
    import jax

    from nnx_pipeline.train.processes import has_failed

    try:
        yield
    except (InputError, Failed, Unavailable, OSError) as error:
        if error.__cause__ is not None and has_failed(error.__cause__):
            raise error.__cause__ from None  # of which JAX has more to say
        say(f"nnx-pipeline: process {jax.process_index()} of {jax.process_count()}: {error}")
        sys.exit(BAD_INPUT if isinstance(error, InputError) else 1)
