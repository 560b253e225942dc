"""What programs send back of earlier answers, as chat templates take it."""

from typing import Any

import pytest

from manyhands.api.openai.conversation import call_of, message_of

SAID = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    "message, wanted",
    [
        ({"role": "assistant", "refusal": "I will not."}, {"role": "assistant", "content": "I will not."}),
        ({**SAID, "refusal": "y"}, SAID),
        ({**SAID, "reasoning": "Hm."}, {**SAID, "reasoning_content": "Hm."}),
        ({**SAID, "reasoning": "Hm.", "reasoning_content": "Well."}, {**SAID, "reasoning_content": "Well."}),
        ({**SAID, "reasoning": {"summary": []}}, SAID),
        ({"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "system", "content": "a"}),
    ],
)
def test_a_message_loses_nothing_that_was_said(message: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert message_of(message) == wanted


@pytest.mark.parametrize("arguments, wanted", [("", {}), ("{}", {}), ('{"a": 1}', {"a": 1}), ("not JSON", "not JSON")])
def test_arguments_are_an_object_where_they_can_be(arguments: str, wanted: Any) -> None:
    assert call_of("1", "f", arguments)["function"]["arguments"] == wanted
