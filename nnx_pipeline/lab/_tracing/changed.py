"""Changes what a function keeps for its backward pass, without a change of its source.

A step holds its own `jax.grad`, and what a backward pass needs is settled while the step is traced.
So the changes act then, on two public names, which are as before afterwards:

- `jax.lax.scan`, `jax.lax.map` and `jax.lax.fori_loop`: the body of each loop that is called by one
  of these names, by the function or by its framework, is replaced. Code that has imported a loop by
  its own name (`from jax.lax import scan`) is not reached.
- `remat_p`, what every `jax.checkpoint` binds when it is called: its policy is replaced.
"""

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
from jax.extend.core.primitives import remat_p

from nnx_pipeline.lab._tracing.installed import in_program, package_of

Function = Callable[..., Any]
Policy = Callable[..., Any] | None
# The loops that JAX differentiates, each with the parameter that is its body.
_BODIES = {"scan": "f", "map": "f", "fori_loop": "body_fun"}


@dataclass(frozen=True)
class OwnPolicy:
    """A policy that `replaced_policies` leaves as it is."""

    policy: Function

    def __call__(self, *arguments: Any, **parameters: Any) -> Any:
        return self.policy(*arguments, **parameters)


@contextlib.contextmanager
def replaced_bodies(body_of: Callable[[str, Function], Function]) -> Iterator[None]:
    """A context in which loops that are called by name have the body that `body_of` returns, which
    is given the line of the call, such as `model.py:12`, and the body."""
    with contextlib.ExitStack() as changes:
        for name, parameter in _BODIES.items():
            loop = _with_body(getattr(jax.lax, name), parameter, body_of)
            changes.enter_context(mock.patch.object(jax.lax, name, loop))
        yield


def _with_body(
    loop: Function, parameter: str, body_of: Callable[[str, Function], Function]
) -> Function:
    signature = inspect.signature(loop)

    @functools.wraps(loop)
    def called(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords)
        given.arguments[parameter] = body_of(_line(), given.arguments[parameter])
        return loop(*given.args, **given.kwargs)

    return called


def _line() -> str:
    """The line of the user's code that is being traced."""
    # From a frame, because Pythons differ in how many `walk_stack(None)` skips here.
    walked: Iterator[tuple[Any, int]] = traceback.walk_stack(inspect.currentframe())
    frames = [(f.f_code.co_filename, at, f.f_code.co_qualname) for f, at in walked]
    stack = in_program([frame for frame in frames if frame[0] != __file__])
    own = [frame for frame in stack if not package_of(frame[0])] or stack
    return f"{own[0][0]}:{own[0][1]}" if own else "an unknown line"


def within(line: str, body: Function, inside: list[str]) -> Function:
    """A body of a loop, whose line is the last of `inside` while it is traced."""

    @functools.wraps(body)
    def traced(*arguments: Any, **keywords: Any) -> Any:
        inside.append(line)
        try:
            return body(*arguments, **keywords)
        finally:
            inside.pop()

    return traced


def checkpointed(body: Function, policy: Policy = None) -> Function:
    """A body of a loop in a `jax.checkpoint`, whose policy `replaced_policies` does not change."""
    own = OwnPolicy(policy or jax.checkpoint_policies.nothing_saveable)
    # The backward pass is another loop, so that nothing can be merged with the forward pass.
    wrapped: Function = jax.checkpoint(body, prevent_cse=False, policy=own)
    return wrapped


@contextlib.contextmanager
def replaced_policies(policy_of: Callable[[str, Policy], Policy]) -> Iterator[None]:
    """A context in which each `jax.checkpoint` has the policy that `policy_of` returns, which is
    given the line of the call and the policy of the function, also where this was decorated
    before."""
    bind: Function = remat_p.bind

    def changed(*arguments: Any, policy: Policy, **parameters: Any) -> Any:
        chosen = policy if isinstance(policy, OwnPolicy) else policy_of(_line(), policy)
        return bind(*arguments, policy=chosen, **parameters)

    with mock.patch.object(remat_p, "bind", changed):
        yield
