"""Data for the tests of tasks, and a pretrained model in a folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

from app.data.randomness import seed_everything
from app.tasks import load_task


@pytest.fixture
def data(tmp_path: Path, text: str, own_cache: Path) -> Path:
    """A folder with text.txt, reviews.csv, talk.jsonl (conversations), pairs.csv (of texts),
    preferred.jsonl (of answers), tagged.jsonl (sentences) and asked.jsonl (questions)."""
    rows = []
    for i in range(40):
        mood, label = ("good", "yes") if i % 2 else ("bad", "no")
        rows.append(f"{mood} {'day ' * (1 + i * 7 % 5)},{label}")
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows, ",yes", "lost,"]) + "\n")
    conversations = []
    for i in range(24):
        question = {"role": "user", "content": f"{i} + {i}?"}
        answer = {"role": "assistant", "content": f"it is {2 * i}"}
        conversations.append([question, answer] * (1 + i % 3))
    (tmp_path / "talk.jsonl").write_text(
        "\n".join(json.dumps({"messages": messages}) for messages in conversations)
    )
    pairs = [f"count to {i},{' '.join(map(str, range(i % 7)))}." for i in range(24)]
    (tmp_path / "pairs.csv").write_text("\n".join(["text,target", *pairs]))
    answers = [
        {"prompt": f"{i} + {i} = ", "chosen": f"{2 * i}", "rejected": "who knows?"[: 4 + i % 7]}
        for i in range(24)
    ]
    (tmp_path / "preferred.jsonl").write_text("\n".join(map(json.dumps, answers)))
    people = ("Ada", "Alan Turing", "Grace Hopper")
    sentences = []
    questions = []
    for i in range(24):
        person = people[i % 3].split()
        verbs = ["never"] * (i % 4) + ["sleeps"]
        labels = ["B-PER", "I-PER"][: len(person)] + ["O"] * len(verbs)
        sentences.append({"tokens": [*person, *verbs], "labels": labels})
        context = f"{'It was late. ' * (i % 4)}{people[i % 3]} {' '.join(verbs)}."
        answers = {"text": [people[i % 3]], "answer_start": [context.index(people[i % 3])]}
        if i % 6 == 5:
            answers = {"text": [], "answer_start": []}
        questions.append({"question": "Who sleeps?", "context": context, "answers": answers})
    (tmp_path / "tagged.jsonl").write_text("\n".join(map(json.dumps, sentences)))
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return tmp_path


@pytest.fixture
def files(data: Path) -> Path:
    """The folder of `data` with recordings, pictures and masks."""
    generator = np.random.default_rng(0)
    transcripts = []
    shown = []
    asked = []
    for name in ("clips", "pictures", "drawn/images", "drawn/masks"):
        (data / name).mkdir(parents=True)
    for i in range(12):
        seconds = 0.5 + i % 4 / 10
        times = np.arange(int(16_000 * seconds)) / 16_000
        wave = np.sin(2 * np.pi * (200 + 100 * (i % 3)) * times) / 2
        wavfile.write(data / f"clips/{i}.wav", 16_000, (wave * 32_000).astype(np.int16))
        text = " ".join(["low", "mid", "high"][(i + k) % 3] for k in range(1 + i % 2))
        transcripts.append({"audio": f"clips/{i}.wav", "text": text})
        pixels = generator.integers(0, 256, (20 + i, 24, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(data / f"pictures/{i}.png")
        shown.append({"image": f"pictures/{i}.png", "text": f"picture {'very ' * (i % 3)}{i}"})
        question = {"role": "user", "content": f"<image>\nWhat is {'it ' * (1 + i % 3)}?"}
        answer = {"role": "assistant", "content": f"a picture {'very ' * (i % 3)}{i}"}
        asked.append({"image": f"pictures/{i}.png", "messages": [question, answer]})
        classes = (pixels[..., 0] > 128).astype(np.uint8) + (pixels[..., 1] > 200)
        classes[:2] = 255
        Image.fromarray(pixels).save(data / f"drawn/images/{i}.png")
        Image.fromarray(classes.astype(np.uint8)).save(data / f"drawn/masks/{i}.png")
    (data / "transcripts.jsonl").write_text("\n".join(map(json.dumps, transcripts)))
    (data / "asked_of_pictures.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (data / "shown.jsonl").write_text("\n".join(map(json.dumps, shown)))
    return data


@pytest.fixture
def base(data: Path) -> Path:
    """The folder of `data` with a pretrained Llama in `base`."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "vocab_size": 264,
    }
    args = {
        "model": "llama",
        "config": sizes,
        "data": str(data / "text.txt"),
        "sequence_length": 8,
    }
    task = load_task("huggingface", args)
    seed_everything(5)
    task.build_model().save_pretrained(data / "base")  # type: ignore[operator]
    task.write_folder(data / "base")  # type: ignore[attr-defined]
    return data
