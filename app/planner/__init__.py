"""The planner: what fits, how fast and at what cost, before anything is started. README.md says how it works."""
