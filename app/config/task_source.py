"""What the source of a task shows, without importing it, which imports PyTorch and takes seconds.

A mistake is reported only if importing the module would show it too. Whatever the source alone does
not decide is left to the import: a class that a function makes, a base class from another file, a
path that the module adds to Python's.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from app import names
from app.config.arguments import check_arguments
from app.config.task_names import (
    BUILT_IN,
    module_and_class,
    no_such_class,
    no_such_module,
    not_a_task,
    not_installed,
)
from app.errors import MissingData, SourceLine, UserError, described, own_line, with_line

MAKES_NAMES = ("import *", "__getattr__", "globals()", "setattr", "exec(", "global ")
"""What a module may define names with that its syntax tree does not show."""
CHANGES_PATH = ("sys.path", "__path__", "sys.modules", "site.", "meta_path")
"""What a module may make other modules importable with."""
TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict)
}
"""The names of types that an annotation may consist of to be read without running it."""
TASK = ("trireme", "app.tasks.base", "trireme.tasks.base")
"""The modules from which a file imports `Task`."""


@dataclass(frozen=True)
class Source:
    """A module that was read and not run.

    Args:
        file: Its path.
        text: What is in it.
        tree: Its syntax tree.
    """

    file: str
    text: str
    tree: ast.Module

    def has(self, words: tuple[str, ...]) -> bool:
        """Whether one of these occurs anywhere in the text."""
        return any(word in self.text for word in words)

    def line(self, number: int) -> SourceLine:
        """A line of it, for a message."""
        return SourceLine(self.file, number, "", self.text.splitlines()[number - 1].strip())


def refuse_wrong_task(name: str, task_args: Mapping[str, Any], *, needs_data: bool = True) -> None:
    """Check a task's name and its arguments as far as source files show what is wrong.

    Args:
        name: The name of a built-in task, or "package.module:Class".
        task_args: The arguments of its class.
        needs_data: Whether the argument `data` must be given, if the class needs it.

    Raises:
        UserError: There is no such task, its file has a syntax error or imports what is not
            installed, or it does not take these arguments.
    """
    module, class_name = module_and_class(name)
    top = module.partition(".")[0]
    is_users = name not in BUILT_IN
    if is_users and (top in (*names.NAMES, names.FACE, "python") or not _is_dotted(module)):
        return  # app/tasks/user_code.py tells a person's packages from Trireme's
    source = _read(name, module)
    if source is None:
        return
    if is_users:
        _refuse_missing_imports(name, source)
    definition = _class(name, class_name, source)
    signature = None if definition is None else _signature(definition, source)
    if signature is not None:
        hints = {
            parameter.name: parameter.annotation
            for parameter in signature.parameters.values()
            if parameter.annotation is not parameter.empty
        }
        try:
            check_arguments(name, signature, hints, task_args, is_built_in=not is_users)
        except MissingData:
            if needs_data:
                raise


@functools.cache
def argument_names(name: str) -> list[str]:
    """The names of a built-in task's arguments; empty if it takes any."""
    module, class_name = module_and_class(name)
    source = _read(name, module)
    definition = None if source is None else _class(name, class_name, source)
    if source is None or definition is None:
        return []
    signature = _signature(definition, source)
    parameters = [] if signature is None else list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    return [parameter.name for parameter in parameters]


def _is_dotted(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


# --- the module -----------------------------------------------------------------------------------


def _read(name: str, module: str) -> Source | None:
    """The source of a task's module; None if its place is not known.

    Raises:
        UserError: There is no such module, or it has a syntax error.
    """
    if name in BUILT_IN:
        return _parse(name, names.file_of(module, [names.ROOT]))
    top, *below = module.split(".")
    spec = _find(top)
    if spec is None:
        raise UserError(no_such_module(name, top))
    full_name = top
    for part in below:
        package = None if spec.origin is None else _parse(name, spec.origin)
        if package is not None and package.has((*CHANGES_PATH, *MAKES_NAMES)):
            return None
        full_name = f"{full_name}.{part}"
        locations = spec.submodule_search_locations
        if locations is None:  # a module, and not a package
            raise UserError(no_such_module(name, full_name))
        spec = PathFinder.find_spec(full_name, list(locations))
        if spec is None:
            raise UserError(no_such_module(name, full_name))
    return _parse(name, spec.origin or "")


def _find(top: str) -> ModuleSpec | None:
    """The spec of a top-level module: from the current folder first, as when it is imported.

    Finding a top-level module runs none of its code.
    """
    spec = PathFinder.find_spec(top, [os.getcwd()])
    if spec is not None and spec.loader is not None:
        return spec
    if top in sys.modules:
        return sys.modules[top].__spec__ or ModuleSpec(top, None)
    return importlib.util.find_spec(top)


def _parse(name: str, file: str) -> Source | None:
    """A source file, parsed; None if it is something else, such as an extension in C.

    Raises:
        UserError: It has a syntax error.
    """
    if not file.endswith(".py"):
        return None
    try:
        content = Path(file).read_bytes()
        tree = ast.parse(content, filename=file)
        return Source(file, content.decode(), tree)
    except SyntaxError as error:
        sentence = f"task {name!r} does not import: {described(error)}"
        raise UserError(with_line(sentence, own_line(error))) from error
    except (OSError, ValueError):
        return None


def _refuse_missing_imports(name: str, source: Source) -> None:
    """Check that what the module always imports is installed.

    Raises:
        UserError: It is not.
    """
    if source.has(CHANGES_PATH):
        return
    for statement in source.tree.body:
        for module in _imported(statement):
            top = module.partition(".")[0]
            if top not in (*names.NAMES, names.FACE) and _find(top) is None:
                sentence = not_installed(name, top)
                raise UserError(with_line(sentence, source.line(statement.lineno)))


def _imported(statement: ast.stmt) -> Iterator[str]:
    """The modules that a statement of a module imports, if it is reached."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.name
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module


# --- the class ------------------------------------------------------------------------------------


def _class(name: str, class_name: str, source: Source) -> ast.ClassDef | None:
    """The definition of a task's class; None if it is made or imported in another way.

    Raises:
        UserError: The module has no such name, or what has it is no task.
    """
    definitions = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    bindings = [bound for bound in names.bound_names(source.tree.body) if bound == class_name]
    if not bindings and not source.has(MAKES_NAMES):
        tasks: list[str] = []
        for definition in definitions:
            if {"Task", *tasks} & {ast.unparse(base) for base in definition.bases}:
                tasks.append(definition.name)
        raise UserError(no_such_class(name, [each.name for each in definitions], tasks))
    if len(bindings) != 1:
        return None
    for statement in source.tree.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if statement.name != class_name or statement.decorator_list:
                    continue
                if not isinstance(statement, ast.ClassDef):
                    raise UserError(not_a_task(name))
                if not statement.bases and not statement.keywords:
                    raise UserError(with_line(not_a_task(name), source.line(statement.lineno)))
                return statement
    return None


def _signature(definition: ast.ClassDef, source: Source) -> inspect.Signature | None:
    """What a class is called with; None if its source does not show that."""
    if definition.keywords:  # a metaclass may be called in its place
        return None
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    by_name = {method.name: method for method in methods}
    if "__new__" in by_name:
        return None
    initializer = by_name.get("__init__")
    if initializer is not None and not initializer.decorator_list:
        return inspect.Signature(list(_parameters(initializer.args)))
    bases = [ast.unparse(base) for base in definition.bases]
    if initializer is None and bases == ["Task"] and _imports_task(source.tree):
        return inspect.Signature()
    return None


def _imports_task(tree: ast.Module) -> bool:
    """Whether a module's `Task` is Trireme's."""
    names_imported = [
        alias
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in TASK
        for alias in node.names
    ]
    return any(alias.name == "Task" and alias.asname is None for alias in names_imported)


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    """The parameters of an `__init__`, without `self`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * without_default, *arguments.defaults]
    kinds: list[Any] = [inspect.Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    for argument, default, kind in list(zip(positional, defaults, kinds, strict=True))[1:]:
        yield _parameter(argument, default, kind)
    if arguments.vararg is not None:
        yield inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default, inspect.Parameter.KEYWORD_ONLY)
    if arguments.kwarg is not None:
        yield inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD)


def _parameter(argument: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    hint = _type(argument.annotation)
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, TypeError):
            # A value that is not known, whose type may be another than the annotation's.
            value = default
            hint = inspect.Parameter.empty
    return inspect.Parameter(argument.arg, kind, default=value, annotation=hint)


def _type(annotation: ast.expr | None) -> Any:
    """The type that an annotation names, if it consists of built-in ones; else empty."""
    match annotation:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(text)):
            try:
                return _type(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return inspect.Parameter.empty
        case ast.Name(id=type_name) if type_name in TYPES:
            return TYPES[type_name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            either = [_type(left), _type(right)]
            if inspect.Parameter.empty not in either:
                return either[0] | either[1]
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            item_type = _type(item)
            if item_type is not inspect.Parameter.empty:
                return types.GenericAlias(list, (item_type,))
    return inspect.Parameter.empty
