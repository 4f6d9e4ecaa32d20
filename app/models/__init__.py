"""Models: plain single-device PyTorch, one file each, drawing initial weights from torch's global generator."""
