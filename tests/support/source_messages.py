"""Texts of the errors and log lines that modules can write, read from their syntax trees."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
VALUE = "{…}"


def source_messages(root: Path, folders: tuple[str, ...]) -> str:
    """Return the messages of all modules below ``folders``: a line with the module, then one per message."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    trees = {".".join(path.relative_to(root).with_suffix("").parts): parse(path) for path in paths}
    errors = error_classes(list(trees.values()))
    found = {name: list(dict.fromkeys(messages(tree, errors))) for name, tree in trees.items()}
    return "\n".join("\n".join([name, *(f"  {text}" for text in texts), ""]) for name, texts in found.items() if texts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def error_classes(trees: list[ast.Module]) -> set[str]:
    """Return the names of all exceptions, those of Python and those that a module defines."""
    found = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    bases = {
        node.name: {last_name(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    while more := {
        name for name, of in bases.items() if name not in found and any(map(is_error, of, [found] * len(of)))
    }:
        found |= more
    return found


def is_error(name: str, errors: set[str]) -> bool:
    return name in errors or name.endswith(("Error", "Exception"))


def last_name(node: ast.expr) -> str:
    """Return ``c`` of ``a.b.c``; an empty text if the node is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def messages(tree: ast.Module, errors: set[str]) -> Iterator[str]:
    """Yield the texts of the errors and log lines of a module, in the order of its lines."""
    texts = assigned(tree.body)
    for node in tree.body:
        yield from below(node, texts, errors)


def below(node: ast.AST, texts: dict[str, ast.expr], errors: set[str]) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        texts = texts | assigned(list(ast.walk(node)))
    if isinstance(node, ast.Call) and is_message(node, errors):
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            text = " ".join(text_of(argument, texts).split())
            if any(letter.isalpha() for letter in text):
                yield text
    for child in ast.iter_child_nodes(node):
        yield from below(child, texts, errors)


def is_message(call: ast.Call, errors: set[str]) -> bool:
    name = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and name in LOG_METHODS:
        return last_name(call.func.value).lower() in ("log", "logger", "logging") or isinstance(
            call.func.value, ast.Call
        )
    return is_error(name, errors)


def assigned(nodes: list[ast.AST] | list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the texts that are given to a name once."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            found.setdefault(last_name(node.targets[0]), []).append(node.value)
    return {name: values[0] for name, values in found.items() if name and len(values) == 1}


def text_of(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """Return the text of an expression, with a placeholder for every value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, texts) for part in parts)
        case ast.FormattedValue(value=ast.Name() | ast.IfExp() as value):
            return text_of(value, texts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, texts) + text_of(right, texts)
        case ast.BinOp(left=left, op=ast.Mod()) | ast.Call(func=ast.Attribute(value=left, attr="format")):
            return text_of(left, texts)
        case ast.IfExp(body=body, orelse=other):
            return f"({text_of(body, texts)}|{text_of(other, texts)})"
        case ast.Name(id=name) if name in texts:
            return text_of(texts[name], {key: value for key, value in texts.items() if key != name})
    return VALUE
