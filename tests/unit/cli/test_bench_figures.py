"""The arithmetic of `midstream bench`: what counts as again, what the check finds, what the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from midstream.cli.bench_figures import RESUME, RETRY, Attempt, document, duration, rows, table, violations

# 60 tokens, cut after 20.
RETRIED = Attempt(20, RETRY, 0.03, 0.4, 1.2, inferred=80, length=60, requests=1, identical=True, overshoot=2)
RESUMED = Attempt(20, RESUME, 0.002, 0.002, 0.8, inferred=60, length=60, requests=0, identical=True)


def test_a_retry_infers_again_what_the_reader_had_and_a_resume_nothing() -> None:
    assert (RETRIED.again, RESUMED.again) == (20, 0)


def test_what_should_be_is_no_violation() -> None:
    assert violations([RETRIED, RESUMED], deterministic=True) == []


@pytest.mark.parametrize(
    ("resumed", "told"),
    [
        (replace(RESUMED, identical=False), "the two halves joined are not the answer"),
        (replace(RESUMED, requests=1), "the upstream was asked again"),
        (replace(RESUMED, inferred=61), "1 tokens were inferred again"),
    ],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_resume_that_is_not_exact_is_found_with_any_model(resumed: Attempt, told: str, deterministic: bool) -> None:
    assert told in " ".join(violations([RETRIED, resumed], deterministic=deterministic))


@pytest.mark.parametrize("inferred", [79, 81])
def test_one_token_more_or_fewer_than_the_reader_had_is_found(inferred: int) -> None:
    found = violations([replace(RETRIED, inferred=inferred), RESUMED], deterministic=True)
    assert found == [f"dropped after 20: resume inferred {inferred - 60} tokens fewer than retry, not 20"]


def test_another_text_from_a_model_that_says_the_same_each_time_is_found() -> None:
    assert "another text" in violations([replace(RETRIED, identical=False), RESUMED], deterministic=True)[0]


def test_a_sampled_retry_may_have_any_length_and_text() -> None:
    sampled = replace(RETRIED, inferred=71, length=51, identical=False)
    assert violations([sampled, RESUMED], deterministic=False) == []


def test_each_pair_is_checked_for_itself() -> None:
    """Two runs that are wrong in opposite directions are not right together."""
    off = [replace(RETRIED, inferred=81), RESUMED, replace(RETRIED, inferred=79), RESUMED]
    assert len(violations(off, deterministic=True)) == 2


def test_rows_hold_medians_and_one_different_text_spoils_a_row() -> None:
    runs = [replace(RESUMED, first=t, identical=t != 0.9) for t in (0.9, 0.002, 0.004)]
    (row,) = rows(runs)
    assert (row.runs, row.first, row.identical) == (3, 0.004, False)


def test_the_table_is_aligned_and_says_what_differs() -> None:
    assert table(rows([RETRIED, replace(RESUMED, identical=False)])) == (
        "dropped after  reader  first token  first new token  to the end  inferred  again  text\n"
        "           20  retry       30.0 ms           400 ms      1.20 s        80     20  identical\n"
        "           20  resume      2.00 ms          2.00 ms      800 ms        60      0  DIFFERENT\n"
    )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.00213, "2.13 ms"),
        (0.0213, "21.3 ms"),
        (0.845, "845 ms"),
        (1.0, "1.00 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
    ],
)
def test_a_duration_has_three_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_the_document_holds_every_run_and_the_judgement() -> None:
    told = document({"model": "m"}, [RETRIED, RESUMED], ["bad"])
    assert (told["model"], told["ok"], told["violations"]) == ("m", False, ["bad"])
    assert [(run["way"], run["again"], run["overshoot"]) for run in told["attempts"]] == [
        ("retry", 20, 2),
        ("resume", 0, 0),
    ]
    assert [row["way"] for row in told["rows"]] == ["retry", "resume"]
