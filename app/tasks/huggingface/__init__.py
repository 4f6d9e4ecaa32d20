"""Any causal language model, text classifier or image classifier of Hugging Face's `transformers`, which is imported
when a task is made, not before."""

from app.tasks.huggingface.task import HuggingFace

__all__ = ["HuggingFace"]
