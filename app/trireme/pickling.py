"""The pickle module of models in MLflow: MLflow's own, after making `app` Trireme's.

A model's folder `data` in MLflow names it (app/tracking/model_files.py).
`mlflow.pytorch.load_model` imports it before the model's classes, and with it `trireme`.
"""

from mlflow.pytorch.pickle_module import *  # noqa: F403
from mlflow.pytorch.pickle_module import Pickler, Unpickler  # noqa: F401
