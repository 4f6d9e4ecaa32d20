"""The answers to a wrong task, or wrong arguments of one: one sentence each."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.errors
import numpy as np
import pytest

from app.errors import UserError
from app.tasks import load_task
from app.tasks.build import build_model
from app.tasks.huggingface.task import HuggingFace
from tests.app.tasks.test_tasks_huggingface import GPT2, GROUPED, SMALL

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from app.tasks.base import Task

class Mine(Task):
    def __init__(self, *, width: int, depth: int = 2) -> None:
        self.width, self.depth = width, depth

class Free(Task):
    def __init__(self, **anything) -> None:
        self.anything = anything

class Failing(Task):
    def __init__(self) -> None:
        {}["key"]

class Bare(Task):
    pass

class Lazy(Task):
    def build_model(self):
        return nn.LazyLinear(3)

    def train_data(self):
        return TensorDataset(torch.zeros(4, 2))

    def loss(self, model, batch):
        return model(batch[0]) @ torch.zeros(5)

class Other:
    pass
"""
TALK = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
FILES = {
    "own_tasks.py": OWN,
    "own_broken.py": "import torch\nwidth = 1 / 0\n",
    "own_syntax.py": "def f(:\n",
    "own_needs.py": "import surely_not_installed\n",
    "text.txt": "some text " * 100,
    "short.txt": "short",
    "table.csv": "price,weight,shop,only\n1.5,2,a,x\n2.5,3,b,x\n3.5,4,a,x\n,5,b,x\n",
    "lonely.csv": "price\n1.5\n2.5\n",
    "bare.csv": "price,weight\n,1\n,2\n3,4\n",
    "infinite.csv": "price,weight\n1.5,1\ninf,2\n",
    "text.csv": "text,label,target\na,b,c\n",
    "other.jsonl": TALK + "{}",
    "asked.jsonl": TALK + '{"messages": [{"role": "user", "content": "?"}]}',
    "one.jsonl": TALK,
    "two.jsonl": TALK * 2,
    "number.jsonl": TALK + '{"messages": [{"role": "assistant", "content": 3}]}',
}


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's folder, with data and tasks; its modules are forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokens.bin").write_bytes(np.arange(1000, dtype=np.uint16).tobytes())
    images = np.zeros((8, 8, 8), dtype=np.uint8)
    labels = np.arange(8) % 4
    np.savez(tmp_path / "good.npz", images=images, labels=labels)
    np.savez(tmp_path / "one_class.npz", images=images, labels=0 * labels)
    np.savez(
        tmp_path / "odd_test.npz",
        x_train=images,
        y_train=labels,
        x_test=images[:, :4],
        y_test=0 * labels,
    )
    np.savez(
        tmp_path / "new_label.npz",
        x_train=images,
        y_train=labels,
        x_test=images,
        y_test=np.arange(8),
    )
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


IMAGES = "image_classification"
TEXT = "language_modelling"
TABLE = "tabular"
MODEL = "huggingface"
LLAMA: dict[str, Any] = {"model": "llama", "config": GROUPED, "data": "text.txt"}
CHAT = LLAMA | {"kind": "instructions"}
PRICE = {"data": "table.csv", "target": "price"}
MIXED: dict[str, Any] = {"data": "text.txt", "mixture": {"n_experts": 2}}
ROBERTA: dict[str, Any] = {"model": "roberta", "data": "table.csv", "config": SMALL}

BAD: list[tuple[str, dict[str, Any], str]] = [
    # The name of the task.
    ("", {}, "no task is given; write task: image_classification, language_modelling"),
    (
        "image_clasification",
        {},
        "no task 'image_clasification' (did you mean 'image_classification'?)",
    ),
    ("own_tasks.Mine", {}, "no task 'own_tasks.Mine' (did you mean 'own_tasks:Mine'?)"),
    ("own_task:Mine", {}, "there is no module 'own_task' on Python's path"),
    ("own_tasks:Mime", {}, "module own_tasks has no Mime (did you mean 'Mine'?)"),
    ("own_tasks:Other", {}, "Other must be a subclass of trireme.Task"),
    # its arguments
    (
        "own_tasks:Mine",
        {"widht": 3},
        "has no such argument (did you mean 'width'?); it takes width, depth",
    ),
    ("own_tasks:Mine", {"depth": 3}, "needs task_args.width, which is not given"),
    ("own_tasks:Bare", {"width": 3}, "it takes no arguments"),
    # Images.
    (
        IMAGES,
        {"data": "good.npz", "classes": 3},
        "label 3 of image 3 is out of range; with 3 classes labels are 0 to",
    ),
    (IMAGES, {"data": "one_class.npz"}, "has one class only"),
    (IMAGES, {"data": "odd_test.npz"}, "they must agree"),
    (IMAGES, {"data": "new_label.npz"}, "label 4 of image 4 is out of range"),
    (
        IMAGES,
        {"data": "good.npz", "model": "restnet"},
        "task_args.model is 'restnet' (did you mean 'resnet'?)",
    ),
    (
        IMAGES,
        {"data": "good.npz", "model_args": {"classes": 3}},
        "task_args.model_args.classes: the model has no such",
    ),
    (IMAGES, {"data": "good.npz", "model_args": {"hidden": "many"}}, "do not make a model"),
    (IMAGES, {"data": "good.npz", "model_args": [1]}, "it must be a mapping"),
    (
        IMAGES,
        {"data": "good.npz", "model_args": {"widths": [4] * 4}},
        "halves an image of 8×8 to nothing",
    ),
    (
        IMAGES,
        {"data": "good.npz", "model": "resnet", "model_args": {"depth": 20}},
        "of depth 20; write 18, 34, 50",
    ),
    (
        IMAGES,
        {"data": "good.npz", "model": "resnet", "model_args": {"norm": "layer"}},
        "no norm 'layer' for a ResNet",
    ),
    (
        IMAGES,
        {"data": "good.npz", "eval_samples": 8},
        "write a whole number below 8, the number of samples",
    ),
    (IMAGES, {"data": "good.npz", "augment_shift": -1}, "task_args.augment_shift is -1"),
    # Language.
    (TEXT, {"data": "short.txt"}, "5 tokens do not fill one sequence of 256"),
    (TEXT, {"data": "text.txt", "vocab_size": 100}, "vocab_size is 100, but the tokenizer has 256"),
    (TEXT, {"data": "tokens.bin"}, "task_args.vocab_size is needed"),
    (TEXT, {"data": "tokens.bin", "vocab_size": 999}, "holds token 999, but vocab_size is 999"),
    (
        TEXT,
        {"data": "tokens.bin", "vocab_size": 1000, "token_dtype": "int8"},
        "task_args.token_dtype is 'int8'",
    ),
    (
        TEXT,
        {"data": ["tokens.bin", "text.txt"]},
        "mixes token files (tokens.bin) with text (text.txt)",
    ),
    (
        TEXT,
        {"data": "text.txt", "n_layers": "4"},
        "task_args.n_layers is '4', but task 'language_modelling' takes a whole number",
    ),
    (TEXT, {"data": "text.txt", "n_heads": 256}, "heads of an even size"),
    (
        TEXT,
        MIXED | {"mixture": {"n_experts": 2, "top_k": 3}},
        "top_k is 3, but there are 2 experts",
    ),
    (TEXT, MIXED | {"d_hidden": 64}, "write task_args.mixture.d_expert"),
    (
        TEXT,
        {"data": ["https://h/a.parquet", "https://h/b.jsonl"]},
        "task_args.data mixes files of json, parquet",
    ),
    # Tables.
    (TABLE, {"data": "table.csv"}, "task_args.target is needed"),
    (TABLE, {"data": "table.csv", "target": "prize"}, "no column 'prize' (did you mean 'price'?)"),
    (TABLE, PRICE | {"ignore": ["wait"]}, "task_args.ignore: table.csv has no column 'wait'"),
    (
        TABLE,
        PRICE | {"kind": "regress"},
        "task_args.kind is 'regress' (did you mean 'regression'?)",
    ),
    (TABLE, PRICE | {"target": "shop", "kind": "regression"}, "holds text such as 'a'"),
    (TABLE, PRICE | {"target": "only"}, "has one value only, x"),
    (TABLE, PRICE | {"kind": "classification"}, "column 'price' holds fractions"),
    (TABLE, {"data": "infinite.csv", "target": "price"}, "column 'price' holds infinite numbers"),
    (TABLE, {"data": "lonely.csv", "target": "price"}, "no column besides the target"),
    (TABLE, {"data": "bare.csv", "target": "price"}, "has 1 rows with a value in 'price'"),
    # Models of Hugging Face.
    (MODEL, LLAMA | {"model": "lama"}, "no model type 'lama' (did you mean 'llama'?)"),
    (MODEL, LLAMA | {"model": "./nowhere"}, "there is no folder"),
    (MODEL, LLAMA | {"model": 3}, "task_args.model is 3"),
    (MODEL, LLAMA | {"pretrained": "yes"}, "true or false"),
    (MODEL, LLAMA | {"attention": "fast"}, "fast"),
    (MODEL, LLAMA | {"kind": "translation"}, "task_args.kind is 'translation'"),
    (
        MODEL,
        LLAMA | {"kind": "image_classification"},
        "llama is made for causal_lm or instructions or",
    ),
    (MODEL, LLAMA | {"model": "sam", "config": {}}, "sam is made for none of"),
    (
        MODEL,
        LLAMA | {"model": "gemma3", "config": {}},
        "is made of several models (text_config, vision_config)",
    ),
    (
        MODEL,
        LLAMA | {"model": "gemma4_assistant", "config": {}},
        "gemma4_assistant has no configuration that makes",
    ),
    (MODEL, LLAMA | {"config": {"hidden_siz": 3}}, "did you mean 'hidden_size'?"),
    (MODEL, LLAMA | {"config": {"hidden_size": "wide"}}, "expected int, got str"),
    (
        MODEL,
        LLAMA | {"config": GROUPED | {"vocab_size": 100}},
        "vocab_size is 100, but the tokenizer has 256",
    ),
    (MODEL, LLAMA | {"pretrained": True}, "'llama' is a model type without weights"),
    (
        MODEL,
        LLAMA | {"model": "gpt2", "config": GPT2 | {"n_positions": 4}, "sequence_length": 8},
        "has 4 positions",
    ),
    (MODEL, CHAT | {"data": "other.jsonl"}, "other.jsonl:2 is not a conversation with an answer"),
    (MODEL, CHAT | {"data": "asked.jsonl"}, "asked.jsonl:2 is not a conversation with an answer"),
    (MODEL, CHAT | {"data": "number.jsonl"}, "number.jsonl:2 is not a conversation with an answer"),
    (MODEL, LLAMA | {"lora": 8}, "task_args.lora is 8; write a mapping"),
    (
        MODEL,
        LLAMA | {"lora": {"rank": 2}},
        "task_args.lora.rank: lora has no such argument; it takes r, alpha,",
    ),
    (MODEL, LLAMA | {"lora": {"r": 2}}, "write task_args.pretrained=true and a folder"),
    (MODEL, LLAMA | {"config": 3}, "task_args.config is 3; it must be a mapping"),
    (MODEL, LLAMA | {"model": "llama", "config": None, "data": "tokens.bin"}, "vocab_size"),
    (MODEL, CHAT | {"data": "one.jsonl"}, "one.jsonl has 1 conversations; at least two are needed"),
    (
        MODEL,
        CHAT | {"data": "two.jsonl", "sequence_length": 4},
        "no answer begins in the first 4 tokens",
    ),
    (
        MODEL,
        CHAT | {"model": "bloom", "config": {}, "data": "two.jsonl"},
        "bloom takes no position_ids",
    ),
    (MODEL, ROBERTA | {"data": ["table.csv"]}, "write the path of a .csv or .parquet file"),
    (
        MODEL,
        ROBERTA | {"text": "price", "label": "shop"},
        "column 'price' of table.csv holds numbers",
    ),
    (MODEL, ROBERTA | {"data": "text.csv"}, "text.csv has 1 rows with a text and a label"),
    (MODEL, {"model": "t5", "data": "text.csv"}, "text.csv has 1 rows with both texts"),
    (MODEL, ROBERTA | {"sequence_length": 511}, "has 510 positions"),
    (
        MODEL,
        {"model": "vit", "data": "digits", "sequence_length": 8},
        "sequence_length is for causal_lm",
    ),
    (
        MODEL,
        {"model": "vit", "data": "digits", "config": SMALL | {"patch_size": 5}},
        "patch_size is 5",
    ),
]


OWN_CODE = [
    (
        "own_broken:Mine",
        "does not import: ZeroDivisionError: division by zero",
        "own_broken.py",
        2,
        "width = 1 / 0",
    ),
    ("own_syntax:Mine", "does not import: SyntaxError: ", "own_syntax.py", 1, "def f(:"),
    (
        "own_needs:Mine",
        "own_needs needs 'surely_not_installed', which is not installed",
        "own_needs.py",
        1,
        "import ",
    ),
    ("own_tasks:Failing", "cannot be made: KeyError: 'key'", "own_tasks.py", 17, '{}["key"]'),
]


@pytest.mark.parametrize(("name", "says", "file", "number", "line"), OWN_CODE)
def test_what_ones_own_code_raises_is_one_sentence_and_its_line(
    name: str, says: str, file: str, number: int, line: str
) -> None:
    with pytest.raises(UserError) as raised:
        load_task(name, {})
    sentence, place, source = str(raised.value).split("\n")
    assert (
        says in sentence and f'{file}", line {number}' in place and source.strip().startswith(line)
    )


@pytest.mark.parametrize(("name", "task_args", "message"), BAD)
def test_bad_input_is_answered_with_one_sentence(
    name: str, task_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        load_task(name, task_args)
    sentence = str(raised.value)
    assert message in sentence
    assert "\n" not in sentence and len(sentence) < 400 and not sentence.endswith(".")


def test_a_mistake_with_a_models_folder_is_one_sentence() -> None:
    def refused(**task_args: Any) -> str:
        with pytest.raises(UserError) as caught:
            HuggingFace(model="saved", data="text.txt", **task_args).build_model()
        return str(caught.value)

    saved = Path("saved")
    args = {"pretrained": True, "tokenizer": "bytes"}
    HuggingFace(**LLAMA).build_model().save_pretrained(saved)  # type: ignore[operator]
    assert "no tokenizer.json" in refused(pretrained=True)
    message = refused(**args, config={"num_hidden_layers": 3})
    assert "are of another model: model.layers.2." in message
    message = refused(**args, lora={"r": 0})
    assert "task_args.lora.r is 0; it must be a whole number of at least 1" in message
    message = refused(**args, lora={"alpha": 0})
    assert "task_args.lora.alpha is 0; it must be a number above 0" in message
    message = refused(**args, lora={"dropout": 1})
    assert "task_args.lora.dropout is 1; it must be at least 0" in message
    message = refused(**args, lora={"targets": "q_proj"})
    assert "task_args.lora.targets is 'q_proj'; write auto" in message
    unknown = refused(**args, lora={"targets": ["qproj"]})
    assert "task_args.lora does not fit the model" in unknown and "qproj" in unknown
    (saved / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in refused(**args)
    (saved / "model.safetensors").unlink()
    assert "has no weights" in refused(pretrained=True)
    (saved / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "has no configuration that makes a model" in refused()
    (saved / "config.json").unlink()
    assert "has no config.json" in refused()


def test_a_missing_hub_or_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = mock.Mock(side_effect=huggingface_hub.errors.LocalEntryNotFoundError("no route"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    message = r"'somebody/else' cannot be fetched from the hub .* does not answer"
    with pytest.raises(UserError, match=message):
        HuggingFace(**LLAMA | {"model": "somebody/else"})
    response = mock.Mock(headers={}, request=None)
    for kind in (
        huggingface_hub.errors.RepositoryNotFoundError,
        huggingface_hub.errors.GatedRepoError,
    ):
        unreachable.side_effect = kind("401", response=response)
        with pytest.raises(UserError, match="there is no such model, or it needs a login"):
            HuggingFace(**LLAMA | {"model": "somebody/else"})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'trireme\[huggingface\]'"):
        HuggingFace(**LLAMA)


def test_a_task_of_ones_own_is_found_where_trireme_was_started() -> None:
    assert vars(load_task("own_tasks:Mine", {"width": 3})) == {"width": 3, "depth": 2}
    assert vars(load_task("own_tasks:Free", {"whatever": 1})) == {"anything": {"whatever": 1}}


def test_a_loss_that_fails_with_sized_lazy_layers_is_one_sentence() -> None:
    message = r"lazy layers, such as weight, .* \(RuntimeError: .*: give them their sizes"
    with pytest.raises(UserError, match=message):
        build_model(load_task("own_tasks:Lazy", {}))


def test_a_users_package_may_be_called_app(tmp_path: Path) -> None:
    import app

    old_path = app.__path__
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine_too.py").write_text(OWN + "\nfrom app.mine_net import WIDTH\n")
    (tmp_path / "app" / "mine_net.py").write_text("WIDTH = 3\n")
    (tmp_path / "app" / "config.py").write_text(OWN + "\nclass Config(Mine):\n    pass\n")
    try:
        assert load_task("app.mine_too:Mine", {"width": 3}).width == 3  # type: ignore[attr-defined]
        message = r"the configuration takes Config from app.config, which is both Trireme's"
        with pytest.raises(UserError, match=message):
            load_task("app.config:Config", {"width": 3})
    finally:
        app.__path__ = old_path
        vars(app).pop("__getattr__", None)
        for name in ("app.mine_too", "app.mine_net"):
            sys.modules.pop(name, None)
