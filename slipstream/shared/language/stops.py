"""Stop tokens of a language model."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.shared.errors import UserError
from slipstream.shared.language.chat_template import ANSWERS, PROBE, RenderedConversation, load_chat_template
from slipstream.shared.language.template_process import TemplateStopped
from slipstream.shared.language.tokenizer import Tokenizer

#: Arbitrary date, since no template ends an answer differently on another day.
ANY_DAY = "2000-01-01"
CONVERSATION = [{"role": "user", "content": "?"}, {"role": ANSWERS, "content": PROBE}]


def stop_token_ids(files: Mapping[str, str], *, answers: bool) -> list[int]:
    """Return the stop token ids of a model that was trained with the tokenizer in ``files``.

    They are the end token and, with ``answers``, the special token that its chat template puts after an answer. Empty
    if the tokenizer cannot be loaded or has no end token.
    """
    try:
        tokenizer = Tokenizer(files)
    except (UserError, KeyError):
        return []
    after = text_after_an_answer(files) if answers else ""
    turn = next((token for token in tokenizer.specials if token and after.startswith(token)), None)
    return list(dict.fromkeys([*([tokenizer.id_of(turn)] if turn else []), tokenizer.end]))


def text_after_an_answer(files: Mapping[str, str]) -> str:
    """Return the text that the chat template puts after the last answer; "" if it is unknown.

    Raises ``TemplateStopped`` if the template exceeds a limit.
    """
    try:
        (found,) = load_chat_template(files, ANY_DAY).render([CONVERSATION])
    except TemplateStopped:
        raise
    except UserError:
        return ""
    return (
        found.text.rpartition(PROBE)[2].lstrip()
        if isinstance(found, RenderedConversation) and PROBE in found.text
        else ""
    )
