"""Seeded kills of anything, at any moment, and what came of them; see README.md."""
