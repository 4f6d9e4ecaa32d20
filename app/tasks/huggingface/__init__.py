"""Any causal language model, text classifier or image classifier of Hugging Face's `transformers`.

`task.py` is the task. `find.py` says where a model is and of what kind, `model.py` makes it, `data.py` gives it its
data and learns from it what the model must be, `tokenizer.py` and `labelled_text.py` turn texts into numbers, and
`plan.py` says how it may be split. transformers is imported when a task is made, not before.
"""

from app.tasks.huggingface.task import HuggingFace

__all__ = ["HuggingFace"]
