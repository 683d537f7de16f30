"""Timetables as CSV, in the form of PyTorch's pipelining."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Ended
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline import OneForwardOneBackward, make_schedule
from nnx_pipeline.pipeline._timetable.actions import actions_of, read_csv

Run = Callable[..., Ended]


@given(
    st.sampled_from(("circular", "1f1b")),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_what_is_written_is_read(name: str, stages: int, groups: int, repeats: int) -> None:
    """The numbers are those of the schedule, each visit counted in a step of its own."""
    schedule = make_schedule(name, stages=stages, microbatches=stages * groups, repeats=repeats)
    actions = actions_of(schedule)
    assert read_csv(actions.to_csv()) == actions
    assert (actions.stages, actions.microbatches) == (stages * repeats, stages * groups)
    assert actions.count == 2 * stages * repeats * stages * groups
    assert actions.idle_share == pytest.approx(schedule.bubble_share)
    if isinstance(schedule, OneForwardOneBackward):
        # With one group of microbatches the loop also has a slot for what a bubble writes.
        assert max(actions.kept) == schedule.ring_slots or groups == 1
        assert max(actions.kept) <= schedule.ring_slots
    else:
        assert set(actions.kept) == {stages * groups * repeats}


def test_a_timetable_of_another_kind() -> None:
    actions = read_csv("0F0,0F1,,,,0B0,0B1\n,1F0,1F1,1B0,1B1,,\n")
    assert (actions.steps, actions.stages, actions.kept) == (7, 2, (2, 2))
    assert actions.idle_share == pytest.approx(6 / 14)
    split = read_csv("0F0,,,0I0,0W0\n,1F0,1I0,1W0\n")
    assert (split.steps, split.kept) == (5, (1, 1))
    assert read_csv("0F0,0I0,0F1,0I1,0W0,0W1").kept == (2,)  # until the gradient of the weights
    forward = read_csv("0F0,0F1\n,1F0,1F1")
    assert (forward.steps, forward.microbatches) == (3, 2)


def test_stages_in_the_form_of_a_v() -> None:
    rows = ["0F0,,,3F0,3B0,,,0B0", ",1F0,2F0,,,2B0,1B0"]
    actions = read_csv("\n".join(rows))
    assert (actions.stages, actions.kept) == (4, (2, 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the timetable has no action; write cells such as 0F0"),
        ("0F0,0X0", r"line 1 .* cell '0X0'; write a stage, one of F, B, I, W and a microbatch"),
        ("0F0\n0SEND_F0", "line 2 .* sends, receives and pairs .* format='compute_only'"),
        ("(0F1;0B0)OVERLAP_F_B", "pairs of actions that overlap cannot be read"),
        ("0F0,0F0", "0F0 is in the steps 0 and 1; keep one"),
        ("0F0,1F0\n0F1,1F1", "stage 0 is on the ranks .*; keep each stage on one rank"),
        ("0F0\n1F0", "1F0 in step 0 needs 0F0, which is in step 0; move it to an earlier step"),
        ("0F0,,0B0\n,1B0", "1B0 in step 1 needs 1F0, which is in no step; add it"),
        ("0F0,0B0,,\n,1F0,1B0", "0B0 in step 1 needs 1B0, which is in step 2"),
        ("0F0,,,0W0,0I0\n,1F0,1B0", "0W0 in step 3 needs 0I0, which is in step 4"),
        ("0F0,0F1,0B0", "stage 0 has F of microbatch 1; it must have F and B, or F, I and W"),
        ("0F0,0I0", "stage 0 has F, I of microbatch 0; it must have F and B, or F, I and W"),
        ("0F0,0B0\n,", "rank 1 has no action in any step; leave its line out"),
        ("9" * 20 + "F0", "has the cell"),
        ("\u0660F\u0660", "has the cell"),
        ("0F1", "stage 0 has nothing of microbatch 0; it must have F"),
        ("0F0,0F1\n,1F1", "stage 1 has nothing of microbatch 0; it must have F"),
        (
            "0F0,,0B0\n,999999999F999999999",
            "stage 1 has nothing of microbatch 0; it must have F and B",
        ),
        ('"0F0', "the timetable is not CSV"),
    ],
)
def test_what_is_no_timetable(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_csv(text)


def test_the_command(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "timetable.csv"
    numbers = ("--stages", "2", "--microbatches", "4", "--repeats", "2", "--schedule", "1f1b")
    assert run("schedule", *numbers, "--csv", str(path)).code == 0
    ended = run("schedule", "--read", str(path), "--json", "-")
    found = ended.json
    assert (found["ranks"], found["stages"], found["kept"]) == (2, 4, [5, 3])
    lines = path.read_text().splitlines()
    assert [",".join(cell or "" for cell in row) for row in found["actions"]] == lines
    path.write_text("\ufeff" + path.read_text(), "utf-8")  # as spreadsheets write it
    shown = run("schedule", "--read", str(path)).out
    assert "2 ranks, 4 stages, 4 microbatches: " in shown
    assert all(cell in shown for row in found["actions"] for cell in row if cell)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--read", "nothing.csv"), "nothing.csv cannot be read: No such file or directory"),
        (("--read", "{image}"), "cannot be read: it is not text in UTF-8"),
        (("--read", "{image}", "--stages", "2"), "--stages has no meaning with --read"),
        (("--read", "{image}", "--schedule", "1f1b"), "--schedule has no meaning with --read"),
        (("--read", "{image}", "--csv", "other.csv"), "--csv has no meaning with --read"),
        (("--read", "{image}", "--json", "{image}"), "--json would write over"),
        (("--stages", "2"), "give --stages and --microbatches, or a timetable by --read"),
    ],
)
def test_what_the_command_refuses(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"\xff\xfe\x00")
    ended = run("schedule", *(one.format(image=image) for one in arguments))
    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.splitlines()) == 1
