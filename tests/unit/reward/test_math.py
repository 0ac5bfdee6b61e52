"""The math grader."""

import pytest

from services.reward.adapters.math_verifier import score_math
from services.reward.core.records import Item, Unscored


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("7 + 5 = 12, so the answer is 12.", "12", 1.0),
        ("the answer is 13", "12", 0.0),
        (r"hence \boxed{\frac12}", "0.5", 1.0),
        (r"hence $x = \frac{1}{2}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        ("", "12", 0.0),
        ("no idea", "12", 0.0),
    ],
)
def test_scores(response, label, reward):
    assert score_math(Item("1", "", response, label), {}).reward == reward


def test_boxed_only():
    assert score_math(Item("1", "", "12", "12"), {"boxed_only": True}).reward == 0.0


@pytest.mark.parametrize("label", ["", "   "])
def test_without_a_usable_label_an_item_is_unscored(label):
    assert score_math(Item("1", "", "12", label), {}).reason is Unscored.GRADER_ERROR
