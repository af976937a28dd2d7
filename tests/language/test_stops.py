"""Stop tokens of a model: its tokenizer's end, and for chat models also the end of a turn."""

import json

from slipstream.shared.language.chat_template import OWN_TEMPLATE, stop_token_ids
from slipstream.shared.language.tokenizer import FAST, SETTINGS, TEMPLATE, bytes_tokenizer

OURS = {**bytes_tokenizer(turns=True), TEMPLATE: OWN_TEMPLATE}
END, TURN_ENDS = 256, 258


def test_an_answer_ends_with_its_turn() -> None:
    assert stop_token_ids(OURS, answers=True) == [TURN_ENDS, END]
    assert stop_token_ids(OURS, answers=False) == [END]


def test_a_template_may_end_a_turn_with_the_end_token_or_with_text() -> None:
    asked = "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    assert stop_token_ids({**OURS, TEMPLATE: asked + " <|endoftext|>{% endfor %}"}, answers=True) == [END]
    assert stop_token_ids({**OURS, TEMPLATE: asked + "\n{% endfor %}"}, answers=True) == [END]


def test_what_says_nothing_stops_nowhere() -> None:
    assert stop_token_ids({**OURS, TEMPLATE: "{{ raise_exception('no') }}"}, answers=True) == [END]
    assert stop_token_ids({}, answers=True) == []
    unnamed = {SETTINGS: json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})}
    assert stop_token_ids({FAST: OURS[FAST], **unnamed}, answers=True) == []
