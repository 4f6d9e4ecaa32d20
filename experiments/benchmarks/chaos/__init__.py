"""Kills anything, again and again, and proves that nothing was lost. See README.md."""
