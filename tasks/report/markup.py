"""HTML and SVG by construction: whatever is not :class:`Markup` is text, and text is always escaped.

Column names and class labels come from the user's data, so nothing may reach the page any other way.
"""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, /, *children: object, **attributes: object) -> Markup:
    """``<tag ...>children</tag>``. ``class_`` is spelled class, ``stroke_width`` is spelled stroke-width; an
    attribute that is None is left out, a float is cut to two decimals."""
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{spelled}>{join(*children)}</{tag}>")


def join(*children: object) -> Markup:
    """The children one after the other, escaped unless they are markup; None is nothing."""
    return Markup(
        "".join(child if isinstance(child, Markup) else escape(str(child)) for child in children if child is not None)
    )


def attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
