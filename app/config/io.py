"""Reads a `Config`: defaults < YAML files < key=value, each mistake one sentence that names its place."""

import ast
import dataclasses
import difflib
import inspect
import textwrap
import typing
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from app.config import Config
from app.config.check import validate
from app.config.words import meant_key
from app.errors import UserError, nearest
from cluster.document import read_document
from strategies.options import Options


def load_config(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Config:
    """The configuration of `files`, merged in order, with `key=value` overrides on top.

    Raises:
        UserError: a file is missing or no mapping; a key is unknown; a value has the wrong type or range.
    """
    tree: Any = _defaults()
    paths, mistakes = [Path(file) for file in files], list[str]()
    for file in paths:
        tree = _merge(tree, read_yaml(file), str(file), mistakes)
    if given := [_read_override(override) for override in overrides]:
        together = typing.cast(DictConfig, OmegaConf.merge(*given))
        tree = _merge(tree, together, "on the command line", mistakes)
    if paths and not OmegaConf.is_interpolation(tree.run, "name") and not tree.run.name:
        tree = OmegaConf.merge(tree, {"run": {"name": paths[0].stem}})
    return _finished(tree, mistakes)


@lru_cache
def _defaults() -> DictConfig:
    """Made once, which takes as long as all that follows. Nobody changes it: merging copies what it merges into."""
    return OmegaConf.structured(Config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Another configuration: this one with other values for some dotted keys. They are not checked again."""
    for key, value in values.items():
        config = _with_value(config, key, value)
    return config


def _with_value(section: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    if rest and not dataclasses.is_dataclass(getattr(section, name)):
        raise KeyError(key)
    return dataclasses.replace(section, **{name: _with_value(getattr(section, name), rest, value) if rest else value})


def from_dict(values: Mapping[str, Any], source: str = "the saved configuration") -> Config:
    """The configuration that `to_dict` gave."""
    mistakes: list[str] = []
    return _finished(_merge(_defaults(), OmegaConf.create(dict(values)), source, mistakes), mistakes)


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionaries, ready for JSON and YAML."""
    return dataclasses.asdict(config)


def to_yaml(config: Config | Mapping[str, Any]) -> str:
    """The whole configuration (or its tree) as a YAML file that `load_config` reads back to the same tree."""
    tree = dict(config) if isinstance(config, Mapping) else to_dict(config)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; empty mappings are left out."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# --- documentation ----------------------------------------------------------------------------------------------


@lru_cache
def documentation() -> dict[str, str]:
    """Every dotted key with the string that stands under its field."""
    docs: dict[str, str] = {}

    def visit(cls: type, prefix: str) -> None:
        own = _field_docs(cls)
        for name, hint in typing.get_type_hints(cls).items():
            docs[prefix + name] = own.get(name, "")
            if dataclasses.is_dataclass(hint):
                visit(typing.cast(type, hint), f"{prefix}{name}.")

    visit(Config, "")
    return docs


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass; under that of `Options` where a field's default is `Options.NAME`."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    field = ""
    for statement in definition.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=default):
                field = name
                match default:
                    case ast.Attribute(value=ast.Name(id="Options"), attr=option):
                        docs[field] = _field_docs(Options)[option]
            case ast.Expr(value=ast.Constant(value=str(text))) if field:
                docs[field] = " ".join(text.split())
    return docs
    return docs


def explain(config: Config) -> str:
    """The resolved configuration as YAML, each key under its documentation; also valid as an experiment file."""
    docs, default = documentation(), to_dict(Config())
    lines: list[str] = []

    def visit(values: Mapping[str, Any], default: Any, prefix: str, indent: str) -> None:
        for key, value in values.items():
            lines.extend(f"{indent}# {line}" for line in textwrap.wrap(docs.get(prefix + key, ""), 110 - len(indent)))
            if isinstance(value, Mapping) and f"{prefix}{key}." in _SECTIONS:
                lines.append(f"{indent}{key}:")
                visit(value, default[key], f"{prefix}{key}.", indent + "  ")
            else:
                changed = isinstance(default, Mapping) and value != default.get(key)
                lines.append(
                    f"{indent}{key}: {_flow(value)}" + (f"  # default: {_flow(default[key])}" if changed else "")
                )
            if not indent:
                lines.append("")

    visit(to_dict(config), default, "", "")
    return "\n".join(lines).rstrip() + "\n"


_SECTIONS = {
    f"{field.name}." for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.default_factory)
}


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


# --- reading ----------------------------------------------------------------------------------------------------


def read_yaml(file: Path) -> DictConfig:
    """The keys in a YAML file. Raises UserError: it cannot be read, or has no keys."""
    if not file.exists():
        near = nearest(str(file), file.parent.glob("*.y*ml"))
        raise UserError(f"there is no file {file}{near}: write the path of a YAML file")
    try:
        read = read_document(str(file), file.read_text())
        tree = OmegaConf.create(read.data if read.data is not None else {})
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}" if where else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{file} cannot be read as YAML{place}: {what}") from error
    for twice in read.duplicates:
        raise UserError(f"{file} at line {twice.line}: {twice.message}")
    if not isinstance(tree, DictConfig):
        raise UserError(f"{file} holds no keys: write lines such as `task: image_classification`")
    return tree


def _read_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{override!r} is neither a YAML file nor key=value: write for instance train.steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"the value of {key} on the command line is not valid YAML: put it in double quotes within single ones, "
            f"""as '{key}="…"'"""
        ) from error


def _merge(tree: DictConfig, values: DictConfig, source: str, mistakes: list[str]) -> DictConfig:
    """The tree with the values on top, but for those that do not fit, which become sentences."""
    try:
        return _merged(tree, values, source)
    except UserError as error:
        before = len(mistakes)
        plain: Any = OmegaConf.to_container(values)  # interpolations as they are written
        for key, value in plain.items():
            section = isinstance(value, dict) and f"{key}." in _SECTIONS
            parts = [{key: {name: each}} for name, each in value.items()] if section else [{key: value}]
            for part in parts:
                try:
                    tree = _merged(tree, OmegaConf.create(part), source)
                except UserError as one:
                    mistakes.append(str(one))
        if len(mistakes) == before:  # only together they do not fit
            mistakes.append(str(error))
        return tree


def _merged(tree: DictConfig, values: DictConfig, source: str) -> DictConfig:
    at = source if source.startswith("on ") else f"in {source}"
    length = {
        key: OmegaConf.select(values, f"train.{key}", throw_on_resolution_failure=False) for key in ("steps", "epochs")
    }
    try:
        merged = OmegaConf.merge(tree, values)
        for key, other in (("steps", "epochs"), ("epochs", "steps")):
            if length[key] is not None and length[other] is None:  # two ways to say how long: the later one counts
                merged = OmegaConf.merge(merged, {"train": {other: None}})
    except ConfigKeyError as error:
        raise UserError(f"there is no key {error.full_key!r} ({at}){_nearest_key(error.full_key or '')}") from error
    except (ValidationError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(_misfit(error, values, at)) from error
    assert isinstance(merged, DictConfig)
    return merged


def _nearest_key(key: str) -> str:
    if meant := meant_key(key):
        return f"; did you mean {meant!r}?"
    leaves = {known: known.rsplit(".", 1)[-1] for known in documentation()}
    leaf = difflib.get_close_matches(key.rsplit(".", 1)[-1], leaves.values(), 1, 0.7)
    near = difflib.get_close_matches(key, leaves, 1, 0.7) or [known for known, last in leaves.items() if last in leaf]
    return f"; did you mean {near[0]!r}?" if near else "; `trireme config` lists the keys"


def _misfit(error: Exception, values: DictConfig, at: str) -> str:
    for section in _SECTIONS:  # given as a value: OmegaConf does not say which
        given = OmegaConf.select(values, section[:-1])
        if given is not None and not isinstance(given, DictConfig):
            return f"{section[:-1]} ({at}) is {given!r}, but it is a section: write {section}KEY=VALUE"
    key = getattr(error, "full_key", None) or "the configuration"
    default = OmegaConf.select(OmegaConf.structured(Config), key, throw_on_missing=False)
    given = OmegaConf.select(values, key)
    if isinstance(default, ListConfig) and given is not None and not isinstance(given, ListConfig):
        example = _flow(OmegaConf.to_container(default) or [given])
        return f"{key} ({at}) is {given!r}, but it must be a list: write for instance '{key}={example}'"
    return f"{key} ({at}) does not fit: {str(error).splitlines()[0]}"


def _finished(tree: DictConfig, mistakes: list[str]) -> Config:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    validate(config, mistakes)
    return config
