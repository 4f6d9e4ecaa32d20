"""The built-in tasks and the names of their arguments, as their source has them.

Importing a task imports PyTorch, which takes seconds. A misspelt argument is told without that.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from app.errors import nearest

BUILT_IN = {
    "image_classification": "app.tasks.vision:ImageClassification",
    "language_modelling": "app.tasks.language:LanguageModelling",
    "tabular": "app.tasks.tabular:Tabular",
    "huggingface": "app.tasks.huggingface.task:HuggingFace",
}
"""The import path of each."""
ROOT = Path(__file__).parents[2]


def arguments_of(task: str) -> list[str]:
    """The names of a built-in task's arguments; empty if they cannot be known."""
    module, _, class_name = BUILT_IN[task].partition(":")
    file = ROOT / f"{module.replace('.', '/')}.py"
    try:
        tree = ast.parse(file.read_text())
    except OSError:
        return []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    if member.args.kwarg is not None:
                        return []
                    arguments = [*member.args.args[1:], *member.args.kwonlyargs]
                    return [argument.arg for argument in arguments]
    return []


def no_such_argument(name: str, known: Sequence[str], *, key: str, owner: str) -> str:
    """The sentence that something does not take an argument.

    Args:
        name: The name of the argument.
        known: The names of the arguments that it takes.
        key: The configuration key that the arguments are below.
        owner: What is called.
    """
    takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
    return f"{key}.{name}: {owner} has no such argument{nearest(name, known)}; {takes}"
