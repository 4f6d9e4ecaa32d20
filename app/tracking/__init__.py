"""Tracking: one spool per run, read by one writer process; training never waits for MLflow."""

from app.tracking.delivery import Delivery, sync
from app.tracking.settings import Settings, resolve_tracking, run_url, ui_command
from app.tracking.system import SystemSampler
from app.tracking.tracker import Tracker

__all__ = ["Delivery", "Settings", "SystemSampler", "Tracker", "resolve_tracking", "run_url", "sync", "ui_command"]
