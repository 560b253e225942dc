"""What a group of errors comes down to."""

from manyhands.errors import first_of


def test_the_first_of_a_kind_is_found_however_deep() -> None:
    first, second = OSError("first"), OSError("second")
    group = BaseExceptionGroup("", [KeyError("x"), BaseExceptionGroup("", [ValueError("y"), first]), second])
    assert first_of(group, OSError) is first
    assert first_of(group, TypeError) is None
