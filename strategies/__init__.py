"""What parallelism is: torch only. Begin with README.md, then parallelize.py."""
