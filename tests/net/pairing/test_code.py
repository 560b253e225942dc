"""The six characters: how they are drawn and read, and when they stop opening anything."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import BadRequest
from manyhands.net.pairing.code import (
    ALPHABET,
    CODE_S,
    LENGTH,
    MAX_FAILURES,
    JoinCode,
    draw_code,
    read_code,
    shown_code,
)


def wrong() -> bool:
    return False


def right() -> bool:
    return True


def test_the_alphabet_has_no_two_that_look_alike() -> None:
    assert len(set(ALPHABET)) == len(ALPHABET) == 27 and not set(ALPHABET) & set("ILOSZ0158")
    assert len(ALPHABET) ** LENGTH == 387_420_489  # as docs/threat.md says


def test_every_character_is_drawn_evenly() -> None:
    drawn = "".join(draw_code(random.Random(7).randrange) for _ in range(1))
    assert len(drawn) == LENGTH
    rng = random.Random(7)
    many = "".join(draw_code(rng.randrange) for _ in range(9000))
    counts = [many.count(c) for c in ALPHABET]
    assert min(counts) > 1800 and max(counts) < 2200  # 2,000 each; the deviation is 44


@given(st.text(alphabet=ALPHABET, min_size=LENGTH, max_size=LENGTH), st.booleans())
def test_what_is_shown_is_read_again_however_it_is_typed(code: str, is_small: bool) -> None:
    shown = shown_code(code)
    assert read_code(f"  {shown.lower() if is_small else shown} \n") == code == read_code(" ".join(code))


@pytest.mark.parametrize(
    "typed", ["", "K7W-4Q", "K7W-4QX-G", "K7W 4Q0", "K7W4QI", "ÄK7W4Q", "K7W_4QX", "\x1b[2J", "A" * 10**6]
)
def test_what_can_be_no_code_is_refused_without_being_quoted(typed: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_code(typed)
    assert typed.strip() == "" or typed not in str(refused.value)
    assert len(str(refused.value)) < 120


@given(st.text(alphabet=ALPHABET + "abk -\tILOSZ0158ß\u2028\x1b", max_size=80))
def test_anything_typed_is_a_code_or_refused(typed: str) -> None:
    try:
        assert set(read_code(typed)) <= set(ALPHABET)
    except BadRequest:
        pass


def test_three_wrong_ones_end_a_code_and_the_right_one_comes_too_late() -> None:
    code = JoinCode("ABCDEF", until=CODE_S)
    for left in (2, 1, 0):
        assert not code.admit(wrong, 1.0) and code.tries_left == left
    assert not code.is_live(1.0) and not code.admit(right, 1.0)


def test_a_dead_code_looks_at_no_proof() -> None:
    """Exchanges that began while it was live must not be oracles."""
    looked: list[int] = []

    def look() -> bool:
        looked.append(1)
        return True

    expired, used_up = JoinCode("ABCDEF", until=10.0), JoinCode("ABCDEF", until=10.0, failures=MAX_FAILURES)
    withdrawn = JoinCode("ABCDEF", until=10.0, is_withdrawn=True)
    assert not any((expired.admit(look, 10.0), used_up.admit(look, 1.0), withdrawn.admit(look, 1.0)))
    assert not looked and withdrawn.tries_left == 0 and expired.admit(look, 9.9)


def test_several_machines_may_join_by_one_code_and_failures_are_never_forgiven() -> None:
    code = JoinCode("ABCDEF", until=CODE_S)
    assert [code.admit(proof, 1.0) for proof in (wrong, right, wrong, right, wrong, right)] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]


def test_the_repr_of_a_code_hides_it() -> None:
    assert "ABCDEF" not in repr(JoinCode("ABCDEF", until=CODE_S))
