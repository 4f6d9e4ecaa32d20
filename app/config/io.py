"""Reads and writes a `Config`: defaults < YAML files < key=value.

Each mistake becomes one sentence that says where it is.
"""

import ast
import dataclasses
import difflib
import inspect
import pickle
import re
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    OmegaConfBaseException,
    UnsupportedValueType,
    ValidationError,
)

from app.config import Config
from app.config.batch_schedule import AUTO
from app.config.check import validate
from app.config.types import WORDS, example_of, fits, words_of
from app.config.words import meant_key, meant_number, remark_on
from app.errors import UserError
from app.names import parsed
from cluster.document import read_document
from strategies.options import STRATEGIES, Options

SECTIONS = tuple(
    field.name
    for field in dataclasses.fields(Config)
    if dataclasses.is_dataclass(field.default_factory)
)
"""The keys of the configuration that have keys below them, such as `train`."""
NUMBERS = (WORDS[int], WORDS[float])
NOT_YAML = (".py", ".ipynb", ".toml", ".csv", ".tsv", ".txt", ".jsonl", ".parquet", ".pt", ".npz")
"""Suffixes of files that are given in the place of an experiment."""
TYPOGRAPHIC_QUOTES = tuple("“”„‘’‚«»")
COMMENT_WIDTH = 110  # columns up to which `explain` fills a line of documentation


def load_config(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Config:
    """The configuration of some files, merged in order, with overrides on top.

    Args:
        files: Paths of YAML files.
        overrides: `key=value` with dotted keys, as on a command line.

    Raises:
        UserError: A file is missing or has no keys; a key is unknown; a value has the wrong type or
            is one that no run can use.
    """
    paths = [Path(file) for file in files]
    sources = [_Source(read_yaml(path), place=f"in {path}") for path in paths]
    parsed_overrides = _read_overrides(list(overrides))
    if parsed_overrides is not None:
        sources.append(_Source(parsed_overrides, place="on the command line"))
    tree, mistakes = _merge_all(sources)
    name_is_empty = not OmegaConf.is_interpolation(tree.run, "name") and not tree.run.name
    if paths and name_is_empty:
        tree = _merged(_copy(tree), {"run": {"name": paths[0].stem}})
    return _validated(tree, mistakes)


def from_dict(values: Mapping[str, Any], source: str = "the saved configuration") -> Config:
    """The configuration from which `to_dict` made a dictionary.

    Args:
        values: The dictionary.
        source: Where it was stored, for messages.

    Raises:
        UserError: A key is unknown, or a value does not fit.
    """
    created = OmegaConf.create(dict(values))
    tree, mistakes = _merge_all([_Source(created, place=f"in {source}")])
    return _validated(tree, mistakes)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of the configuration with other values for some dotted keys, which are not checked.

    Raises:
        KeyError: A dotted key goes below a value.
    """
    for key, value in values.items():
        config = _with_value(config, key, value)
    return config


def _with_value(section: Any, key: str, value: Any) -> Any:
    name, _, subkey = key.partition(".")
    if not subkey:
        return dataclasses.replace(section, **{name: value})
    subsection = getattr(section, name)
    if not dataclasses.is_dataclass(subsection):
        raise KeyError(key)
    return dataclasses.replace(section, **{name: _with_value(subsection, subkey, value)})


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries, ready for JSON and YAML."""
    return dataclasses.asdict(config)


def to_yaml(config: Config | Mapping[str, Any]) -> str:
    """All values of a configuration, or of its `to_dict`, as a YAML file for `load_config`."""
    tree = dict(config) if isinstance(config, Mapping) else to_dict(config)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` becomes `{"a.b": 1}`; empty mappings are left out."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# --- documentation ---


@lru_cache
def documentation() -> dict[str, str]:
    """The documentation of every dotted key: the string under its field."""
    docs: dict[str, str] = {}

    def visit(section: type, prefix: str) -> None:
        field_docs = _field_docs(section)
        for name, hint in typing.get_type_hints(section).items():
            docs[prefix + name] = field_docs.get(name, "")
            if dataclasses.is_dataclass(hint):
                visit(typing.cast(type, hint), f"{prefix}{name}.")

    visit(Config, "")
    return docs


def _field_docs(section: type) -> dict[str, str]:
    """The string under each field of a dataclass.

    A field whose default is `Options.NAME` has the string under that field of `Options`.
    """
    (definition,) = ast.parse(inspect.getsource(section)).body
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


def explain(config: Config) -> str:
    """The resolved configuration as YAML, each key under its documentation.

    It is also valid as an experiment file.
    """
    docs = documentation()
    lines: list[str] = []

    def visit(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> None:
        indent = "  " if prefix else ""
        for key, value in values.items():
            comment = textwrap.wrap(docs.get(prefix + key, ""), COMMENT_WIDTH - len(indent))
            lines.extend(f"{indent}# {line}" for line in comment)
            if not prefix and key in SECTIONS:
                lines.append(f"{key}:")
                visit(value, defaults[key], f"{key}.")
            else:
                is_default = value == defaults[key]
                note = "" if is_default else f"  # default: {_one_line_yaml(defaults[key])}"
                lines.append(f"{indent}{key}: {_one_line_yaml(value)}{note}")
            if not prefix:
                lines.append("")

    visit(to_dict(config), to_dict(Config()), "")
    return "\n".join(lines).rstrip() + "\n"


def _one_line_yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


# --- reading ---


@lru_cache
def _defaults() -> DictConfig:
    """The tree of all defaults, which nobody changes.

    It is made once, because making it takes as long as the rest of reading a configuration.
    """
    return OmegaConf.structured(Config)


@lru_cache
def _pickled_defaults() -> bytes:
    return pickle.dumps(_defaults())


def _copy(tree: DictConfig) -> DictConfig:
    """A copy of a tree that may be changed.

    OmegaConf's own, which each of its merges makes, takes three to five times as long, and was most
    of the time that reading a configuration took.
    """
    return pickle.loads(_pickled_defaults() if tree is _defaults() else pickle.dumps(tree))


def _merged(tree: DictConfig, values: Any) -> DictConfig:
    """The tree with values on top; neither may be used afterwards."""
    return typing.cast(DictConfig, OmegaConf.unsafe_merge(tree, values))


def read_yaml(file: Path) -> DictConfig:
    """The keys in a YAML file.

    Raises:
        UserError: The file cannot be read, has a key twice, or has no keys.
    """
    if file.is_dir():
        files = sorted(file.glob("*.y*ml"))
        example = f", such as {files[0]}" if files else ""
        raise UserError(f"{file} is a folder: write the path of a YAML file{example}")
    if not file.exists():
        hint = _similar_file(file)
        mistake = None if hint else _stray_word(str(file))
        missing = f"there is no file {file}{hint}: write the path of a YAML file"
        raise UserError(mistake or missing)
    if file.suffix in NOT_YAML:
        raise UserError(f"{file} is not a YAML file: {_instead_of(file)}")
    try:
        document = read_document(str(file), file.read_text())
        tree = OmegaConf.create(document.data if document.data is not None else {})
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not a text in UTF-8: write the path of a YAML file that is"
        ) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        if reason == "found character that cannot start any token":
            reason = (
                "a line begins with a tab, or a value with @ or `: indent with spaces, and put "
            )
            reason += "such a value in quotes"
        if reason == "but found another document":
            reason = "a line of --- begins another document: leave it out, or write two files"
        if isinstance(error, UnsupportedValueType):
            reason = f"the value of {error.full_key} is read as a date: put it in quotes"
        raise UserError(f"{file} cannot be read as YAML{place}: {reason}") from error
    if document.duplicates:
        duplicate = document.duplicates[0]
        raise UserError(f"{file} at line {duplicate.line}: {duplicate.message}")
    if not isinstance(tree, DictConfig):
        raise UserError(f"{file} holds no keys: write lines such as `task: image_classification`")
    return tree


def _instead_of(file: Path) -> str:
    """What to write instead of a file that holds no experiment."""
    if file.suffix != ".py":
        return f"write the path of one, in which data may be named: task_args: {{data: {file}}}"
    classes = [node for node in parsed(str(file)).body if isinstance(node, ast.ClassDef)]
    tasks = [node.name for node in classes if "Task" in map(ast.unparse, node.bases)]
    name = tasks[0] if tasks else "MyTask"
    return f"a task is written as task={'.'.join(file.with_suffix('').parts)}:{name}"


def _stray_word(word: str) -> str | None:
    """What is wrong with a word that is neither a file nor key=value; None if that is not known."""
    key = word.rstrip(":")
    is_plain = re.fullmatch(r"[\w-]+", word) is not None
    if word in STRATEGIES:
        return f"{word} is a strategy: write strategy={word}, or several, strategy=fsdp+{word}"
    if key not in documentation() and is_plain:
        key = meant_key(word) or key
    if key in documentation() and key not in SECTIONS:
        return f"{word} has no value: write {key}=VALUE, in one word"
    if word[0] in "–—":
        return f"{word} begins with a long dash: write --{word.lstrip('–—-')}"
    if word[0] == "~" and word[1:] in documentation():
        return f"{word} is written for Hydra: write {word[1:]}=null"
    if word[-1] in "]})":
        return (
            f"{word} closes a bracket of the word before it: put key=value in quotes if it has "
            "spaces, such as 'profile.steps=[1, 3]'"
        )
    if "\\" in word:
        return f"there is no file {word}: divide folders by /, as {word.replace(chr(92), '/')}"
    return None


def _similar_file(file: Path) -> str:
    """The end of a sentence about a file that is not there: a YAML file with a similar name."""
    stems = {path.stem: path for path in file.parent.glob("*.y*ml")}
    close = difflib.get_close_matches(file.stem, stems, n=1)
    return f" (did you mean '{stems[close[0]]}'?)" if close else ""


def _read_overrides(overrides: Sequence[str]) -> DictConfig | None:
    """The values of all overrides; None if there are none.

    Raises:
        UserError: One is not key=value, or its value is not valid YAML.
    """
    for override in overrides:
        _refuse_other_forms(override)
    if not overrides:
        return None
    try:
        values = OmegaConf.from_dotlist(list(overrides))
    except (yaml.YAMLError, OmegaConfBaseException):
        # Read one by one, the wrong one is known; two that only differ in kind are merged.
        return typing.cast(DictConfig, OmegaConf.merge(*map(_read_override, overrides)))
    for override in overrides:
        if "{" in override:
            _read_override(override)
    return values


def _refuse_other_forms(override: str) -> None:
    """Check that an override is written as key=value.

    Raises:
        UserError: It is not.
    """
    key, equals, value = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UserError(
            f"{override!r} is neither a YAML file nor key=value: write for instance train.steps=100"
        )
    if key[0] == "+":
        raise UserError(f"{override!r} is written for Hydra: write {override.lstrip('+')}")
    if value[:1] in TYPOGRAPHIC_QUOTES:
        raise UserError(
            f"the value of {key} is in typographic quotes: write it without, or with ' and \""
        )


def _read_override(override: str) -> DictConfig:
    key = override.partition("=")[0]
    try:
        read = OmegaConf.from_dotlist([override])
        _refuse_glued_keys(key, OmegaConf.to_container(read))
        return read
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"the value of {key} on the command line is not valid YAML: "
            f"""put it in double quotes within single ones, as '{key}="…"'"""
        ) from error


def _refuse_glued_keys(key: str, value: Any) -> None:
    """Check that no colon in braces lacks its space: {GPU:1} has the key "GPU:1" and no value.

    Raises:
        UserError: One does.
    """
    if isinstance(value, list):
        for item in value:
            _refuse_glued_keys(key, item)
    if not isinstance(value, dict):
        return
    for name, below in value.items():
        glued = re.fullmatch(r"(\w+):(\S+)", str(name))
        if glued is not None and below is None:
            raise UserError(
                f"{key} has {name!r}, in which a space after the colon is missing: write "
                f"{{{glued[1]}: {glued[2]}}}, and the whole of key=value in quotes"
            )
        _refuse_glued_keys(key, below)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Values that are put on top of others.

    Args:
        values: The values.
        place: Where they were written, such as "in a.yaml".
    """

    values: DictConfig
    place: str


def _merge_all(sources: Sequence[_Source]) -> tuple[DictConfig, list[str]]:
    """The defaults with all values on top that fit.

    Args:
        sources: The values, in the order in which they are merged.

    Returns:
        The tree, and a sentence for each value that does not fit.
    """
    try:
        # One copy for all sources; after a mistake it may have some values of a source.
        tree = _copy(_defaults())
        for source in sources:
            tree = _merge_into(tree, source)
        return tree, []
    except UserError:
        tree = _defaults()
    mistakes: list[str] = []
    for source in sources:
        tree = _merge_valid(tree, source, mistakes=mistakes)
    return tree, mistakes


def _merge_valid(tree: DictConfig, source: _Source, *, mistakes: list[str]) -> DictConfig:
    """The tree with those of the values that fit.

    Args:
        tree: The tree so far, which stays as it is.
        source: Values to put on top.
        mistakes: Gets a sentence for each value that does not fit.
    """
    try:
        return _merge_into(_copy(tree), source)
    except UserError as error:
        error_of_all = error
    # OmegaConf reports the first mistake only. Merging the values one by one finds them all.
    mistakes_before = len(mistakes)
    for part in _single_values(source.values):
        try:
            tree = _merge_into(_copy(tree), _Source(OmegaConf.create(part), source.place))
        except UserError as error:
            mistakes.append(str(error))
    each_fits_alone = len(mistakes) == mistakes_before
    if each_fits_alone:
        mistakes.append(str(error_of_all))
    return tree


def _single_values(values: DictConfig) -> list[dict[Any, Any]]:
    """Trees with one value each, with interpolations as they were written."""
    plain = typing.cast(dict[Any, Any], OmegaConf.to_container(values))
    parts: list[dict[Any, Any]] = []
    for key, value in plain.items():
        if key in SECTIONS and isinstance(value, dict):
            parts.extend({key: {name: subvalue}} for name, subvalue in value.items())
        else:
            parts.append({key: value})
    return parts


def _merge_into(tree: DictConfig, source: _Source) -> DictConfig:
    """The tree with the values on top; the tree may not be used afterwards.

    Raises:
        UserError: A key is unknown, or a value does not fit.
    """
    values = source.values
    place = source.place
    try:
        copied = _copy(values)
        # steps and epochs are two ways to say how long to train: the one that is read last counts.
        has_steps = _has_value(values, "train.steps")
        has_epochs = _has_value(values, "train.epochs")
        if has_steps and not has_epochs:
            OmegaConf.update(copied, "train.epochs", None)
        if has_epochs and not has_steps:
            OmegaConf.update(copied, "train.steps", None)
        # Likewise a batch that is read after a schedule of batches; auto begins with that batch.
        has_batch = _has_value(values, "train.global_batch_size")
        has_schedule = _has_value(values, "train.batch_schedule")
        has_rows = OmegaConf.select(tree, "train.batch_schedule") != AUTO
        if has_batch and has_rows and not has_schedule:
            OmegaConf.update(copied, "train.batch_schedule", [])
        return _merged(tree, copied)
    except ConfigKeyError as error:
        key = error.full_key or ""
        raise UserError(f"there is no key {error.full_key!r} ({place}){_key_hint(key)}") from error
    except (ValidationError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(_misfit(error, values, place)) from error


def _has_value(values: DictConfig, key: str) -> bool:
    return OmegaConf.select(values, key, throw_on_resolution_failure=False) is not None


def _key_hint(key: str) -> str:
    """The end of the sentence about an unknown key: which key may be meant."""
    if key in documentation():  # OmegaConf reads dots in a file as a part of the key
        section, _, name = key.rpartition(".")
        return f"; in a file its section comes first: `{section}: {{{name}: …}}`"
    meant = meant_key(key)
    remark = remark_on(key)
    if meant is None and remark is not None:
        return f"; {remark}"
    meant = meant or _similar_key(key.lower())
    return f"; did you mean {meant!r}?" if meant else "; `trireme config` lists the keys"


def _similar_key(key: str) -> str | None:
    """The key that is written most alike, or the first whose last part is."""
    known_keys = list(documentation())
    close_keys = difflib.get_close_matches(key, known_keys, n=1, cutoff=0.7)
    if close_keys:
        return close_keys[0]
    names = [known.rpartition(".")[2] for known in known_keys]
    close_names = difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.7)
    if close_names:
        return known_keys[names.index(close_names[0])]
    return None


def _misfit(error: Exception, values: DictConfig, place: str) -> str:
    """The sentence about a value that does not fit its key.

    Args:
        error: What OmegaConf raised.
        values: The values that were merged.
        place: Where they were written.
    """
    for section in SECTIONS:  # OmegaConf does not say which section was given a plain value
        written = OmegaConf.select(values, section)
        is_empty = written is None and section in values
        if is_empty:
            return (
                f"{section} ({place}) is empty, but it is a section: indent its keys below it, or "
                "leave it out"
            )
        if written is not None and not isinstance(written, DictConfig):
            example = f"{section}.KEY=VALUE"
            if isinstance(written, str) and f"{section}.name" in documentation():
                example = f"{section}.name={written}"
            return f"{section} ({place}) is {written!r}, but it is a section: write {example}"
    key = getattr(error, "full_key", None) or "the configuration"
    default = OmegaConf.select(_defaults(), key, throw_on_missing=False)
    written = OmegaConf.select(values, key)
    if (
        isinstance(default, ListConfig)
        and written is not None
        and not isinstance(written, ListConfig)
    ):
        example = _one_line_yaml(OmegaConf.to_container(default) or [written])
        return (
            f"{key} ({place}) is {written!r}, "
            f"but it must be a list: write for instance '{key}={example}'"
        )
    item = re.fullmatch(r"(.+?)(?:\[\d+\])+", key)
    full_key = item[1] if item else key
    hint = _hint_of(full_key)
    if hint is None:
        return f"{key} ({place}) does not fit: {str(error).splitlines()[0]}"
    written = OmegaConf.select(values, full_key, throw_on_resolution_failure=False)
    if OmegaConf.is_config(written):
        written = OmegaConf.to_container(written)
    default = OmegaConf.select(_defaults(), full_key, throw_on_missing=False)
    if OmegaConf.is_config(default):
        default = OmegaConf.to_container(default)
    example = f"for instance {example_of(full_key, hint, default)}"
    number = meant_number(written) if words_of(hint) in NUMBERS else None
    if number is not None and fits(number, hint):
        example = f"{full_key}={number}"
    return (
        f"{full_key} ({place}) is {'empty' if written is None else repr(written)}, "
        f"but it must be {words_of(hint)}: write {example}"
    )


def _hint_of(key: str) -> Any:
    """The type of a key or, below a mapping, of its values; None if there is no such key."""
    hint: Any = Config
    for name in key.split("."):
        if dataclasses.is_dataclass(hint):
            hint = typing.get_type_hints(hint).get(name)
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        else:
            return None
    return hint


def _validated(tree: DictConfig, mistakes: list[str]) -> Config:
    """The tree as a `Config`.

    Raises:
        UserError: There are mistakes already, or a value is one that no run can use.
    """
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rpartition("resolving interpolation: ")[2].strip('"')
        key = error.full_key or "the configuration"
        raise UserError(f"{key} cannot be resolved: {reason}") from error
    assert isinstance(config, Config)
    validate(config, mistakes)
    if config.train.batch_schedule and not config.train.grows_by_itself:
        # What has to fit, in memory or among workers, is the largest batch.
        largest = config.train.batches.largest
        config = _with_value(config, "train.global_batch_size", largest)
    return config
