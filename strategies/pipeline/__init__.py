"""Pipeline parallelism; begin with schedules.py."""
