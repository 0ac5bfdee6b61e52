"""The exact_match grader."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ServiceError
from services.reward.core.exact_match import last_boxed, parse_options, score_exact_match
from services.reward.core.records import Item, Unscored


def score(response, label, **options):
    return score_exact_match(Item("1", "", response, label), parse_options(options))


@pytest.mark.parametrize(
    ("response", "label", "options", "reward"),
    [
        (" 42\n", "42", {}, 1.0),
        (" 42\n", "42", {"strip": False}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"lower": True}, 1.0),
        ("The answer is 42.", "42", {}, 0.0),
        ("The answer is 42.", "42", {"extract": "last_number"}, 1.0),
        ("12 apples, so 1,000.0 pears", "1000", {"extract": "last_number"}, 1.0),
        ("7-3=4, and 12-5", "5", {"extract": "last_number"}, 1.0),
        ("it is -5", "-5", {"extract": "last_number"}, 1.0),
        ("1e3", "1000", {"extract": "last_number"}, 1.0),
        ("no number", "1000", {"extract": "last_number"}, 0.0),
        ("#### 12", "so it is\n#### 12", {"extract": "last_number"}, 1.0),
        ("think\n\nParis\n \n", "Paris", {"extract": "last_line"}, 1.0),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", {"extract": "boxed"}, 1.0),
        (r"\boxed{1} then \boxed{2", "1", {"extract": "boxed"}, 1.0),
        ("a=1 b=2", "2", {"pattern": r"\w=(\d)"}, 1.0),
        ("a=1 b=2", "answer: 2", {"pattern": r"\d", "label_pattern": r"\d"}, 1.0),
        ("nothing", "2", {"pattern": r"\d"}, 0.0),
    ],
)
def test_scores(response, label, options, reward):
    assert score(response, label, **options).reward == reward


def test_an_item_without_a_label_is_unscored():
    outcome = score("42", "")
    assert outcome.reason is Unscored.GRADER_ERROR
    assert "label_key" in outcome.message


@pytest.mark.parametrize(
    ("options", "named"),
    [({"lowercase": True}, "lower"), ({"extract": "xml"}, "last_number"), ({"pattern": "("}, "regular expression")],
)
def test_a_bad_option_is_named(options, named):
    with pytest.raises(ServiceError, match=named) as caught:
        parse_options(options)
    assert caught.value.reason == "INVALID_FIELD"


@given(st.text())
def test_a_text_equals_itself(text):
    expected = None if not text else 1.0
    assert score(text, text).reward == expected


def test_hostile_responses_take_linear_time():
    started = time.monotonic()
    for response in ("\\boxed{" * 20_000, "{" * 100_000, "1," * 100_000, "-" * 100_000):
        score(response, "1", extract="boxed")
        score(response, "1", extract="last_number")
    assert time.monotonic() - started < 5
    assert last_boxed("\\boxed{" * 20_000) is None
