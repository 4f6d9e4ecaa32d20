"""What `mlflow.pytorch.load_model` reads a model with: MLflow's own way, once `app` is Trireme's.

app/tracking/model.py gives it to `mlflow.pytorch.save_model` as pickle_module. MLflow imports it before the model's
classes, and with it `trireme`.
"""

from mlflow.pytorch.pickle_module import *  # noqa: F403
from mlflow.pytorch.pickle_module import Pickler, Unpickler  # noqa: F401
