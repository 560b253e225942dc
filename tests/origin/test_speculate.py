"""manyhands.origin.speculate: what is committed, guessed and sent, whatever comes back."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.origin.speculate import GuessChain

TRUTH = [position % 7 for position in range(400)]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.booleans(), max_size=5)), max_size=60))
def test_every_position_is_sent_once_under_each_guess_and_the_ledger_is_the_truth(
    turns: list[tuple[int, list[bool]]],
) -> None:
    """`turns`: how many rows come back at once, and which of the drafts sent then are right."""
    chain, under_way = GuessChain(TRUTH[:3]), list[int]()
    sent = chain.extend(())
    assert sent == (0, TRUTH[:3])
    under_way = [2]  # positions whose rows are to come back
    for rows, drafts in turns:
        came, under_way = under_way[:rows], under_way[rows:]
        drawn = []
        for row, position in enumerate(came):
            assert position == len(chain.ledger) - 1 + row
            drawn.append(TRUTH[position + 1])
            if row >= len(chain.guessed) or chain.guessed[row] != drawn[-1]:
                break
        if drawn:
            before = list(chain.guessed)
            right, is_dead = chain.commit(drawn)
            assert before[:right] == drawn[:right] and is_dead == (right < len(drawn) and right < len(before))
            if right < len(drawn):
                under_way = []
        assert chain.ledger == TRUTH[: len(chain.ledger)]
        start = len(chain)
        guesses = [TRUTH[start + i] if is_right else 9 for i, is_right in enumerate(drafts)]
        position, ids = chain.extend(guesses)
        assert ids == [*chain.ledger, *chain.guessed][position:] and chain.sent == len(chain)
        assert [*chain.ledger, *chain.guessed][len(chain.ledger) - 1 :] == chain.from_position(len(chain.ledger) - 1)
        under_way += range(position, position + len(ids))
        assert chain.windows <= len(under_way)
    assert chain.windows == 0 or under_way


def test_windows_under_way_are_counted() -> None:
    chain = GuessChain([1, 2, 3])
    chain.extend([4])
    chain.extend([5, 6])
    assert chain.windows == 2
    assert chain.commit([4]) == (1, False)
    assert chain.windows == 2  # the row of 4 has not come back
    assert chain.commit([5, 6]) == (2, False) and chain.windows == 1
    assert chain.commit([9]) == (0, False)
    assert chain.windows == 0 and chain.extend(()) == (6, [9])


def test_what_is_sent_again_is_one_window() -> None:
    chain = GuessChain([1, 2])
    for draft in (3, 4, 5):
        chain.extend([draft])
    chain.resend(99)
    assert chain.windows == 1 and chain.extend(()) == (5, [])
