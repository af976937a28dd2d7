"""At which tokens a model has said what it had to say."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import UserError
from slipstream.language.chat_template import ANSWERS, PROBE, Rendered, template_of
from slipstream.language.template_process import TemplateStopped
from slipstream.language.tokenizer import Tokenizer

#: No template ends an answer otherwise on another day.
ANY_DAY = "2000-01-01"
CONVERSATION = [{"role": "user", "content": "?"}, {"role": ANSWERS, "content": PROBE}]


def stops_of(files: Mapping[str, str], *, answers: bool) -> list[int]:
    """The ids at which a model ends that was trained on texts of the tokenizer in ``files``: its end token, and of one
    that ``answers`` also the special token that its chat template puts behind an answer. Empty for a tokenizer that
    cannot be read here, or names no end token."""
    try:
        tokenizer = Tokenizer(files)
    except (UserError, KeyError):
        return []
    after = text_after_an_answer(files) if answers else ""
    turn = next((token for token in tokenizer.specials if token and after.startswith(token)), None)
    return list(dict.fromkeys([*([tokenizer.id_of(turn)] if turn else []), tokenizer.end]))


def text_after_an_answer(files: Mapping[str, str]) -> str:
    """Return what follows the content of the last answer of a conversation; "" without a template that shows it.

    Raises ``UserError`` for a template that exceeds a limit.
    """
    try:
        (found,) = template_of(files, ANY_DAY).render([CONVERSATION])
    except TemplateStopped:
        raise
    except UserError:
        return ""
    return found.text.rpartition(PROBE)[2].lstrip() if isinstance(found, Rendered) and PROBE in found.text else ""
