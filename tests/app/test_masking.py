"""Secrets are hidden, and what only looks like one is not."""

import pytest

from app.masking import is_secret, mask_text, mask_tree

SECRETS = ["password", "db.Password", "hf_token", "apiKey", "AWS_SECRET_ACCESS_KEY", "x.credentials.user"]
OTHERS = ["tokenizer", "train/tokens_per_second", "monkey", "task_args.d_model", "pad_token", "label_key", "key"]


def test_names_of_secrets_and_of_none() -> None:
    assert [name for name in (*SECRETS, *OTHERS, "token.x") if is_secret(name)] == SECRETS


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:pa55@host:5000/x", "http://***@host:5000/x"),
        ("postgresql+psycopg2://u:p@ss@db/x and more", "postgresql+psycopg2://***@db/x and more"),
        ("https://h/a?x=1&api_token=abc&y=2", "https://h/a?x=1&api_token=***&y=2"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("mail me@example.org", "mail me@example.org"),
        ("hf_token: abc\nuri: http://u:p@h\ntokenizer: bpe\n", "hf_token: ***\nuri: http://***@h\ntokenizer: bpe\n"),
        ("train x.yaml task_args.password='a b' a=b", "train x.yaml task_args.password=*** a=b"),
        ('{"password": "a b", "n": 1}', '{"password": ***, "n": 1}'),
    ],
)
def test_secrets_in_a_text(text: str, masked: str) -> None:
    assert mask_text(text) == masked


def test_secrets_in_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "runs")
    assert mask_text("said runs twice") == "said *** twice"
    assert mask_tree({"a": "runs", "storage": "./runs"}) == {"a": "***", "storage": "./runs"}, (
        "part of a word is not it"
    )
    inner = {"b": 1, "secret": "x", "none": None, "empty": {}}
    masked = mask_tree({"a": inner, "list": ["http://u:p@h", 2], "token": 5, "key": "c", "hf_token": "abc"})
    hidden = {"b": 1, "secret": "***", "none": None, "empty": {}}
    assert masked == {"a": hidden, "list": ["http://***@h", 2], "token": 5, "key": "c", "hf_token": "***"}
