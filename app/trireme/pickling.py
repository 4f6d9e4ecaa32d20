"""The pickle module of models in MLflow: MLflow's own, after making `app` Trireme's.

app/tracking/model.py passes it to `mlflow.pytorch.save_model` as pickle_module.
`mlflow.pytorch.load_model` then imports it before the model's classes, and with it `trireme`.
"""

from mlflow.pytorch.pickle_module import *  # noqa: F403
from mlflow.pytorch.pickle_module import Pickler, Unpickler  # noqa: F401
