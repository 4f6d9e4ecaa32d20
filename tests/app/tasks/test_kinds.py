"""Kinds of models of Hugging Face: their losses are the library's, and their figures add up."""

import itertools
import json
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

from app.config.io import load_config
from app.data.loader import tensors
from app.data.sound import read_sound, sound_length
from app.errors import UserError
from app.planner.read import BATCHES, Reader
from app.run.prepare import prepare, read_task
from app.tasks.huggingface.conversations import IGNORED
from app.tasks.huggingface.questions import _scores
from app.tasks.huggingface.spans import LONGEST_ANSWER, best_spans
from app.tasks.huggingface.speech import changes
from app.tasks.huggingface.tagging import Entities
from app.tasks.huggingface.task import HuggingFace
from app.tracking.model import _save
from app.tracking.model_files import write_model_files
from app.training.evaluation import evaluate
from app.training.job import Heartbeat
from strategies.parallelize import choose, parallelize
from tests.app.kit import logged, training_of
from tests.app.tasks.test_tasks import CPU, built_model, one_batch
from tests.app.tasks.test_tasks_huggingface import SMALL
from tests.pool import run_distributed

BERT = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = SMALL | {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 8}
WAV2VEC2 = SMALL | {
    "conv_dim": [8, 8],
    "conv_kernel": [20, 16],
    "conv_stride": [20, 16],
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 32,
    "dropout": 0.0,
}
CLIP = {
    "text_config": SMALL | {"max_position_embeddings": 24},
    "vision_config": SMALL | {"image_size": 16, "patch_size": 8},
    "projection_dim": 8,
}
LLAVA = {
    "text_config": SMALL | {"max_position_embeddings": 128},
    "vision_config": SMALL | {"image_size": 16, "patch_size": 8, "num_hidden_layers": 3},
    "image_seq_length": 4,
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
TEXTS: dict[str, dict[str, Any]] = {
    "masked_lm": {"data": "text.txt", "sequence_length": 16},
    "token_classification": {"data": "tagged.jsonl"},
    "question_answering": {"data": "asked.jsonl", "sequence_length": 40, "stride": 4},
}
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"model": "bert", "config": BERT, **args} for kind, args in TEXTS.items()},
    "ctc": {"model": "wav2vec2", "config": WAV2VEC2, "data": "transcripts.jsonl"},
    "speech_seq2seq": {"model": "whisper", "config": WHISPER, "data": "transcripts.jsonl"},
    "image_text": {"model": "clip", "config": CLIP, "data": "shown.jsonl"},
    "image_text_to_text": {"model": "llava", "config": LLAVA, "data": "asked_of_pictures.jsonl"},
    "semantic_segmentation": {
        "model": "segformer",
        "config": SEGFORMER,
        "data": "drawn",
        "image_size": 32,
    },
}
"""Arguments of the task by kind."""
FIGURES = {
    "masked_lm": {"accuracy", "perplexity"},
    "token_classification": {"accuracy", "precision", "recall", "f1"},
    "question_answering": {"exact_match", "f1"},
    "ctc": {"word_error_rate", "character_error_rate"},
    "speech_seq2seq": {"accuracy", "perplexity"},
    "image_text": {"text_accuracy", "image_accuracy"},
    "image_text_to_text": {"accuracy", "perplexity"},
    "semantic_segmentation": {"accuracy", "mean_iou"},
}
"""What evaluations show besides the loss."""


def arguments(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """The task's arguments for a small model of a kind."""
    args = {"kind": kind, **KINDS[kind], **changes}
    return args | {"data": str(folder / args["data"])}


def make_task(kind: str, folder: Path, **changes: Any) -> Any:
    return HuggingFace(**arguments(kind, folder, **changes))


def evaluated(task: Any, model: Any, *, batch_size: int) -> dict[str, float]:
    """The task's metrics over its held-out data."""
    parallel = parallelize(lambda: model, choose("single", 1), device=CPU)
    return evaluate(
        task,
        parallel,
        task.eval_data(),
        batch_size=batch_size,
        data_rank=0,
        device=CPU,
        heartbeat=Heartbeat(),
    )


# --- every kind -----------------------------------------------------------------------------------


def own_labels(kind: str, targets: Any) -> dict[str, Any]:
    """What the library calls the targets, with which a model computes its own loss."""
    if kind == "question_answering":
        first, last = targets["positions"].flatten(0, 1).unbind(-1)
        return {"start_positions": first, "end_positions": last}
    if kind == "image_text":
        return {"return_loss": True}
    if kind == "image_text_to_text":  # the library moves labels by one token itself
        return {"labels": torch.nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORED)}
    return {"labels": targets["labels"] if kind == "ctc" else targets}


def samples_of_one_length(task: Any) -> Any:
    """A batch without padding."""
    samples = task.train_data()
    full = [i for i in range(len(samples)) if samples[i][0]["attention_mask"].sum() == 40]
    assert len(full) > 1
    return samples.__getitems__(full)


MODERNBERT = {"model": "modernbert", "config": MODERN}
GROUP_NORM = {"config": WAV2VEC2 | {"feat_extract_norm": "group"}}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in KINDS),
        *((kind, MODERNBERT) for kind in TEXTS),
        ("ctc", GROUP_NORM),
    ],
)
def test_the_loss_is_the_librarys_own(kind: str, changes: dict[str, Any], files: Path) -> None:
    task = make_task(kind, files, **changes)
    model = built_model(task)
    inputs, targets = one_batch(task)
    if kind == "question_answering":  # the library lets padding be an answer
        inputs, targets = samples_of_one_length(task)
    library = model(**task.arguments(inputs), **own_labels(kind, targets)).loss
    loss = task.loss(model, (inputs, targets))
    assert loss.item() == pytest.approx(library.item(), rel=1e-5)
    mine = gradients(loss, model)
    theirs = gradients(library, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert mine.keys() == theirs.keys() == trained
    for name, gradient in mine.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-3, atol=1e-6), name


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a loss by the names of parameters, of those that have one."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "image_text"])
def test_figures_are_those_of_all_the_data_in_batches_of_any_size(kind: str, files: Path) -> None:
    task = make_task(kind, files, eval_samples=11)
    model = built_model(task)
    in_one_batch = evaluated(task, model, batch_size=11)
    assert evaluated(task, model, batch_size=2) == pytest.approx(in_one_batch, rel=1e-5)
    assert in_one_batch.keys() == {"loss"} | FIGURES[kind]


@pytest.mark.parametrize(
    ("kind", "changes"), [*((kind, {}) for kind in KINDS), ("token_classification", MODERNBERT)]
)
def test_an_exported_model_answers_alike_in_plain_transformers(
    kind: str, changes: dict[str, Any], files: Path, tmp_path: Path
) -> None:
    """And what people have goes in, and their words come out."""
    import transformers

    task = make_task(kind, files, **changes)
    model = built_model(task).eval()
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    task.write_folder(folder)
    loaded = getattr(transformers, task.recipe.model_class).from_pretrained(folder)
    preprocessor = task.preprocessor()
    assert preprocessor is not None
    mine = preprocessor(preprocessor.example)
    theirs = prepared_by_the_library(kind, preprocessor.example, folder)
    if kind in TEXTS:
        assert theirs.keys() == mine.keys()
    for name, value in theirs.items():
        assert torch.allclose(value, mine[name].to(value.dtype), atol=1e-5), name
    with torch.no_grad():
        answer = task.answer(model(**mine))
        loaded_answer = task.answer(loaded(**mine))
        words = preprocessor.predict(model, preprocessor.example)
    # The library reads weights at other addresses, by which some processors round otherwise.
    for value, loaded_value in zip(tensors(answer), tensors(loaded_answer), strict=True):
        assert torch.allclose(value, loaded_value, atol=1e-5, rtol=1e-5)
    assert len(words) == 1


def prepared_by_the_library(kind: str, example: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The model's arguments for what people have, by the processors of an exported folder."""
    import transformers

    options: dict[str, Any] = {"return_tensors": "pt"}
    if kind in TEXTS:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return dict(tokenizer(*example.iloc[0].tolist(), **options))
    if kind in ("ctc", "speech_seq2seq"):
        extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        return dict(extractor(list(example), sampling_rate=16_000, **options))
    tokenized = {}
    if kind == "image_text_to_text":
        processor = transformers.LlavaProcessor.from_pretrained(folder)
        question = f"<image>\n{example['text'][0]}"
        text = processor.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        return dict(processor(images=[Image.new("RGB", (1, 1))], text=[text], **options))
    if kind == "image_text":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenized = dict(tokenizer(example["text"].tolist(), **options))
        tokenized.pop("token_type_ids", None)
        picture = Image.new("RGB", (1, 1))
    else:
        picture = Image.fromarray(example[0])
    config = json.loads((folder / "preprocessor_config.json").read_text())
    processor_class = getattr(transformers, config["image_processor_type"])
    processor = processor_class.from_pretrained(folder)
    return {**tokenized, **processor(picture, **options)}


@pytest.mark.parametrize(
    "kind", ["ctc", pytest.param("semantic_segmentation", marks=pytest.mark.slow)]
)
def test_mlflow_gets_a_model_that_answers_what_people_have(
    kind: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has a parametrized weight, and one hooks into itself when it is called."""
    import mlflow.pyfunc

    monkeypatch.setattr(sys, "path", [*sys.path])
    task = make_task(kind, files)
    model = built_model(task)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    recipe = {
        "task": "huggingface",
        "task_args": arguments(kind, files),
        "cwd": str(tmp_path),
        "weights": str(tmp_path / "weights.pt"),
    }
    write_model_files(task, recipe, tmp_path / "files")
    _save(tmp_path / "files", "0" * 32, tmp_path)
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    preprocessor = task.preprocessor()
    answer = loaded.predict(preprocessor.example)
    mine = preprocessor.predict(model.eval(), preprocessor.example)
    assert str(answer) == str(mine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_reads_the_longest_sample(kind: str, files: Path) -> None:
    task = make_task(kind, files)
    reader = Reader(task)
    samples = task.train_data()
    sizes = [tensors(samples[number])[0].numel() for number in range(len(samples))]
    assert tensors(reader._batches[BATCHES[0]])[0].numel() == BATCHES[0] * max(sizes)


TRACED = ("masked_lm",)
"""The kind that `make test` traces; in others' plans the same is read of other models."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in TRACED)) for kind in KINDS],
)
def test_a_plan_reads_the_costs_of_every_kind(kind: str, files: Path) -> None:
    assert Reader(make_task(kind, files)).costs().parts


def test_texts_that_become_classes_and_texts_are_planned_by_the_longest(data: Path) -> None:
    for file in ("reviews.csv", "pairs.csv"):
        model = "bert" if file == "reviews.csv" else "t5"
        task = HuggingFace(model=model, data=str(data / file), config={"num_labels": 2})
        samples: Any = task.train_data()
        lengths = [
            sum(tensor.numel() for tensor in inputs if tensor.dim())
            for inputs, _ in map(samples.__getitem__, range(len(samples)))
        ]
        assert lengths[samples.longest_sample] == max(lengths)


# --- masks ----------------------------------------------------------------------------------------


def test_masks_hide_what_bert_hides_and_depend_on_the_position_only(data: Path) -> None:
    (data / "long.txt").write_text("abcdefgh " * 20_000)
    task = make_task("masked_lm", data, data="long.txt", sequence_length=128)
    samples: Any = task.train_data()
    tokenizer = task.tokenizer
    picks = list(range(600))
    inputs, targets = samples.batch_at(picks, picks)
    seen = inputs["input_ids"]
    hidden = targets != IGNORED
    assert hidden.float().mean().item() == pytest.approx(0.15 * 126 / 128, abs=0.005)
    share = (seen[hidden] == tokenizer.mask_token_id).float().mean().item()
    assert share == pytest.approx(0.8, abs=0.02)
    kept = (seen[hidden] == targets[hidden]).float().mean().item()
    assert kept == pytest.approx(0.1, abs=0.02)
    assert (seen[:, 0] == tokenizer.cls_token_id).all() and not hidden[:, 0].any()
    assert (seen[:, -1] == tokenizer.sep_token_id).all() and not hidden[:, -1].any()
    text = torch.where(hidden, targets, seen)[:, 1:-1]
    assert bytes(text[0].tolist()) == ("abcdefgh " * 14).encode()
    one_by_one = [samples.batch_at([pick], [pick])[0]["input_ids"] for pick in picks[:5]]
    assert torch.equal(torch.cat(one_by_one), seen[:5])
    later, _ = samples.batch_at(picks, [pick + 600 for pick in picks])
    assert not torch.equal(later["input_ids"], seen), "another epoch hides others"


def test_a_masked_model_is_not_guessed(data: Path) -> None:
    """People fine-tune such models as classifiers, without saying so."""
    task = make_task("masked_lm", data)
    folder = data / "bert"
    built_model(task).save_pretrained(folder)
    task.write_folder(folder)
    args: Any = {"model": str(folder), "pretrained": True, "data": str(data / "reviews.csv")}
    classifier = HuggingFace(**args)
    assert classifier.kind == "sequence_classification"
    tagged = HuggingFace(
        **args | {"kind": "token_classification", "data": str(data / "tagged.jsonl")}
    )
    assert built_model(tagged).classifier.out_features == 3


# --- entities -------------------------------------------------------------------------------------


def spans(labels: list[str]) -> set[tuple[int, int, str]]:
    """The entities of a sentence, as conlleval reads them."""
    entities = set()
    begin = None
    for place, label in enumerate([*labels, "O"]):
        before = labels[place - 1] if place else "O"
        continues = label.startswith("I-") and before[2:] == label[2:]
        if begin is not None and not continues:
            entities.add((begin, place, before[2:]))
            begin = None
        if label != "O" and not continues:
            begin = place
    return entities


def test_entities_are_counted_as_conlleval_counts_them() -> None:
    classes = ["O", "B-A", "I-A", "B-B", "I-B"]
    counter = Entities(classes)
    generator = random.Random(0)
    for _ in range(200):
        rows = 3
        words = 9
        labelled = [[generator.choice(classes) for _ in range(words)] for _ in range(rows)]
        predicted = [
            [label if generator.random() < 0.7 else generator.choice(classes) for label in row]
            for row in labelled
        ]
        is_word = [[generator.random() < 0.7 for _ in range(words)] for _ in range(rows)]
        targets = torch.tensor(
            [
                [
                    classes.index(label) if used else IGNORED
                    for label, used in zip(*row, strict=True)
                ]
                for row in zip(labelled, is_word, strict=True)
            ]
        )
        answers = torch.tensor([[classes.index(label) for label in row] for row in predicted])
        counts = counter.count(answers, targets)
        pairs = [
            (
                spans([label for label, used in zip(found_row, use, strict=True) if used]),
                spans([label for label, used in zip(there_row, use, strict=True) if used]),
            )
            for found_row, there_row, use in zip(predicted, labelled, is_word, strict=True)
        ]
        assert counts["found"] == sum(len(mine) for mine, _ in pairs)
        assert counts["there"] == sum(len(right) for _, right in pairs)
        assert counts["right"] == sum(len(mine & right) for mine, right in pairs)
    assert not Entities(["noun", "verb"]).types and Entities(["O", "I-X"]).types == 1


def test_sentences_in_conlls_form_are_those_in_json(data: Path) -> None:
    rows = [json.loads(line) for line in (data / "tagged.jsonl").read_text().splitlines()]
    sentences = [
        "\n".join(f"{word} NN {label}" for word, label in zip(row["tokens"], row["labels"]))
        for row in rows
    ]
    (data / "tagged.conll").write_text("-DOCSTART- -X- O\n\n" + "\n\n".join(sentences) + "\n")
    one = make_task("token_classification", data).train_data()
    other = make_task("token_classification", data, data="tagged.conll").train_data()
    assert one.sentences == other.sentences


def test_a_words_class_is_learnt_at_its_first_token(data: Path) -> None:
    task = make_task("token_classification", data, eval_samples=0)
    samples: Any = task.train_data()
    index = next(i for i, (words, _) in enumerate(samples.sentences) if words[0] == "Alan")
    inputs, targets = samples[index]
    characters = [chr(token) if token < 256 else "" for token in inputs["input_ids"].tolist()]
    classes = task._data.classes
    learnt = [
        (character, classes[target])
        for character, target in zip(characters, targets.tolist(), strict=True)
        if target != IGNORED
    ]
    words, labels = samples.sentences[index]
    assert classes == ["O", "B-PER", "I-PER"]
    assert [label for _, label in learnt] == labels
    assert [letter for letter, _ in learnt] == ["A", *(" " for _ in words[1:])] or [
        letter for letter, _ in learnt
    ] == [word[0] for word in words]


# --- questions ------------------------------------------------------------------------------------


def test_answers_are_found_where_they_are(data: Path) -> None:
    """A model that points at the right tokens has the right answers, in windows too."""
    task = make_task("question_answering", data, eval_samples=12, stride=14)

    class Right:
        """Puts all weight on the targets of the window that has the answer."""

        def __init__(self, positions: torch.Tensor) -> None:
            self.positions = positions

        def __call__(self, **inputs: Any) -> Any:
            rows, length = inputs["input_ids"].shape
            logits = torch.zeros(rows, length, 2)
            flat = self.positions.flatten(0, 1).clamp(min=0)
            has_answer = flat[:, 1] > 0
            logits[torch.arange(rows), flat[:, 0], 0] = torch.where(has_answer, 9.0, 1.0)
            logits[torch.arange(rows), flat[:, 1], 1] = torch.where(has_answer, 9.0, 1.0)
            logits[torch.arange(rows), 0] += 2.0
            start, end = logits.unbind(-1)
            return SimpleNamespace(start_logits=start, end_logits=end)

    samples: Any = task.eval_data()
    batch = samples.__getitems__(range(len(samples)))
    inputs, targets = batch
    assert inputs["input_ids"].shape[1] > 1, "some contexts take several windows"
    metrics = task.metrics(Right(targets["positions"]), batch)
    assert metrics["exact_match"] == metrics["f1"] == 1.0


def test_the_best_span_is_the_best_of_all_spans() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 40, 2)
    is_context = torch.rand(3, 2, 40) < 0.6
    is_context[2, 1] = False
    best = best_spans(logits, is_context)
    for row in range(3):
        candidates = [
            (float(logits[row, w, i, 0] + logits[row, w, j, 1]), w, i, j)
            for w, i, j in itertools.product(range(2), range(40), range(40))
            if i <= j < i + LONGEST_ANSWER and is_context[row, w, i] and is_context[row, w, j]
        ]
        score, *place = max(candidates)
        assert [int(best.window[row]), int(best.first[row]), int(best.last[row])] == place
        nothing = min(float(logits[row, w, 0].sum()) for w in range(2) if is_context[row, w].any())
        assert float(best.margin[row]) == pytest.approx(score - nothing, abs=1e-5)


@pytest.mark.parametrize(
    ("answer", "right", "exact", "f1"),
    [
        ("The cat sat.", ["a cat sat"], 1, 1),
        ("the cat", ["cat sat down", "dog"], 0, 0.5),
        ("", [], 1, 1),
        ("cat", [], 0, 0),
        ("the", ["an"], 1, 1),
        ("dog", ["cat"], 0, 0),
    ],
)
def test_answers_agree_as_squad_says(answer: str, right: list[str], exact: int, f1: float) -> None:
    assert _scores(answer, right) == (exact, pytest.approx(f1))


def test_squads_own_file_has_the_same_questions(data: Path) -> None:
    rows = [json.loads(line) for line in (data / "asked.jsonl").read_text().splitlines()]
    paragraphs = []
    for row in rows:
        answers = [
            {"text": text, "answer_start": begin}
            for text, begin in zip(*row["answers"].values(), strict=True)
        ]
        qas = [{"id": "x", "question": row["question"], "answers": answers}]
        paragraphs.append({"context": row["context"], "qas": qas})
    (data / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    one = make_task("question_answering", data)
    other = make_task("question_answering", data, data="squad.json")
    mine, theirs = one_batch(one), one_batch(other)
    assert torch.equal(mine[0]["input_ids"], theirs[0]["input_ids"])
    assert torch.equal(mine[1]["positions"], theirs[1]["positions"])


# --- wrong data -----------------------------------------------------------------------------------

TAGS = '{"tokens": ["a"], "labels": ["O"]}\n'
ASKED = {"question": "who?", "context": "Ada", "answers": {"text": ["Ada"], "answer_start": [0]}}
WRONG = [
    (
        "token_classification",
        TAGS + '{"words": ["a"]}',
        "wrong.jsonl:2 is not a sentence with labels",
    ),
    (
        "token_classification",
        TAGS + '{"tokens": ["a"], "labels": ["O", "O"]}',
        "wrong.jsonl:2 has 1 words and 2 labels; write one label for each word",
    ),
    (
        "token_classification",
        '{"tokens": [1], "labels": ["O"]}',
        "1 has a word that is not text",
    ),
    (
        "token_classification",
        '{"tokens": ["a"], "labels": [0.5]}',
        "1 has a label that is neither",
    ),
    ("token_classification", TAGS, "has 1 sentences; at least two are needed"),
    (
        "question_answering",
        '{"question": "who?"}',
        "wrong.jsonl:1 is not a question with its answer",
    ),
    (
        "question_answering",
        json.dumps(ASKED | {"answers": {"text": ["da"], "answer_start": [0]}}),
        "wrong.jsonl:1: the answer 'da' is not at character 0 of the context",
    ),
    (
        "question_answering",
        json.dumps(ASKED | {"question": "who " * 99}),
        "wrong.jsonl:1 has a question of 395 tokens, which leaves too little room",
    ),
    ("question_answering", json.dumps(ASKED | {"context": " "}), "wrong.jsonl:1 has an empty cont"),
    ("question_answering", '{"data": [{"title": 1}]}', "at least two are needed"),
    ("question_answering", '{"data": [3]}', "has `data` without paragraphs of `qas`"),
    ("question_answering", json.dumps(ASKED), "has 1 questions; at least two are needed"),
]


@pytest.mark.parametrize(("kind", "content", "message"), WRONG)
def test_a_wrong_line_is_named_in_one_sentence(
    kind: str, content: str, message: str, data: Path
) -> None:
    if "395 tokens" in message:
        content += "\n" + content
    (data / "wrong.jsonl").write_text(content)
    with pytest.raises(UserError) as raised:
        make_task(kind, data, data="wrong.jsonl")
    sentence = str(raised.value)
    assert message in sentence and "\n" not in sentence and len(sentence) < 300


def test_a_wrong_argument_of_a_kind_is_told(data: Path) -> None:
    with pytest.raises(UserError, match=r"mask_fraction is 15; it must be between 0 and 1"):
        make_task("masked_lm", data, mask_fraction=15)
    with pytest.raises(UserError, match=r"stride is for question_answering, but this model is for"):
        make_task("masked_lm", data, stride=15)
    (data / "wrong.conll").write_text("Ada B-PER\nsleeps\n")
    with pytest.raises(UserError, match=re.escape("wrong.conll:2 has a word without a label")):
        make_task("token_classification", data, data="wrong.conll")


SAID = {"audio": "clips/0.wav", "text": "low"}
SHOWN = {"image": "pictures/0.png", "text": "a picture"}
OF_PICTURE = {"image": "pictures/0.png", "prompt": "What is it?", "answer": "a picture"}
DRAWN = {"image": "drawn/images/0.png", "mask": "drawn/masks/0.png"}
WRONG_FILES = [
    ("ctc", {"sound": "a.wav", "text": "a"}, "jsonl:2 does not name a file and its text; write"),
    ("ctc", SAID | {"audio": "clips/no.wav"}, "jsonl:2 names "),
    ("ctc", SAID | {"audio": "transcripts.jsonl"}, "soundfile"),
    ("ctc", SAID | {"audio": "broken.wav"}, "broken.wav cannot be read as sound"),
    ("ctc", SAID | {"text": " "}, "jsonl:2 has an empty text; leave the line out"),
    ("ctc", SAID | {"text": "ab" * 20}, "frames of sound for 40 characters; leave the line"),
    ("speech_seq2seq", SAID | {"audio": "long.wav"}, "takes 1.5 s, of which the model hears 1;"),
    ("image_text", SHOWN | {"text": 3}, "jsonl:2 does not name a file and its text; write"),
    (
        "image_text_to_text",
        SHOWN,
        "jsonl:2 is not a conversation about a picture; write lines such",
    ),
    ("image_text_to_text", OF_PICTURE | {"images": []}, "jsonl:2 has 0 pictures; write one for"),
    (
        "image_text_to_text",
        OF_PICTURE | {"prompt": "<image> or <image>?"},
        "jsonl:2 has 2 times <image>, but one picture; write it once",
    ),
    ("image_text_to_text", OF_PICTURE | {"answer": "<image>"}, "jsonl:2 has <image> in an answer"),
    (
        "image_text_to_text",
        OF_PICTURE | {"prompt": "what " * 40},
        "jsonl:2: no answer begins in the first 128 tokens; write a larger task_args.sequence_len",
    ),
    ("semantic_segmentation", DRAWN | {"mask": "pictures/0.png"}, "has RGB pixels; a mask has"),
    ("semantic_segmentation", DRAWN | {"mask": "no.png"}, "no.png, which is not there"),
]


@pytest.mark.parametrize(("kind", "line", "message"), WRONG_FILES)
def test_a_wrong_file_is_named_in_one_sentence(
    kind: str, line: dict[str, Any], message: str, files: Path
) -> None:
    (files / "broken.wav").write_bytes(b"RIFF????WAVE")
    wavfile.write(files / "long.wav", 16_000, np.zeros(24_000, np.int16))
    right = {
        "image_text": SHOWN,
        "image_text_to_text": OF_PICTURE,
        "semantic_segmentation": DRAWN,
    }.get(kind, SAID)
    (files / "wrong.jsonl").write_text(f"{json.dumps(right)}\n{json.dumps(line)}")
    with pytest.raises(UserError) as raised:
        make_task(kind, files, data="wrong.jsonl")
    sentence = str(raised.value)
    assert message in sentence and "\n" not in sentence and len(sentence) < 400


def test_a_recording_of_another_rate_or_a_missing_picture_is_told(files: Path) -> None:
    """They are read when they are fetched."""
    wavfile.write(files / "slow.wav", 8_000, np.zeros(16_000, np.int16))
    lines = [SAID, SAID | {"audio": "slow.wav"}]
    (files / "wrong.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = make_task("ctc", files, data="wrong.jsonl", eval_samples=0)
    with pytest.raises(UserError, match=r"jsonl:2: .* has 8,000 samples a second, .* -ar 16000"):
        task.train_data().__getitems__([0, 1])
    lines = [SHOWN, SHOWN | {"image": "no.png"}]
    (files / "wrong.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = make_task("image_text", files, data="wrong.jsonl", eval_samples=0)
    with pytest.raises(UserError, match=r"jsonl:2 names .*no\.png, which is not there"):
        task.train_data().__getitems__([0, 1])


# --- pictures to text -----------------------------------------------------------------------------


def test_conversations_about_pictures_have_the_same_samples_in_every_usual_form(
    files: Path,
) -> None:
    answer = {"role": "assistant", "content": "a picture"}
    question = [{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]
    named = [{"type": "image", "path": "pictures/0.png"}, question[1]]
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "a picture"},
    ]
    forms: list[dict[str, Any]] = [
        OF_PICTURE,
        {"image": "pictures/0.png", "messages": [{"role": "user", "content": question}, answer]},
        {"messages": [{"role": "user", "content": named}, answer]},
        {"image": "pictures/0.png", "conversations": turns},
        {"images": ["pictures/0.png"], "question": "<image>\nWhat is it?", "answer": "a picture"},
    ]
    (files / "forms.jsonl").write_text("\n".join(map(json.dumps, forms)))
    task = make_task("image_text_to_text", files, data="forms.jsonl", eval_samples=0)
    samples: Any = task.train_data()
    first_inputs, first_targets = samples[0]
    learnt = first_targets[first_targets != IGNORED]
    assert task.tokenizer.decode(learnt) == "a picture<|im_end|>\n"
    for inputs, targets in map(samples.__getitem__, range(1, len(forms))):
        assert torch.equal(targets, first_targets)
        assert all(torch.equal(inputs[name], first_inputs[name]) for name in first_inputs)


def test_what_a_model_of_pictures_does_not_read_and_what_is_frozen_is_not_trained(
    files: Path,
) -> None:
    def frozen(**changes: Any) -> set[str]:
        model = built_model(make_task("image_text_to_text", files, **changes))
        return {
            name.partition("vision_tower.")[2] or name
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }

    # LLaVA reads the last layer but one.
    unread = frozen()
    assert unread and all(".2." in name or "post_layernorm" in name for name in unread)
    of_tower = frozen(freeze=["vision_tower"])
    assert of_tower > unread and not any("language_model" in name for name in of_tower)
    rest = frozen(freeze=["vision_tower", "language_model", "lm_head"])
    assert not any("multi_modal_projector" in name for name in rest) and rest > of_tower
    message = "task_args.freeze: the model has no part 'vision_towr' (did you mean 'vision_tower'?)"
    with pytest.raises(UserError, match=re.escape(message)):
        frozen(freeze=["vision_towr"])
    with pytest.raises(UserError, match="does not make a fixed number of tokens of a picture"):
        make_task("image_text_to_text", files, model="qwen2_vl", config={})


def test_adapters_of_a_model_of_pictures_are_trained_but_where_nothing_is_read(
    files: Path,
) -> None:
    folder = files / "llava"
    first = make_task("image_text_to_text", files)
    built_model(first).save_pretrained(folder)
    first.write_folder(folder)
    args = {"model": str(folder), "config": {}, "pretrained": True, "lora": {"r": 2}}
    task = make_task("image_text_to_text", files, **args)
    model = built_model(task)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    task.loss(model, one_batch(task)).backward()
    assert all("lora" in name for name, _ in trained)
    assert all(parameter.grad is not None for _, parameter in trained)
    assert torch.equal(task.train_data()[0][0]["input_ids"], first.train_data()[0][0]["input_ids"])


def test_the_library_trainer_has_the_same_losses_on_pictures(files: Path, tmp_path: Path) -> None:
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    task = make_task("image_text_to_text", files, eval_samples=0)
    samples: Any = task.train_data()
    steps = 6

    def batch(step: int) -> Any:
        return samples.__getitems__([2 * step, 2 * step + 1])

    def collated(picks: list[int]) -> dict[str, Any]:
        inputs, targets = samples.__getitems__(picks)
        labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORED)
        return {**inputs, "labels": labels}

    model = built_model(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        loss = task.loss(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    arguments_of_trainer = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(
        model=built_model(task),
        args=arguments_of_trainer,
        train_dataset=list(range(2 * steps)),
        data_collator=collated,
    )
    trainer.train()
    logged_losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged_losses == pytest.approx(losses, abs=1e-4)  # it logs four digits
    assert losses[-1] < losses[0]


# --- speech ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "scale", "offset"),
    [(np.int16, 32_768, 0), (np.int32, 2**31, 0), (np.uint8, 128, 128), (np.float32, 1, 0)],
)
def test_sound_of_every_type_is_read_alike(
    dtype: Any, scale: float, offset: int, tmp_path: Path
) -> None:
    wave = np.array([[0.0, 0.0], [0.5, 0.5], [-1.0, -1.0], [0.25, -0.25]])
    wavfile.write(tmp_path / "a.wav", 16_000, (wave * scale + offset).astype(dtype))
    assert read_sound(tmp_path / "a.wav", 16_000, "a line").tolist() == [0.0, 0.5, -1.0, 0.0]
    assert sound_length(tmp_path / "a.wav", "a line") == 4


@pytest.mark.parametrize(
    ("recognized", "right", "count"),
    [("", "abc", 3), ("abc", "abc", 0), ("axc", "abc", 1), ("kitten", "sitting", 3), ("ab", "", 2)],
)
def test_changes_are_counted_as_levenshtein_counts_them(
    recognized: str, right: str, count: int
) -> None:
    assert changes(recognized, right) == changes(right, recognized) == count


def test_error_rates_are_those_of_what_is_read(files: Path) -> None:
    """A model that writes the text with one wrong word and repetitions of frames."""
    task = make_task("ctc", files, eval_samples=6)
    samples: Any = task.eval_data()
    inputs, targets = samples.__getitems__(range(6))
    wrong = task.tokenizer("low")["input_ids"]

    class Writer:
        def __call__(self, **arguments: Any) -> Any:
            frames = int(task._data.frames(arguments["input_values"].shape[1]))
            logits = torch.zeros(6, frames, len(task.tokenizer))
            for row, labels in enumerate(targets["labels"].tolist()):
                ids = [label for label in labels if label != IGNORED]
                ids = ids if row else wrong
                twice = [each for label in ids for each in (label, label, 0)]
                for frame in range(frames):
                    logits[row, frame, twice[frame] if frame < len(twice) else 0] = 9.0
            return SimpleNamespace(logits=logits)

    metrics = task.metrics(Writer(), (inputs, targets))
    figures = task.derived({name: float(value) for name, value in metrics.items()})
    texts = [recording.text for recording in samples.recordings]
    words = sum(len(text.split()) for text in texts)
    assert figures["word_error_rate"] == pytest.approx(changes(["low"], texts[0].split()) / words)
    assert figures["character_error_rate"] == pytest.approx(
        changes("low", texts[0]) / sum(map(len, texts))
    )


def test_a_mamba_is_split_in_every_way_but_along_its_sequence(data: Path) -> None:
    config = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    args: Any = {"model": "mamba", "config": config, "data": str(data / "text.txt")}
    task = HuggingFace(**args)
    assert task.kind == "causal_lm" and len(task.blocks(task.structure()) or []) == 2
    with pytest.raises(UserError, match=r"layers of \w+, which parallel\.cp cannot split"):
        task.context_plan(task.structure())


def test_a_contrastive_loss_is_known_to_gather_before_it_starts(files: Path) -> None:
    """Else people would be told that their samples depend on one another."""
    task_args = json.dumps(arguments("image_text", files))

    def notes(*overrides: str) -> tuple[str, ...]:
        run_config = load_config(
            [],
            [
                "task=huggingface",
                f"task_args={task_args}",
                "train.steps=2",
                "train.global_batch_size=4",
                "train.eval_every=1",
                *overrides,
            ],
        )
        return tuple(prepare(run_config, read_task(run_config), 2, devices_per_node=2).notes)

    (note,) = notes("strategy=ddp")
    assert "write train.eval_batch_size" in note
    with pytest.raises(UserError, match="a pipeline has one micro-batch at a time"):
        notes("strategy=pipeline", "parallel.pp=2")


def test_adapters_are_trained_with_a_new_head(data: Path) -> None:
    """What people do with a masked language model."""
    folder = data / "bert"
    masked = make_task("masked_lm", data)
    built_model(masked).save_pretrained(folder)
    masked.write_folder(folder)
    for kind, head in (
        ("token_classification", "classifier"),
        ("question_answering", "qa_outputs"),
    ):
        args = {"model": str(folder), "config": {}, "pretrained": True, "lora": {"r": 2}}
        task = make_task(kind, data, **args)
        model = built_model(task)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert all("lora" in name or head in name for name in trained)
        assert any(head in name for name in trained) and any("lora" in name for name in trained)
        assert task.loss(model, one_batch(task)).isfinite()


# --- layouts --------------------------------------------------------------------------------------

PIPELINE = ("pipeline", {"pp": 2}, 1e-5)
DATA: list[tuple[str, dict[str, int], float]] = [("ddp", {}, 1e-5), ("fsdp", {}, 1e-5)]
TENSOR = ("tensor", {}, 2e-5)
LAYOUTS: dict[str, list[tuple[str, dict[str, int], float]]] = {
    "masked_lm": [*DATA, TENSOR, PIPELINE],
    "token_classification": [*DATA, TENSOR, PIPELINE],
    "question_answering": [*DATA, TENSOR, PIPELINE],
    "ctc": [*DATA, TENSOR, PIPELINE],
    "speech_seq2seq": [*DATA, TENSOR],
    "image_text": [*DATA, TENSOR],
    "image_text_to_text": [*DATA, TENSOR, PIPELINE],
    # Its batch normalisation is of each worker's own samples.
    "semantic_segmentation": [TENSOR],
}


def trained(
    rank: int, folder: str, args: Any, layouts: Any, world: int
) -> list[tuple[list[float], dict[str, float]]]:
    """For each layout the losses and the evaluation of a short run."""
    results = []
    for strategy, degrees, _ in layouts:
        overrides = [
            "task=huggingface",
            f"task_args={json.dumps(args)}",
            "train.steps=3",
            "train.global_batch_size=4",
            "train.eval_batch_size=5",
            "train.log_every=1",
            "optimizer.lr=0.01",
            *(f"parallel.{name}={degree}" for name, degree in degrees.items()),
        ]
        training, events = training_of(
            load_config([], overrides), folder, rank, world, strategy=strategy
        )
        training.run()
        losses = [event.values["train/loss"] for event in logged(events, "train/loss")]
        evaluations = [event.values for event in logged(events, "eval/loss")]
        results.append((losses, dict(*evaluations)))
    return results


IN_TWO_LAYOUTS: dict[str, list[tuple[str, dict[str, int], float]]] = {
    "masked_lm": [DATA[1], TENSOR],
    "token_classification": [DATA[0], PIPELINE],
    "question_answering": [DATA[0], PIPELINE],
    "ctc": [DATA[0], PIPELINE],
    "image_text": [DATA[0], TENSOR],
}
"""What `make test` trains: each kind once, and each layout with one of the kinds."""


def _kinds() -> list[Any]:
    """Kinds with their layouts."""
    rows = []
    for kind, layouts in LAYOUTS.items():
        rows.append(pytest.param(kind, layouts, marks=pytest.mark.slow, id=kind))
        if kind in IN_TWO_LAYOUTS:
            rows.append(pytest.param(kind, IN_TWO_LAYOUTS[kind], id=f"{kind} in two layouts"))
    return rows


@pytest.mark.alone
@pytest.mark.parametrize(("kind", "layouts"), _kinds())
def test_every_layout_has_the_losses_and_the_figures_of_one_device(
    kind: str, layouts: list[tuple[str, dict[str, int], float]], files: Path, tmp_path: Path
) -> None:
    args = arguments(kind, files, eval_samples=5)
    ((losses, evaluation),) = trained(0, str(tmp_path), args, [("single", {}, 0)], 1)
    assert all(map(math.isfinite, losses))
    results, _ = run_distributed(trained, 2, str(tmp_path), args, layouts, 2)
    for (strategy, _, tolerance), result in zip(layouts, results, strict=True):
        assert result[0] == pytest.approx(losses, rel=tolerance), strategy
        if kind != "image_text" or strategy == "tensor":  # whose figures are of one batch each
            # Rounding may change the class of a pixel between two classes.
            assert result[1] == pytest.approx(evaluation, rel=1e-2), strategy
