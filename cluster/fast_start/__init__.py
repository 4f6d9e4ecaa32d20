"""An accelerator: worker processes forked from a warm one, and a lean private Ray. The folder can be deleted."""
