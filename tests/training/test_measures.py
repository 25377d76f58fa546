"""What a training run measures, and that each threshold can fail."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import numpy as np
import pytest

from miles_router.client import Sample
from miles_router.trajectory.pieces import VersionRun
from tests.training import measures, picture
from tests.training.__main__ import ROOT
from tests.training.measures import Run, Step

STEPS = [
    Step(
        number=number,
        reward=0.1 + 0.1 * number,
        samples=8,
        whole=8,
        spanning=4 if number else 0,
        tokens=40,
        current=(2e-5, 1e-6),
        older=(1.0, 0.3) if number else None,
        changed=0.0,
        taught=True,
    )
    for number in range(8)
]
GOOD = Run(before=0.1, after=0.8, steps=STEPS)


def sample(tokens: list[int], mask: list[int], versions: list[tuple[str, int, int]]) -> Sample:
    return Sample(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        logprobs=np.array([-0.5 * each for each in mask], dtype=np.float32),
        weight_versions=tuple(VersionRun(*each) for each in versions),
        response_length=len(tokens),
        status="completed",
    )


def test_each_trained_token_has_the_version_that_sampled_it() -> None:
    made = sample([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [("7", 1, 3), ("8", 4, 5)])
    assert measures.versions_of(made).tolist() == ["7", "7", "8"]
    assert measures.is_whole(made)
    assert not measures.is_whole(sample([1, 2], [0, 0], []))


def test_the_distance_is_the_largest_and_the_mean() -> None:
    ours, theirs = np.array([-1, -2], dtype=np.float32), np.array([-1, -2.5], dtype=np.float32)
    assert measures.distance(ours, theirs) == (0.5, 0.25)
    assert measures.distance(ours[:0], theirs[:0]) is None


def test_a_sample_changes_where_its_text_encodes_to_other_tokens() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, token_ids: list[int]) -> str:
            return "".join("ab" if each == 300 else chr(each) for each in token_ids)

    assert not measures.changes(Letters(), sample([97, 98], [0, 1], [("7", 1, 2)]))
    assert measures.changes(Letters(), sample([300, 98], [0, 1], [("7", 1, 2)]))


def test_advantages_of_equal_rewards_are_zero() -> None:
    assert measures.advantages([1, 1, 1]).tolist() == [0, 0, 0]
    assert measures.advantages([0, 1]).tolist() == pytest.approx([-1, 1], abs=1e-3)


def test_a_good_run_has_no_problems() -> None:
    assert measures.exactness_problems(STEPS, keeps_cache=False) == []
    assert measures.learning_problems(GOOD) == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"whole": 7}, "1 of 8 samples are not whole"),
        ({"current": (0.002, 1e-6)}, "differ by 0.002 nats"),
        ({"older": (1e-5, 2e-6)}, "as close as current ones"),
    ],
    ids=["a lost sample", "another logprob", "a false stamp"],
)
def test_a_step_that_is_not_exact_is_named(broken: dict[str, object], said: str) -> None:
    steps = [replace(each, **broken) if each.number == 2 else each for each in STEPS]  # type: ignore[arg-type]
    (problem,) = measures.exactness_problems(steps, keeps_cache=False)
    assert problem.startswith("step 2: ")
    assert said in problem


def test_stamps_are_not_judged_where_the_step_before_taught_nothing() -> None:
    near = [replace(each, older=(1e-5, 2e-6)) for each in STEPS]
    assert measures.exactness_problems([replace(each, taught=False) for each in near], keeps_cache=False) == []
    taught = [replace(each, taught=each.number == 1) for each in near]
    (problem,) = measures.exactness_problems(taught, keeps_cache=False)
    assert problem.startswith("step 2: tokens stamped with older weights")


def test_updates_without_generations_in_flight_are_a_problem() -> None:
    steps = [replace(each, spanning=0) for each in STEPS]
    assert measures.exactness_problems(steps, keeps_cache=False) == [
        "0 of 56 samples span two weight versions, fewer than a third"
    ]


def test_distances_are_not_judged_where_the_engine_keeps_older_keys() -> None:
    steps = [replace(each, current=(0.5, 0.1)) for each in STEPS]
    assert measures.exactness_problems(steps, keeps_cache=True) == []
    assert len(measures.exactness_problems([replace(each, whole=0) for each in steps], keeps_cache=True)) == len(steps)


def test_a_model_that_has_not_learned_is_a_problem() -> None:
    flat = [replace(each, reward=0.1) for each in STEPS]
    assert len(measures.learning_problems(Run(0.1, 0.3, flat))) == 2


def test_the_picture_shows_every_step() -> None:
    drawn = picture.draw(GOOD, "capitals")
    points = drawn.split('points="')[1].split('"')[0].split(" ")
    assert len(points) == len(STEPS)
    heights = [float(each.split(",")[1]) for each in points]
    assert heights == sorted(heights, reverse=True), "a reward that rises goes up"
    assert "held out 0.10" in drawn
    assert "held out 0.80" in drawn


def test_the_page_shows_the_loop_as_it_is() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = [block for block in page.split("```") if block.startswith(("text\nasync def ", "text\ndef "))]
    assert len(blocks) == 2
    source = (ROOT / "tests" / "training" / "trainer.py").read_text(encoding="utf-8")
    for block in blocks:
        assert textwrap.indent(block.removeprefix("text\n"), "    ") in source
